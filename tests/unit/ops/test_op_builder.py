"""Building native ops: the cache, the lock between processes, what is said when it fails."""

import importlib.machinery
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deepspeed.ops import op_builder
from deepspeed.ops.op_builder import ALL_OPS, AsyncIOBuilder, OpBuilder, OpBuildError
from deepspeed.ops.op_builder.builder import CACHE_ENV, locked

ROOT = Path(__file__).resolve().parents[3]
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"
)
SOURCE = """
#include <Python.h>
#include "answer.h"
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {
    {"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}
};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", "", -1, methods};
#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)
PyMODINIT_FUNC CONCAT(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""

BUILD = """
import sys
sys.path.insert(0, {root!r})
sys.path.insert(0, {here!r})
from op_builder.builder import OpBuilder
class Tiny(OpBuilder):
    BUILD_VAR, NAME = "DS_BUILD_TINY", "tiny"
    def absolute_name(self): return "nowhere.tiny"
    def sources(self): return [{source!r}]
    def include_paths(self): return [{folder!r}]
print(Tiny().load(verbose=False).answer())
"""

SLOW_COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec {compiler} --version
if [ -p {fifo} ]; then echo $$ > {fifo}; exec sleep 600; fi
exec {compiler} "$@"
"""

HOLD = """
import sys, time
from pathlib import Path
from typing import Any
sys.path.insert(0, {root!r})
from op_builder.builder import locked
with locked(Path({lock!r})):
    print("held", flush=True)
    time.sleep(600)
"""


class TinyBuilder(OpBuilder):
    """An op of one function, whose sources stand in a folder of the test's."""

    BUILD_VAR, NAME = "DS_BUILD_TINY", "tiny"

    def __init__(self, folder: Path, leaf: str) -> None:
        super().__init__()
        self.folder, self.leaf = folder, leaf

    def absolute_name(self) -> str:
        return f"deepspeed.ops.tiny.{self.leaf}"

    def sources(self) -> list[str]:
        return [str(self.folder / "tiny.cpp")]

    def include_paths(self) -> list[str]:
        return [str(self.folder)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    (tmp_path / "tiny.cpp").write_text(SOURCE)
    (tmp_path / "answer.h").write_text("#define ANSWER 42\n")
    return tmp_path


def libraries(folder: Path) -> list[Path]:
    return sorted((folder / "cache").glob("*/*.so"))


@needs_compiler
def test_an_op_is_built_once_and_again_when_its_header_changes(folder: Path) -> None:
    assert TinyBuilder(folder, "first").load(verbose=False).answer() == 42
    (library,) = libraries(folder)
    built_at = library.stat().st_mtime_ns
    assert TinyBuilder(folder, "second").load(verbose=False).answer() == 42
    assert library.stat().st_mtime_ns == built_at, "the cache must be used"

    (folder / "answer.h").write_text("#define ANSWER 43\n")
    assert TinyBuilder(folder, "third").load(verbose=False).answer() == 43
    assert len(libraries(folder)) == 2


@needs_compiler
def test_a_compiler_error_is_shown_and_leaves_nothing(folder: Path) -> None:
    (folder / "tiny.cpp").write_text("int broken(")
    told = r"op tiny: the compiler exited with 1[\s\S]*tiny\.cpp:1"
    with pytest.raises(OpBuildError, match=told):
        TinyBuilder(folder, "broken").load(verbose=False)
    assert libraries(folder) == []


def test_reasons_for_incompatibility(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(OpBuildError, match="false --version exited with 1; set CXX"):
        TinyBuilder(folder, "no_version").load(verbose=False)
    builder = TinyBuilder(folder, "x")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not builder.is_compatible()
    assert "no C++ compiler found" in str(builder.error_log)
    monkeypatch.setenv("CXX", sys.executable)
    (folder / "tiny.cpp").unlink()
    assert not builder.is_compatible()
    assert "source files are missing" in str(builder.error_log)
    monkeypatch.setenv("DS_BUILD_TINY", "0")
    with pytest.raises(OpBuildError, match="DS_BUILD_TINY=0 switches it off"):
        builder.load()


def test_async_io_serves_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    builder = AsyncIOBuilder()
    assert not builder.is_compatible() and ALL_OPS[AsyncIOBuilder.NAME].NAME == "async_io"
    assert builder.load().aio_handle(engine="python").get_engine() == "python"


def test_the_lock_of_a_killed_holder_is_free(tmp_path: Path) -> None:
    lock = tmp_path / "folder" / "lock"
    hold = [sys.executable, "-c", HOLD.format(root=str(ROOT), lock=str(lock))]
    with subprocess.Popen(hold, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        waiter = subprocess.Popen(hold, stdout=subprocess.PIPE, text=True)
        time.sleep(0.3)
        assert waiter.poll() is None and lock.exists()
        holder.send_signal(signal.SIGKILL)
        # The lock must pass on although its file is still there.
        assert waiter.stdout is not None and waiter.stdout.readline() == "held\n"
        waiter.kill()
        waiter.communicate()
    with locked(lock):
        assert os.path.exists(lock)


@needs_compiler
def test_two_builds_killed_in_the_middle_do_not_block_a_third(folder: Path) -> None:
    """Their compilers live on, as they do when a job's scheduler kills only the ranks."""
    # Kills: a lock that is a file's existence, one that a compiler inherits, and half a library
    # that counts as built.
    compiler = next(path for path in map(shutil.which, ("c++", "g++", "clang++")) if path)
    fifo, script = folder / "fifo", folder / "slow-compiler"
    script.write_text(SLOW_COMPILER.format(compiler=compiler, fifo=fifo))
    script.chmod(0o755)
    os.mkfifo(fifo)
    here = str(folder)
    code = BUILD.format(root=str(ROOT), here=here, source=f"{here}/tiny.cpp", folder=here)
    command, environment = [sys.executable, "-S", "-c", code], {**os.environ, "CXX": str(script)}
    quiet: dict[str, Any] = {"env": environment, "stdout": subprocess.DEVNULL}
    builds = [subprocess.Popen(command, **quiet) for _ in range(2)]
    compilers = []
    try:
        for _ in builds:
            # One of them compiles, the other waits for it; whoever compiles is killed, and then the
            # next.
            compilers.append(int(fifo.read_text()))
            parent = int(Path(f"/proc/{compilers[-1]}/stat").read_text().split()[3])
            os.kill(parent, signal.SIGKILL)
        for build in builds:
            assert build.wait(timeout=60) == -signal.SIGKILL
        fifo.unlink()
        how: dict[str, Any] = {"env": environment, "capture_output": True, "text": True}
        third = subprocess.run(command, timeout=60, **how)
    finally:
        for build in builds:
            build.kill()
            build.wait()
        for pid in compilers:
            os.kill(pid, signal.SIGKILL)
    assert third.stdout == "42\n", third.stderr
    # What killed builds leave is removed.
    assert [path.name for path in (folder / "cache").glob("*/build-*")] == []


@needs_compiler
def test_a_native_op_builds_ahead_of_time(folder: Path) -> None:
    # Kills: flags or sources that only the just-in-time build has; a module that does not bear the
    # name it is looked up by.
    pytest.importorskip("setuptools")
    build = [sys.executable, *"setup.py -q build_ext --build-lib".split(), str(folder / "lib")]
    build += ["--build-temp", str(folder / "temp")]
    chosen = {f"DS_BUILD_{name}": "0" for name in ("AIO", "CPU_ADAGRAD", "CPU_LION", "CPU_SQUARES")}
    environment = {**os.environ, "DS_BUILD_OPS": "1", **chosen}
    result = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (library,) = (folder / "lib").rglob("*.so")
    assert library.parent == folder / "lib" / "deepspeed" / "ops" / "adam"
    loader = importlib.machinery.ExtensionFileLoader("cpu_adam_op", str(library))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None, f"{library} is no extension module"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    assert module.instruction_sets()[-1] == "scalar"


def test_the_builders_have_upstreams_names() -> None:
    for kind in ("Adam", "Adagrad", "Lion"):
        builder, name = getattr(op_builder, f"CPU{kind}Builder")(), f"cpu_{kind.lower()}"
        assert builder.NAME == builder.name == name
        assert builder.BUILD_VAR == f"DS_BUILD_{name.upper()}"
        assert builder.absolute_name() == f"deepspeed.ops.{name.removeprefix('cpu_')}.{name}_op"


def test_builders_import_without_torch() -> None:
    """setup.py imports the builders where nothing is installed."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules['torch'] = None; "
        "import op_builder; print(sorted(op_builder.ALL_OPS))"
    )
    assert "async_io" in subprocess.check_output([sys.executable, "-S", "-c", code], text=True)


@needs_compiler
def test_the_cache_key_covers_flags(folder: Path) -> None:
    class OtherFlags(TinyBuilder):
        def cxx_args(self) -> list[str]:
            return [*super().cxx_args(), "-DEXTRA"]

    TinyBuilder(folder, "flags").load(verbose=False)
    OtherFlags(folder, "other_flags").load(verbose=False)
    assert len(libraries(folder)) == 2
