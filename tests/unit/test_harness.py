"""The harness of distributed tests, tested by running pytest on files written for the purpose."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from unit.common import (
    DistributedFixture,
    DistributedTest,
    enable_determinism,
    get_master_port,
    python_path,
)
from unit.on_device import on_device
from unit.workers import unit_of

TESTS_DIR = Path(__file__).resolve().parent.parent
HEADER = """
import os, pickle, subprocess, sys, time
import psutil, pytest, torch
from deepspeed import comm as dist
from unit.common import DistributedFixture, DistributedTest
"""


class Run:
    """One run of pytest on ``source``: exit code, output, seconds."""

    def __init__(self, directory: Path, source: str, **env: str) -> None:
        (directory / "test_it.py").write_text(HEADER + source)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **env}
        environment["PYTHONPATH"] = python_path(TESTS_DIR.parent, TESTS_DIR)
        command = [sys.executable, "-m", "pytest", "-p", "unit.common", "-rA", "test_it.py"]
        command += ["-p", "no:cacheprovider"]
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120
        )
        self.code = done.returncode
        self.output = done.stdout + done.stderr

    def expect(self, **counts: int) -> None:
        """pytest's last line says how many tests passed, failed, ..."""
        pairs = re.findall(r"(\d+) (\w+)", self.output.splitlines()[-1])
        asked = (*counts, "failed", "passed")
        assert {word: int(n) for n, word in pairs if word in asked} == counts, self.output


def test_values_marks_skips_fixtures_failures_and_overhead(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        '''
class Local:
    """Cannot be pickled."""
    def __reduce__(self):
        raise TypeError("no")


class three_ranks(DistributedFixture):
    world_size = 3

    def run(self, class_tmpdir, plain):
        assert plain == 7
        with open(os.path.join(class_tmpdir, os.environ["RANK"]), "w") as file:
            file.write(os.environ["WORLD_SIZE"])


@pytest.fixture
def plain():
    return 7


class TestAll(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("value", [3, Local(), lambda: 5], ids=["int", "object", "lambda"])
    def test_values(self, value, tmp_path):
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0, 2.0]
        assert value == 3 or isinstance(value, Local) or value() == 5
        assert tmp_path.is_dir()

    def test_fixture(self, three_ranks, class_tmpdir):
        assert sorted(os.listdir(class_tmpdir)) == ["0", "1", "2"]
        assert open(os.path.join(class_tmpdir, "2")).read() == "3"

    @pytest.mark.world_size(1)
    def test_mark(self):
        assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 1

    def test_skip(self):
        if dist.get_rank() == 1:
            pytest.skip("reason of rank 1")
        dist.barrier()

    def test_xfail(self):
        pytest.xfail("known")

    def test_threads(self):
        assert torch.get_num_threads() == 1 and os.environ["OMP_NUM_THREADS"] == "1"

    def test_monkeypatch(self, monkeypatch):
        monkeypatch.setenv("ONLY_HERE", "1")
        assert os.environ["ONLY_HERE"] == "1"


class TestSizes(DistributedTest):
    world_size = [1, 2]

    def test(self, tmp_path):
        (tmp_path / f"{dist.get_world_size()}").touch()
        if dist.get_world_size() == 2:
            assert (tmp_path / "1").exists()


class TestNoGroup(DistributedTest):
    init_distributed = False
    set_dist_env = False

    def test(self):
        assert not dist.is_initialized() and "RANK" not in os.environ


class TestOverhead(DistributedTest):
    @pytest.mark.parametrize("repetition", range(4))
    def test(self, repetition):
        # Kills: ranks that import torch anew (3 s). Processor time, with that of the ranks before:
        # on a busy machine the clock says little.
        server = psutil.Process().parent()
        used = sum(sum(each.cpu_times()[:4]) for each in (server, server.parent()))
        if repetition:
            took = used - float(open("used").read())
            assert took < 1.0, f"one test took {took} s"
        dist.barrier()
        if dist.get_rank() == 0:
            with open("used", "w") as file:
                file.write(str(used))


class TestNeedsGpu(DistributedTest):
    requires_cuda_env = True

    def test(self):
        raise AssertionError("must not run on the host")


class TestNccl(DistributedTest):
    backend = "nccl"

    def test(self):
        raise AssertionError("must not run on the host")


class TestFails(DistributedTest):
    def test_assert(self):
        print("said by", dist.get_rank())
        dist.barrier()  # both said it before one ends the other
        if dist.get_rank() == 1:
            left = 1
            assert left == 2, "the text"
        dist.barrier()

    def test_exit(self):
        if dist.get_rank() == 1:
            os._exit(3)
        dist.barrier()

    def test_crash(self):
        import ctypes
        ctypes.string_at(0)

    def test_abort_afterwards(self):
        if dist.get_rank() == 1:
            torch.distributed.barrier = os.abort  # where ranks take leave of each other

    def test_unpicklable_fixture(self, capsys):
        raise AssertionError("must not get here")

    def test_after(self):
        assert dist.get_world_size() == 2


class failing(DistributedFixture):
    def run(self):
        raise RuntimeError("from the fixture")


class TestFixtureFails(DistributedTest):
    def test(self, failing):
        raise AssertionError("must not get here")
''',
        DS_ACCELERATOR="cpu",
    )
    run.expect(passed=14, failed=5, skipped=3, xfailed=1, error=1)
    assert "reason of rank 1" in run.output
    assert "needs an accelerator device" in run.output and "needs the nccl backend" in run.output
    # The first rank to fail comes first, with the line of the test in it.
    first = r"test_assert _+\n==== rank 1 of 2 failed ====\nTraceback"
    assert re.search(first, run.output), run.output
    assert 'assert left == 2, "the text"' in run.output
    assert "said by 0" in run.output and "said by 1" in run.output
    assert "ended the process with exit code 3" in run.output
    assert "was killed by SIGSEGV" in run.output and "in test_crash" in run.output
    assert "passed the test and was killed by SIGABRT afterwards" in run.output
    assert "cannot be sent to the ranks" in run.output
    assert "RuntimeError: from the fixture" in run.output
    written = 'raise AssertionError("must not get here")'
    assert "must not get here" not in run.output.replace(written, "")


def test_hung_ranks_are_killed_with_their_stacks(tmp_path: Path) -> None:
    started = time.monotonic()
    run = Run(
        tmp_path,
        """
class TestHangs(DistributedTest):
    exec_timeout = 1

    def test_one(self):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(f"pids{dist.get_rank()}", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        if dist.get_rank() == 0:
            stuck_here()

    def test_after(self):
        assert dist.get_world_size() == 2


class TestTheEnvironment(DistributedTest):
    def test(self):
        time.sleep(600)


def stuck_here():
    time.sleep(600)
""",
        DS_UNITTEST_TIMEOUT="0.5",
    )
    assert time.monotonic() - started < 60
    run.expect(failed=2, passed=1)
    assert "did not end within 1 s" in run.output
    assert "did not end within 0.5 s" in run.output
    assert "in stuck_here" in run.output and "in _leave" in run.output
    pids = [int(pid) for rank in "01" for pid in (tmp_path / f"pids{rank}").read_text().split()]
    assert len(pids) == 4
    for pid in pids:
        assert not _runs(pid), f"process {pid} was left behind"


def _runs(pid: int) -> bool:
    """Whether a process runs; one that is dead and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


class written_by_one(DistributedFixture):
    world_size = 1

    def run(self, class_tmpdir: str) -> None:
        Path(class_tmpdir, "file").write_text(os.environ["RANK"])


class TestFixtureHere(DistributedTest):
    world_size = 2

    def test(self, written_by_one: None, class_tmpdir: str) -> None:
        assert Path(class_tmpdir, "file").read_text() == "0"


def test_master_port_is_free_and_in_range() -> None:
    assert 40000 <= int(get_master_port(40000, 50)) < 40050
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="no free port"):
            get_master_port(taken.getsockname()[1], 1)


def test_determinism_is_for_the_test_only() -> None:
    import torch

    @enable_determinism(7)
    def draw() -> tuple[bool, float]:
        return torch.are_deterministic_algorithms_enabled(), float(torch.rand(()))

    assert draw() == draw()
    assert draw()[0] and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("nodeid", "unit"),
    [
        ("tests/unit/a/test_b.py::test_c[x::y]", "tests/unit/a/test_b.py::test_c[x::y]"),
        ("tests/unit/a/test_b.py::TestC::test_d[1]", "tests/unit/a/test_b.py::TestC"),
        ("tests/unit/clients/test_b.py::test_c[1]", "tests/unit/clients/test_b.py"),
        ("tests/unit/test_packaging.py::test_c", "tests/unit/test_packaging.py"),
        ("tests/style/test_b.py::test_c", "tests/style"),
    ],
)
def test_which_tests_share_a_worker(nodeid: str, unit: str) -> None:
    """Kills: the fixtures of a class, or of a costly file, made by every worker."""
    assert unit_of(nodeid) == unit


def test_tests_of_the_host_run_on_a_device() -> None:
    # Kills: tensors and layers of a test that stay on the host, and mix with the device's there.
    host = torch.ones(3)
    with on_device(torch.device("meta")):
        made = torch.randn(3, generator=torch.Generator().manual_seed(0))
        assert {made.device.type, (made + host).device.type} == {"meta"}
        layer = torch.nn.Linear(3, 3)
        assert {layer.weight.device.type, layer(host).device.type} == {"meta"}
        leaf = torch.zeros(3, requires_grad=True)
        assert leaf.is_leaf and leaf.requires_grad and leaf.device.type == "meta"
    assert torch.zeros(3).device.type == "cpu"


def test_processes_of_tests_seldom_look_for_garbage() -> None:
    # Kills: a path that processes do not get; all would pass, and take a third longer.
    command = [sys.executable, "-c", "import gc; print(gc.get_threshold())"]
    assert subprocess.check_output(command, text=True) == "(50000, 20, 100)\n"
