// DS_WIDTH floats at a time, in the namespace and for the instruction set that `each_isa.h` has opened.
// No include guard: it is included once per instruction set. No templates: their instances could lose the instruction set.
// All arithmetic is written once with operators, which mean the same for a float and for a register of them.

#define DS_INLINE static inline __attribute__((always_inline))

#if DS_WIDTH == 1
typedef float V;
typedef uint32_t U;
typedef uint16_t H;
#define DS_WIDEN(half) static_cast<U>(half)
#define DS_NARROW(word) static_cast<H>(word)
#else
typedef float V __attribute__((vector_size(4 * DS_WIDTH)));
typedef uint32_t U __attribute__((vector_size(4 * DS_WIDTH)));
typedef uint16_t H __attribute__((vector_size(2 * DS_WIDTH)));
#define DS_WIDEN(half) __builtin_convertvector(half, U)
#define DS_NARROW(word) __builtin_convertvector(word, H)
#endif

#if DS_WIDTH == 16
// The forms without a mask start from an undefined register, about which compilers warn.
constexpr __mmask16 ALL_LANES = 0xffff;
#endif

DS_INLINE V broadcast(float x) { return V{} + x; }

DS_INLINE U bits_of(V x) {
    U bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

DS_INLINE V float_of(U bits) {
    V x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

// Correctly rounded, on every instruction set.
DS_INLINE V square_root(V x) {
#if DS_WIDTH == 16
    return _mm512_maskz_sqrt_ps(ALL_LANES, x);
#elif DS_WIDTH == 8
    return _mm256_sqrt_ps(x);
#else
    return __builtin_sqrtf(x);
#endif
}

DS_INLINE V bfloat16_to_float(H half) { return float_of(DS_WIDEN(half) << 16); }

// To nearest, ties to even. A NaN stays one: adding the rounding bias to it could carry into infinity or the sign.
DS_INLINE H float_to_bfloat16(V x) {
    const U bits = bits_of(x);
    const U rounded = (bits + (((bits >> 16) & 1u) + 0x7fffu)) >> 16;
    const U quiet = (bits >> 16) | 0x40u;
    return DS_NARROW(x != x ? quiet : rounded);
}

#if DS_WIDTH == 16
DS_INLINE V float16_to_float(H half) { return _mm512_maskz_cvtph_ps(ALL_LANES, (__m256i)half); }
DS_INLINE H float_to_float16(V x) {
    return (H)_mm512_maskz_cvtps_ph(ALL_LANES, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif DS_WIDTH == 8
DS_INLINE V float16_to_float(H half) { return _mm256_cvtph_ps((__m128i)half); }
DS_INLINE H float_to_float16(V x) { return (H)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
DS_INLINE V float16_to_float(H half) {
    const U sign = (half & 0x8000u) << 16;
    const U magnitude = half & 0x7fffu;
    if (magnitude > 0x7c00u) return float_of(sign | 0x7fc00000u | (magnitude << 13));
    if (magnitude == 0x7c00u) return float_of(sign | 0x7f800000u);
    // The exponent's bias differs by 112; the product is exact, and makes denormals normal.
    return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
}

DS_INLINE H float_to_float16(V x) {
    const U sign = (bits_of(x) >> 16) & 0x8000u;
    const U magnitude = bits_of(x) & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<H>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return static_cast<H>(sign | 0x7c00u);  // 65520 and more round to infinity
    // Below 2^-14: 0.5 has the spacing of float16's denormals, so the addition rounds to them.
    if (magnitude < 0x38800000u) return static_cast<H>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
    return static_cast<H>(sign | ((magnitude - 0x38000000u + ((magnitude >> 13) & 1u) + 0xfffu) >> 13));
}
#endif

// The dtypes do not change during a pass, so these branches cost next to nothing beside the memory.
DS_INLINE V load(const Array& array, int64_t index) {
    if (array.dtype == FLOAT32) {
        V x;
        __builtin_memcpy(&x, static_cast<const char*>(array.data) + 4 * index, sizeof x);
        return x;
    }
    H half;
    __builtin_memcpy(&half, static_cast<const char*>(array.data) + 2 * index, sizeof half);
    return array.dtype == BFLOAT16 ? bfloat16_to_float(half) : float16_to_float(half);
}

DS_INLINE void store(const Array& array, int64_t index, V x) {
    if (array.dtype == FLOAT32) {
        __builtin_memcpy(static_cast<char*>(array.data) + 4 * index, &x, sizeof x);
        return;
    }
    const H half = array.dtype == BFLOAT16 ? float_to_bfloat16(x) : float_to_float16(x);
    __builtin_memcpy(static_cast<char*>(array.data) + 2 * index, &half, sizeof half);
}
