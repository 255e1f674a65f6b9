// Adam (Kingma and Ba, arXiv:1412.6980), AdamW's decay (arXiv:1711.05101) and AMSGrad (Reddi et al., ICLR 2018).
// States: first moment, second moment, and with AMSGrad the largest second moment so far.
// No include guard: it is included once per instruction set. deepspeed/ops/adam/cpu_adam.py has the same in torch.

constexpr int NUM_STATES = 3;
constexpr int COMMON_STATES = 2;  // without AMSGrad

struct Constants {
    V grad_factor, l2, beta1, grad_to_first, beta2, square_to_second, root_factor, eps, decay, step_size;
    bool has_l2, amsgrad;
};

DS_INLINE Constants constants(const Pass& pass) {
    const float* s = pass.scalars;
    return {broadcast(s[0]), broadcast(s[1]), broadcast(s[2]), broadcast(s[3]), broadcast(s[4]), broadcast(s[5]),
            broadcast(s[6]), broadcast(s[7]), broadcast(s[8]), broadcast(s[9]), s[1] != 0.0f,    pass.num_states == 3};
}

DS_INLINE V update(const Constants& k, V param, V grad, V* states) {
    grad = grad * k.grad_factor;
    // Skipped without L2: 0 * infinity would be NaN.
    if (k.has_l2) grad = grad + param * k.l2;
    states[0] = states[0] * k.beta1 + grad * k.grad_to_first;
    states[1] = states[1] * k.beta2 + grad * grad * k.square_to_second;
    V second = states[1];
    if (k.amsgrad) {
        // This way round a NaN in the second moment is taken over.
        states[2] = second <= states[2] ? states[2] : second;
        second = states[2];
    }
    const V denominator = square_root(second) * k.root_factor + k.eps;
    return param * k.decay - states[0] / denominator * k.step_size;
}
