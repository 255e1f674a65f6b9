// Compiles the rule DS_RULE once per instruction set, each in a namespace of its own, and lists them.
// -ffp-contract=off keeps every operation rounded by itself, so that all instruction sets give the same bits.

namespace host_update {

namespace scalar {
#define DS_WIDTH 1
#include "vec.h"
#include DS_RULE
#include "pass.h"
#include "undefine.h"
}  // namespace scalar

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace avx2 {
#define DS_WIDTH 8
#include "vec.h"
#include DS_RULE
#include "pass.h"
#include "undefine.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
namespace avx512 {
#define DS_WIDTH 16
#include "vec.h"
#include DS_RULE
#include "pass.h"
#include "undefine.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

// Best first.
static const InstructionSet INSTRUCTION_SETS[] = {
#if defined(__x86_64__)
    {"avx512", avx512::run, has_avx512()},
    {"avx2", avx2::run, has_avx2()},
#endif
    {"scalar", scalar::run, true},
};

}  // namespace host_update
