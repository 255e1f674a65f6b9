"""How one native op is compiled, cached and loaded.

Owns: the builder base class, the build cache, and the lock around a build. Does not own: any op;
each has a file of its own beside this one. Called by: `deepspeed.ops`, the accelerators'
`create_op_builder`, and `setup.py`.

This folder is importable under two names: `op_builder` in a source tree (for `setup.py`, without
torch) and `deepspeed.ops.op_builder` (a link to it in a checkout, a copy in a wheel). Modules here
therefore import only each other and the standard library at the top.
"""

import contextlib
import fcntl
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from setuptools import Extension

CACHE_ENV = "DS_OPS_CACHE"
"""Folder of compiled ops; default `$XDG_CACHE_HOME/deepspeed/ops` or `~/.cache/deepspeed/ops`."""


SCRATCH_PREFIX = "build-"


class OpBuildError(RuntimeError):
    """An op could not be built or loaded; the text says why and what to do."""


class OpBuilder(ABC):
    """One native op: its sources, its flags, whether this machine can build it, and its loaded
    module.

    Protocol: `is_compatible()` never compiles; `load()` returns the op's module, from this process,
    from the wheel, from the cache, or after a build, in that order; `builder()` is for `setup.py`
    alone.

    Attributes:
        BUILD_VAR: environment variable that concerns this op alone (`DS_BUILD_<OP>`); "0" switches
            the op off.
        NAME: key of the op in `ALL_OPS` and `deepspeed.ops.__compatible_ops__`.
        name: same as NAME on an instance, unless the constructor was given another.
        error_log: why the last `is_compatible()` said no; None after a yes.
    """

    BUILD_VAR: str = ""
    NAME: str = ""
    _loaded: dict[str, ModuleType] = {}

    def __init__(self, name: str | None = None) -> None:
        self.name: str = name or self.NAME
        self.error_log: str | None = None

    @abstractmethod
    def absolute_name(self) -> str:
        """Return the dotted name under which a prebuilt op stands, e.g.
        `deepspeed.ops.adam.cpu_adam_op`.
        """

    @abstractmethod
    def sources(self) -> list[str]:
        """Return the C++ sources, relative to `source_root()` (`csrc/...`) or absolute."""

    def include_paths(self) -> list[str]:
        """Return further include folders, relative to `source_root()` or absolute."""
        return []

    def cxx_args(self) -> list[str]:
        """Return the compiler flags."""
        return ["-O3", "-std=c++17", "-fPIC", "-Wall"]

    def extra_ldflags(self) -> list[str]:
        """Return flags that follow the sources, for libraries."""
        return []

    def source_root(self) -> Path:
        """Return the folder that holds `csrc/`: the project root, or `deepspeed/ops`."""
        return Path(__file__).absolute().parent.parent

    def is_compatible(self, verbose: bool = False) -> bool:
        """Say whether this machine can use the op; False leaves the reason in `error_log`.

        Args:
            verbose: print the reason as a warning on stderr.
        """
        self.error_log = self._incompatibility()
        if self.error_log and verbose:
            self.warning(self.error_log)
        return self.error_log is None

    def _incompatibility(self) -> str | None:
        """Return why the op cannot be used here, or None. Ops extend this with their own
        requirements.
        """
        if self.BUILD_VAR and os.environ.get(self.BUILD_VAR) == "0":
            return f"{self.BUILD_VAR}=0 switches it off"
        if self.is_prebuilt():
            return None
        if self.compiler() is None:
            return "no C++ compiler found; install g++ or clang++, or set CXX"
        missing = [str(path) for path in self._resolved(self.sources()) if not path.is_file()]
        if missing:
            return f"source files are missing: {', '.join(missing)}"
        header = Path(sysconfig.get_path("include")) / "Python.h"
        if not header.is_file():
            return f"{header} is missing; install Python's development files (python3-dev)"
        return None

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Say whether torch was built for AMD's devices."""
        import torch  # startup: setup.py has none

        return torch.version.hip is not None

    def is_prebuilt(self) -> bool:
        """Say whether the installed package carries this op compiled (a wheel made with
        DS_BUILD_OPS=1).
        """
        try:
            return importlib.util.find_spec(self.absolute_name()) is not None
        except ModuleNotFoundError:
            return False

    def warning(self, message: str) -> None:
        """Write one warning line about this op to stderr."""
        sys.stderr.write(f" [WARNING]  {self.name}: {message}\n")

    def load(self, verbose: bool = True) -> ModuleType:
        """Return the op's module, compiling it if it is in neither the package nor the cache.

        Raises:
            OpBuildError: the op is not compatible with this machine, or the compiler failed.
        """
        key = self.absolute_name()
        if key not in self._loaded:
            if not self.is_compatible():
                raise OpBuildError(f"op {self.name} cannot be used here: {self.error_log}")
            self._loaded[key] = (
                importlib.import_module(key) if self.is_prebuilt() else self.jit_load(verbose)
            )
        return self._loaded[key]

    def load_native(self, verbose: bool = True) -> ModuleType:
        """Return the compiled module, where `load` returns what scripts call instead."""
        return self.load(verbose)

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Compile the op unless the cache holds it, and import the result.

        Raises:
            OpBuildError: the compiler failed; the text has its output.
        """
        library = self._cache_folder() / f"{self.name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        if not library.is_file():
            with locked(library.parent / "lock"):
                # Another process may have finished the same build while this one waited.
                if not library.is_file():
                    self._compile(library, verbose)
        loader = importlib.machinery.ExtensionFileLoader(self.name, str(library))
        spec = importlib.util.spec_from_file_location(self.name, library, loader=loader)
        if spec is None:
            raise OpBuildError(
                f"op {self.name}: {library} is no extension module; remove it and try again"
            )
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module

    def builder(self) -> "Extension":
        """Return the setuptools extension that builds this op ahead of time, under
        `absolute_name()`.
        """
        # optional: setuptools is a build requirement only
        from setuptools import Extension

        return Extension(
            self.absolute_name(),
            [str(path) for path in self._resolved(self.sources())],
            include_dirs=[str(path) for path in self._resolved(self.include_paths())],
            extra_compile_args=[*self.cxx_args(), f"-DTORCH_EXTENSION_NAME={self._leaf_name()}"],
            extra_link_args=self.extra_ldflags(),
            language="c++",
        )

    def compiler(self) -> list[str] | None:
        """Return the C++ compiler's command line ($CXX, else the first of c++, g++, clang++), or
        None.
        """
        if os.environ.get("CXX"):
            command = shlex.split(os.environ["CXX"])
            return command if shutil.which(command[0]) else None
        found = next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)
        return [found] if found else None

    def _leaf_name(self) -> str:
        return self.absolute_name().rpartition(".")[2]

    def _resolved(self, paths: list[str]) -> list[Path]:
        return [self.source_root() / path for path in paths]

    def _command(self, output: Path) -> list[str]:
        compiler = self.compiler()
        if compiler is None:
            raise OpBuildError(
                f"op {self.name}: no C++ compiler found; install g++ or clang++, or set CXX"
            )
        includes = [sysconfig.get_path("include"), *map(str, self._resolved(self.include_paths()))]
        return [
            *compiler,
            *self.cxx_args(),
            "-shared",
            f"-DTORCH_EXTENSION_NAME={self.name}",
            *(f"-I{path}" for path in includes),
            *map(str, self._resolved(self.sources())),
            "-o",
            str(output),
            *self.extra_ldflags(),
        ]

    def _cache_folder(self) -> Path:
        """Return this build's folder, named by a hash of everything that decides the binary."""
        digest = hashlib.sha256()
        command = self._command(Path("out"))
        for part in (*command, compiler_version(*(self.compiler() or [])), sys.version):
            digest.update(part.encode() + b"\0")
        headers = [
            file for folder in self._resolved(self.include_paths()) for file in folder.rglob("*.h*")
        ]
        for path in [*self._resolved(self.sources()), *sorted(headers)]:
            digest.update(path.read_bytes() + b"\0")
        default = (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepspeed" / "ops"
        )
        return Path(os.environ.get(CACHE_ENV) or default) / f"{self.name}-{digest.hexdigest()[:16]}"

    def _compile(self, library: Path, verbose: bool) -> None:
        if verbose:
            sys.stderr.write(f"deepspeed: compiling op {self.name} into {library.parent}\n")
        # The lock is held, so what other builds left here belongs to killed ones.
        for stale in library.parent.glob(f"{SCRATCH_PREFIX}*"):
            shutil.rmtree(stale, ignore_errors=True)
        # A compiler that is killed leaves half a file; the rename makes only whole ones visible.
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=SCRATCH_PREFIX) as scratch:
            output = Path(scratch) / library.name
            result = subprocess.run(self._command(output), capture_output=True, text=True)
            if result.returncode != 0:
                raise OpBuildError(
                    f"op {self.name}: the compiler exited with {result.returncode}\n"
                    f"command: {shlex.join(self._command(output))}\n{result.stderr}"
                )
            # A rename that reaches the disk before the data does would leave an empty library after
            # a power cut.
            with open(output, "rb") as built:
                os.fsync(built.fileno())
            os.replace(output, library)


@lru_cache(maxsize=8)
def compiler_version(*command: str) -> str:
    """Return what the compiler says about itself, so that an upgrade misses the cache.

    Raises:
        OpBuildError: it says nothing.
    """
    result = subprocess.run([*command, "--version"], capture_output=True, text=True)
    if result.returncode != 0:
        raise OpBuildError(
            f"{shlex.join(command)} --version exited with {result.returncode}; set CXX to a C++ "
            "compiler"
        )
    return result.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` between processes.

    The kernel owns the lock through the open descriptor, so a killed holder releases it: the file
    that stays behind means nothing. (Locks made of a file's existence are what leaves a cluster
    hanging after one killed build.)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not inheritable (Python's default): a compiler that outlives its parent must not keep the
    # lock.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
