// Lion (Chen et al., arXiv:2302.06675, Algorithm 2). State: the momentum.
// No include guard: it is included once per instruction set. deepspeed/ops/lion/cpu_lion.py has the same in torch.

constexpr int NUM_STATES = 1;
constexpr int COMMON_STATES = 1;

struct Constants {
    V grad_factor, beta1, grad_to_update, beta2, grad_to_momentum, decay, lr;
};

DS_INLINE Constants constants(const Pass& pass) {
    const float* s = pass.scalars;
    return {broadcast(s[0]), broadcast(s[1]), broadcast(s[2]), broadcast(s[3]), broadcast(s[4]), broadcast(s[5]), broadcast(s[6])};
}

// 1, -1 or 0; a NaN stays one, so that a broken gradient shows in the parameters too.
DS_INLINE V sign(V x) {
    const V zero = V{}, one = zero + 1.0f;
    const V of_number = x > zero ? one : (x < zero ? -one : zero);
    return x != x ? x : of_number;
}

DS_INLINE V update(const Constants& k, V param, V grad, V* states) {
    grad = grad * k.grad_factor;
    const V direction = sign(states[0] * k.beta1 + grad * k.grad_to_update);
    states[0] = states[0] * k.beta2 + grad * k.grad_to_momentum;
    return param * k.decay - direction * k.lr;
}
