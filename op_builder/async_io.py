"""Builder of the asynchronous file I/O op (`deepspeed.ops.aio`).

Owns: the op's name and sources. Does not own: how files are opened, cut and waited for, which is
Python's and works without the op (`deepspeed/ops/aio`).
"""

import importlib
from types import ModuleType

from .builder import OpBuilder


class AsyncIOBuilder(OpBuilder):
    """Reads and writes past the page cache: io_uring, or a thread for each request in flight."""

    BUILD_VAR = "DS_BUILD_AIO"
    NAME = "async_io"

    def absolute_name(self) -> str:
        """Return the name of the extension module."""
        return "deepspeed.ops.aio.async_io_op"

    def sources(self) -> list[str]:
        """Return the op's source."""
        return ["csrc/aio/async_io.cpp"]

    def include_paths(self) -> list[str]:
        """Return the folder from which sources name each other."""
        return ["csrc"]

    def cxx_args(self) -> list[str]:
        """Return the flags, with threads."""
        return [*super().cxx_args(), "-pthread"]

    def extra_ldflags(self) -> list[str]:
        """Return the flag of threads: the kernel's interface needs no library."""
        return ["-pthread"]

    def load(self, verbose: bool = True) -> ModuleType:
        """Return what scripts call, which has `aio_handle`: it does without the compiled op too."""
        return importlib.import_module("deepspeed.ops.aio")

    def load_native(self, verbose: bool = True) -> ModuleType:
        """Return the compiled module, built on first use.

        Raises:
            OpBuildError: the op is not compatible with this machine, or the compiler failed.
        """
        return super().load(verbose)
