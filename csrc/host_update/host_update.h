// What one pass over memory works on, and which instruction sets there are. Included first, before any instruction set
// is switched on: a standard header's inline functions must not be compiled for processors that may not be there.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace host_update {

enum DType : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

constexpr int MAX_STATES = 3;
constexpr int MAX_SCALARS = 12;

// One array of `Pass::numel` elements; `data` needs no alignment. Null means absent.
struct Array {
    void* data = nullptr;
    DType dtype = FLOAT32;
};

// An optimizer update of every element: param and states change in place, out receives a copy of the new param.
struct Pass {
    Array param;
    Array grad;  // read only
    Array states[MAX_STATES];
    int num_states = 0;
    Array out;
    float scalars[MAX_SCALARS] = {};  // their meaning is the rule's
};

using Kernel = void (*)(const Pass& pass, int64_t begin, int64_t end);

struct InstructionSet {
    const char* name;
    Kernel kernel;
    bool usable;
};

inline size_t bytes_of(DType dtype) { return dtype == FLOAT32 ? 4 : 2; }

#if defined(__x86_64__)
inline bool has_avx2() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    // __builtin_cpu_supports asks the operating system too, but older compilers do not know "f16c".
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    return f16c && __builtin_cpu_supports("avx2");
}

inline bool has_avx512() { return __builtin_cpu_supports("avx512f"); }
#endif

}  // namespace host_update
