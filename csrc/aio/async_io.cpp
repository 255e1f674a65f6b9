// Files to memory and back without Python's lock: `transfer`, and what there is to do it with.
// Who opens files, cuts what is not aligned and raises errors: deepspeed/ops/aio.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "aio/threads.h"
#include "aio/uring.h"

#ifdef __linux__
#include <fcntl.h>
#include <sys/syscall.h>
#endif

namespace async_io {

static PyObject* transfer(PyObject*, PyObject* args) {
    Transfer request;
    int uring = 0, is_write = 0, bounce = 0, single_submit = 0, overlap_events = 0;
    unsigned long long address = 0;
    long long bytes = 0, offset = 0, block_bytes = 0, depth = 0, alignment = 0;
    if (!PyArg_ParseTuple(args, "piipKLLLLLppp", &uring, &request.direct, &request.plain, &is_write, &address, &bytes, &offset, &block_bytes, &depth,
                          &alignment, &bounce, &single_submit, &overlap_events))
        return nullptr;
    request.memory = reinterpret_cast<char*>(static_cast<uintptr_t>(address));
    request.bytes = bytes, request.offset = offset, request.block_bytes = block_bytes, request.alignment = alignment;
    const long long blocks = (bytes + block_bytes - 1) / block_bytes;
    request.depth = depth < blocks ? depth : blocks > 0 ? blocks : 1;
    request.is_write = is_write, request.bounce = bounce, request.single_submit = single_submit, request.overlap_events = overlap_events;
    Outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    if (!uring || !run_uring(request, &outcome)) outcome = run_threads(request);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("Li", static_cast<long long>(outcome.failed_at), outcome.error);
}

static PyObject* io_uring_error(PyObject*, PyObject*) { return PyLong_FromLong(probe_uring()); }

// statx's answer about O_DIRECT by its place in the kernel's interface: headers of before 6.1 have no name for it.
static PyObject* alignment(PyObject*, PyObject* args) {
    int file = -1;
    if (!PyArg_ParseTuple(args, "i", &file)) return nullptr;
    uint32_t answer[64] = {0};
#if defined(__linux__) && defined(SYS_statx)
    constexpr uint32_t DIRECT_IO = 0x2000;
    constexpr int MEMORY = 0x98 / 4, FILE_OFFSET = 0x9c / 4;
    if (syscall(SYS_statx, file, "", 0x1000 /* AT_EMPTY_PATH */, DIRECT_IO, answer) == 0 && (answer[0] & DIRECT_IO))
        return Py_BuildValue("II", answer[MEMORY], answer[FILE_OFFSET]);
#endif
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"transfer", transfer, METH_VARARGS,
     "transfer(uring, direct, plain, is_write, address, bytes, offset, block_bytes, depth, alignment, bounce, single_submit, overlap_events) -> "
     "(first byte that is missing or -1, errno; 0: the file ends there)"},
    {"io_uring_error", io_uring_error, METH_NOARGS, "io_uring_error() -> errno that says why it is not to be had here, or 0"},
    {"alignment", alignment, METH_VARARGS, "alignment(descriptor) -> (of memory, of the file) for O_DIRECT, zeros if it cannot, None if nobody knows"},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "async_io", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace async_io

#define DS_CONCAT_(a, b) a##b
#define DS_CONCAT(a, b) DS_CONCAT_(a, b)

PyMODINIT_FUNC DS_CONCAT(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&async_io::MODULE); }
