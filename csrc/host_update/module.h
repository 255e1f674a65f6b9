// The Python module of one rule: `update(...)` and `instruction_sets()`. Included last; knows nothing of the rule.
// Tensors come as addresses, whose sizes, dtypes and lifetimes are the caller's business (deepspeed/ops/host_optimizer.py).
#pragma once

namespace host_update {

// Below this many elements a second thread costs more than it brings.
constexpr int64_t MIN_ELEMENTS_PER_THREAD = 16384;
// Threads start on full cache lines of every dtype, if the arrays do.
constexpr int64_t GRANULE = 64;

static void run_in_threads(Kernel kernel, const Pass& pass, int64_t numel, int64_t threads) {
    const int64_t useful = (numel + MIN_ELEMENTS_PER_THREAD - 1) / MIN_ELEMENTS_PER_THREAD;
    const int64_t parts = threads < useful ? threads : useful;
    if (parts <= 1) {
        kernel(pass, 0, numel);
        return;
    }
    const int64_t granules = (numel + GRANULE - 1) / GRANULE;
#pragma omp parallel for num_threads(static_cast<int>(parts)) schedule(static, 1)
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = granules * part / parts * GRANULE;
        const int64_t end = granules * (part + 1) / parts * GRANULE;
        kernel(pass, begin, end < numel ? end : numel);
    }
}

static Kernel kernel_named(const char* name) {
    for (const InstructionSet& isa : INSTRUCTION_SETS) {
        if (isa.usable && strcmp(isa.name, name) == 0) return isa.kernel;
    }
    PyErr_Format(PyExc_ValueError, "instruction set %s is not usable on this processor", name);
    return nullptr;
}

// Reads a (address, dtype code) pair; address 0 means absent.
static bool read_array(PyObject* pair, Array* array) {
    unsigned long long address = 0;
    int dtype = 0;
    if (!PyArg_ParseTuple(pair, "Ki", &address, &dtype)) return false;
    array->data = reinterpret_cast<void*>(static_cast<uintptr_t>(address));
    array->dtype = static_cast<DType>(dtype);
    return true;
}

static bool read_states(PyObject* states, Pass* pass) {
    const Py_ssize_t count = PyTuple_Size(states);
    if (count < 0) return false;
    if (count > MAX_STATES) {
        PyErr_Format(PyExc_ValueError, "%zd states, at most %d", count, MAX_STATES);
        return false;
    }
    pass->num_states = static_cast<int>(count);
    for (Py_ssize_t s = 0; s < count; ++s) {
        if (!read_array(PyTuple_GetItem(states, s), &pass->states[s])) return false;
    }
    return true;
}

static bool read_scalars(PyObject* scalars, Pass* pass) {
    const Py_ssize_t count = PyTuple_Size(scalars);
    if (count < 0) return false;
    if (count > MAX_SCALARS) {
        PyErr_Format(PyExc_ValueError, "%zd scalars, at most %d", count, MAX_SCALARS);
        return false;
    }
    for (Py_ssize_t s = 0; s < count; ++s) {
        pass->scalars[s] = static_cast<float>(PyFloat_AsDouble(PyTuple_GetItem(scalars, s)));
        if (PyErr_Occurred()) return false;
    }
    return true;
}

static PyObject* update(PyObject*, PyObject* args) {
    const char* isa = nullptr;
    long long threads = 1, numel = 0;
    PyObject *param, *grad, *states, *out, *scalars;
    Pass pass;
    if (!PyArg_ParseTuple(args, "sLLOOOOO", &isa, &threads, &numel, &param, &grad, &states, &out, &scalars)) return nullptr;
    const bool read = read_array(param, &pass.param) && read_array(grad, &pass.grad) && read_states(states, &pass) &&
                      read_array(out, &pass.out) && read_scalars(scalars, &pass);
    const Kernel kernel = read ? kernel_named(isa) : nullptr;
    if (!kernel) return nullptr;
    Py_BEGIN_ALLOW_THREADS
    run_in_threads(kernel, pass, numel, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject* instruction_sets(PyObject*, PyObject*) {
    PyObject* names = PyList_New(0);
    if (!names) return nullptr;
    for (const InstructionSet& isa : INSTRUCTION_SETS) {
        if (!isa.usable) continue;
        PyObject* name = PyUnicode_FromString(isa.name);
        const bool appended = name && PyList_Append(names, name) == 0;
        Py_XDECREF(name);
        if (!appended) {
            Py_DECREF(names);
            return nullptr;
        }
    }
    return names;
}

static PyMethodDef METHODS[] = {
    {"update", update, METH_VARARGS,
     "update(instruction_set, threads, numel, param, grad, states, out, scalars): one pass; arrays are (address, dtype code)"},
    {"instruction_sets", instruction_sets, METH_NOARGS, "instruction_sets() -> names usable on this processor, best first"},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "host_update", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace host_update

#define DS_CONCAT_(a, b) a##b
#define DS_CONCAT(a, b) DS_CONCAT_(a, b)

PyMODINIT_FUNC DS_CONCAT(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&host_update::MODULE); }
