// One pass over memory with one rule, in the namespace and for the instruction set that `each_isa.h` has opened.
// The rule gives NUM_STATES, COMMON_STATES, `Constants`, `constants(pass)` and `update(k, param, grad, states) -> new param`.

DS_INLINE void update_at(const Pass& pass, const Constants& k, int64_t index) {
    V states[MAX_STATES];
    for (int s = 0; s < NUM_STATES; ++s) {
        states[s] = s < pass.num_states ? load(pass.states[s], index) : V{};
    }
    const V param = update(k, load(pass.param, index), load(pass.grad, index), states);
    store(pass.param, index, param);
    for (int s = 0; s < NUM_STATES; ++s) {
        if (s < pass.num_states) store(pass.states[s], index, states[s]);
    }
    if (pass.out.data) store(pass.out, index, param);
}

#if DS_WIDTH > 1
// The last elements, fewer than a register holds, go through padded copies: the same arithmetic, nothing beyond the end.
static void update_tail(const Pass& pass, const Constants& k, int64_t begin, int64_t end) {
    constexpr int NUM_ARRAYS = MAX_STATES + 3;
    float padded[NUM_ARRAYS][DS_WIDTH] = {};
    Pass copy = pass;
    Array* const arrays[NUM_ARRAYS] = {&copy.param, &copy.grad, &copy.out, &copy.states[0], &copy.states[1], &copy.states[2]};
    const size_t count = static_cast<size_t>(end - begin);
    char* origins[NUM_ARRAYS] = {};
    for (int a = 0; a < NUM_ARRAYS; ++a) {
        if (!arrays[a]->data) continue;
        const size_t size = bytes_of(arrays[a]->dtype);
        origins[a] = static_cast<char*>(arrays[a]->data) + size * static_cast<size_t>(begin);
        __builtin_memcpy(padded[a], origins[a], count * size);
        arrays[a]->data = padded[a];
    }
    update_at(copy, k, 0);
    for (int a = 0; a < NUM_ARRAYS; ++a) {
        if (origins[a] && arrays[a] != &copy.grad) __builtin_memcpy(origins[a], padded[a], count * bytes_of(arrays[a]->dtype));
    }
}
#endif

// By value: nothing points to the copy, so no store through an array can change it, and what the caller fixed stays fixed.
DS_INLINE void run_range(const Pass pass, int64_t begin, int64_t end) {
    const Constants k = constants(pass);
    int64_t index = begin;
    for (; index + DS_WIDTH <= end; index += DS_WIDTH) update_at(pass, k, index);
#if DS_WIDTH > 1
    if (index < end) update_tail(pass, k, index, end);
#endif
}

// fp32 master weights: inlined with dtypes that are constants, which is a third faster than branching on them.
DS_INLINE void run_masters(Pass pass, DType grad, DType out, int64_t begin, int64_t end) {
    pass.param.dtype = FLOAT32;
    for (int s = 0; s < MAX_STATES; ++s) pass.states[s].dtype = FLOAT32;
    pass.num_states = COMMON_STATES;
    pass.grad.dtype = grad;
    pass.out.dtype = out;
    if (out == FLOAT32) pass.out.data = nullptr;
    run_range(pass, begin, end);
}

static void run(const Pass& pass, int64_t begin, int64_t end) {
    bool masters = pass.param.dtype == FLOAT32 && pass.num_states == COMMON_STATES;
    for (int s = 0; s < pass.num_states; ++s) masters = masters && pass.states[s].dtype == FLOAT32;
    // An fp32 copy of fp32 masters is nobody's wish: with masters, out is absent or has a dtype of two bytes.
    masters = masters && (pass.out.data == nullptr) == (pass.out.dtype == FLOAT32);
    if (!masters) return run_range(pass, begin, end);
    switch (3 * pass.grad.dtype + pass.out.dtype) {
        case 3 * FLOAT32 + FLOAT32: return run_masters(pass, FLOAT32, FLOAT32, begin, end);
        case 3 * FLOAT32 + BFLOAT16: return run_masters(pass, FLOAT32, BFLOAT16, begin, end);
        case 3 * FLOAT32 + FLOAT16: return run_masters(pass, FLOAT32, FLOAT16, begin, end);
        case 3 * BFLOAT16 + FLOAT32: return run_masters(pass, BFLOAT16, FLOAT32, begin, end);
        case 3 * BFLOAT16 + BFLOAT16: return run_masters(pass, BFLOAT16, BFLOAT16, begin, end);
        case 3 * FLOAT16 + FLOAT32: return run_masters(pass, FLOAT16, FLOAT32, begin, end);
        case 3 * FLOAT16 + FLOAT16: return run_masters(pass, FLOAT16, FLOAT16, begin, end);
        default: return run_range(pass, begin, end);
    }
}
