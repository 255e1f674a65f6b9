// Exact sums of squares on the host, as a Python module. deepspeed/ops/squares.py says what cells are, has the same in
// torch, and gives these constants their reasons. All sums here are exact: lanes, threads and instruction sets don't show.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int HIGHEST = 256, BIN_BITS = 40, CELL_BITS = 20, NUM_BINS = 15, CELLS = 3;
constexpr int64_t ROW = 4096;
constexpr int64_t MIN_ROWS_PER_THREAD = 16;
constexpr int LANES = 32;  // of which compilers make registers

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EACH_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EACH_ISA
#endif

// The largest without its sign, as bits: those of what is not finite are larger than those of all numbers.
EACH_ISA uint32_t largest(const float* x, int64_t count) {
    uint32_t most[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (int lane = 0; lane < LANES; ++lane) {
            uint32_t bits;
            memcpy(&bits, x + i + lane, sizeof bits);
            bits &= 0x7fffffffu;
            most[lane] = bits > most[lane] ? bits : most[lane];
        }
    }
    uint32_t all = 0;
    for (; i < count; ++i) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        all = bits > all ? bits : all;
    }
    for (int lane = 0; lane < LANES; ++lane) all = most[lane] > all ? most[lane] : all;
    return all;
}

// Adds the parts of squares in a bin, which `big` rounds to, and of the rest in the next one.
EACH_ISA void add_parts(const float* x, int64_t count, double big, double next, double* sum, double* rest_sum) {
    double sums[LANES] = {}, rest_sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (int lane = 0; lane < LANES; ++lane) {
            const double value = x[i + lane], square = value * value;
            const double part = (square + big) - big;
            sums[lane] += part;
            rest_sums[lane] += ((square - part) + next) - next;
        }
    }
    for (; i < count; ++i) {
        const double value = x[i], square = value * value;
        const double part = (square + big) - big;
        sums[0] += part;
        rest_sums[0] += ((square - part) + next) - next;
    }
    for (int lane = 0; lane < LANES; ++lane) {
        *sum += sums[lane];
        *rest_sum += rest_sums[lane];
    }
}

// What rounds to multiples of 2^exponent when it is added and taken away.
double rounding_to(int exponent) { return std::ldexp(1.5, exponent + 52); }

int unit_of(int bin) { return HIGHEST - BIN_BITS * (bin + 1); }

void add_to_cells(double sum, int bin, double* cells) {
    for (int cell = 0; cell < CELLS - 1; ++cell) {
        const double big = rounding_to(unit_of(bin) + CELL_BITS * (CELLS - 1 - cell));
        const double part = (sum + big) - big;
        cells[CELLS * bin + cell] += part;
        sum -= part;
    }
    cells[CELLS * bin + CELLS - 1] += sum;
}

void add_row(const float* x, int64_t count, double* cells) {
    const uint32_t bits = largest(x, count);
    if (bits == 0) return;
    if (bits >= 0x7f800000u) {
        cells[0] = NAN;
        return;
    }
    float most;
    memcpy(&most, &bits, sizeof most);
    int exponent;
    std::frexp(static_cast<double>(most) * most, &exponent);
    const int bin = (HIGHEST - exponent) / BIN_BITS;
    double sum = 0.0, rest_sum = 0.0;
    add_parts(x, count, rounding_to(unit_of(bin)), rounding_to(unit_of(bin + 1)), &sum, &rest_sum);
    add_to_cells(sum, bin, cells);
    add_to_cells(rest_sum, bin + 1, cells);
}

void add_rows(const float* x, int64_t numel, int64_t threads, double* cells) {
    const int64_t rows = (numel + ROW - 1) / ROW;
    const int64_t useful = (rows + MIN_ROWS_PER_THREAD - 1) / MIN_ROWS_PER_THREAD;
    const int64_t parts = threads < useful ? threads : useful;
#pragma omp parallel for num_threads(static_cast<int>(parts)) schedule(static, 1) if (parts > 1)
    for (int64_t part = 0; part < parts; ++part) {
        double own[NUM_BINS * CELLS] = {};
        for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
            const int64_t begin = row * ROW;
            add_row(x + begin, numel - begin < ROW ? numel - begin : ROW, own);
        }
#pragma omp critical
        for (int cell = 0; cell < NUM_BINS * CELLS; ++cell) cells[cell] += own[cell];
    }
}

PyObject* add(PyObject*, PyObject* args) {
    long long threads = 1, numel = 0;
    unsigned long long values = 0, cells = 0;
    if (!PyArg_ParseTuple(args, "LLKK", &threads, &numel, &values, &cells)) return nullptr;
    Py_BEGIN_ALLOW_THREADS
    add_rows(reinterpret_cast<const float*>(static_cast<uintptr_t>(values)), numel, threads,
             reinterpret_cast<double*>(static_cast<uintptr_t>(cells)));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef METHODS[] = {
    {"add", add, METH_VARARGS, "add(threads, numel, values, cells): add the squares of fp32 to fp64 cells, both addresses"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "cpu_squares", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

#define DS_CONCAT_(a, b) a##b
#define DS_CONCAT(a, b) DS_CONCAT_(a, b)

PyMODINIT_FUNC DS_CONCAT(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&MODULE); }
