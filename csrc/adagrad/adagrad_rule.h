// Adagrad (Duchi et al., JMLR 2011). State: the sum of squared gradients.
// No include guard: it is included once per instruction set. deepspeed/ops/adagrad/cpu_adagrad.py has the same in torch.

constexpr int NUM_STATES = 1;
constexpr int COMMON_STATES = 1;

struct Constants {
    V grad_factor, l2, eps, lr;
    bool has_l2;
};

DS_INLINE Constants constants(const Pass& pass) {
    const float* s = pass.scalars;
    return {broadcast(s[0]), broadcast(s[1]), broadcast(s[2]), broadcast(s[3]), s[1] != 0.0f};
}

DS_INLINE V update(const Constants& k, V param, V grad, V* states) {
    grad = grad * k.grad_factor;
    // Skipped without L2: 0 * infinity would be NaN.
    if (k.has_l2) grad = grad + param * k.l2;
    states[0] = states[0] + grad * grad;
    return param - grad / (square_root(states[0]) + k.eps) * k.lr;
}
