"""A stage that fails ends all ranks within ten seconds with its traceback."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.messages.failure import PipelinePeerError
from unit.common import DistributedTest

LIMIT_S = 10.0
WIDTH, ROWS, MICRO_BATCHES = 4, 2, 3


class Spoilt(Exception):
    """What a layer or a data set raises."""


class Fragile(nn.Module):
    """A linear layer that fails in forward or backward, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fails_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_in == "forward":
            self.a_forward_that_fails()
        if self.fails_in == "killed":
            self.a_forward_that_is_killed()
        y = self.linear(x)
        if self.fails_in == "backward":
            y.register_hook(self.a_backward_that_fails)
        return y

    def a_forward_that_fails(self) -> None:
        raise Spoilt("in forward")

    def a_forward_that_is_killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def a_backward_that_fails(self, grad: torch.Tensor) -> None:
        raise Spoilt("in backward")


def square(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean()


def start(num_stages: int, schedule: str) -> PipelineEngine:
    module = PipelineModule(
        [Fragile() for _ in range(4)],
        num_stages=num_stages,
        loss_fn=square,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"schedule": schedule},
    }
    engine: PipelineEngine = deepspeed.initialize(model=module, config=config)[0]
    return engine


def data(fails: bool) -> Iterator[Any]:
    for micro in range(1000):
        if fails and micro == 1:
            a_data_set_that_fails()
        yield torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)


def a_data_set_that_fails() -> None:
    raise Spoilt("in the data iterator")


def fail(num_stages: int, stage: int, where: str, schedule: str = "1f1b") -> None:
    """Train; the first rank of `stage` fails at `where`; every rank must say so in time."""
    engine = start(num_stages, schedule)
    is_culprit = engine.stage_id == stage and engine.grid.data_parallel_id == 0
    engine.train_batch(data(False))
    if is_culprit:
        for layer in engine.module.children():
            layer.fails_in = where
    started = time.monotonic()
    with pytest.raises(Spoilt if is_culprit else PipelinePeerError) as caught:
        engine.train_batch(data(is_culprit and where == "data"))
    assert time.monotonic() - started < LIMIT_S
    place = "a_data_set_that_fails" if where == "data" else f"a_{where}_that_fails"
    if not is_culprit:
        culprit = engine.grid.topology().get_rank(pipe=stage, data=0)
        for part in (
            f"rank {culprit} (stage {stage}) failed",
            place,
            "Spoilt: in",
            "test_failing_stage.py",
        ):
            assert part in str(caught.value), str(caught.value)
    # Again: the engine is unusable, at once and for the same reason.
    with pytest.raises(PipelinePeerError, match="Spoilt"):
        engine.train_batch(data(False))
    leave_together()


def leave_together() -> None:
    """The harness's barrier at the end of a test would have no connections to run on."""
    store = dist.get_store()
    store.set(f"noticed/{dist.get_rank()}", "1")
    store.wait([f"noticed/{rank}" for rank in range(dist.get_world_size())])
    dist.destroy_process_group()


class TestTwoRanks(DistributedTest):
    world_size = 2

    # Kills: a guard that does not cover the data iterator or autograd's threads; a neighbour that
    # waits for the next message.
    @pytest.mark.parametrize("stage", [0, 1])
    @pytest.mark.parametrize("where", ["forward", "backward", "data"])
    def test_either_stage(self, stage: int, where: str) -> None:
        fail(2, stage, where, "zero_bubble" if stage == 0 else "1f1b")


class TestFourRanks(DistributedTest):
    world_size = 4

    # Kills: telling neighbours only; ranks beyond wait for what these do not send.
    @pytest.mark.parametrize(
        "stage, where", [(0, "data"), (1, "forward"), (2, "backward"), (3, "data"), (3, "forward")]
    )
    def test_four_stages(self, stage: int, where: str) -> None:
        fail(4, stage, where)

    # Kills: watching one pipeline; the other's ranks wait in the all-reduce over data ranks, or for
    # the common norm.
    @pytest.mark.parametrize("stage, where", [(0, "backward"), (1, "forward"), (1, "data")])
    def test_two_pipelines(self, stage: int, where: str) -> None:
        fail(2, stage, where)


class TestKilled(DistributedTest):
    world_size = 2
    init_distributed = False

    @pytest.mark.parametrize("stage", [1, 2])
    def test_a_killed_stage_ends_the_others(self, stage: int, tmp_path: Path) -> None:
        # Kills: waiting for a note that a killed process cannot leave, or for a store gone with it.
        rank = dist.get_local_rank()
        if rank == 0 and os.fork() == 0:
            try:
                self._join(stage, tmp_path, "killed")
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        own = [other for other in range(3) if other != stage][rank]
        with pytest.raises(PipelinePeerError, match="without a word"):
            self._join(own, tmp_path, "")
        dist.destroy_process_group()

    def _join(self, stage: int, directory: Path, where: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_distributed(
            "gloo", init_method=f"file://{directory}/store", rank=stage, world_size=3, verbose=False
        )
        engine = start(3, "1f1b")
        engine.train_batch(data(False))
        for layer in engine.module.children():
            layer.fails_in = where
        started = time.monotonic()
        try:
            engine.train_batch(data(False))
        finally:
            assert time.monotonic() - started < LIMIT_S


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from unit.v1.pipe.test_failing_stage import data, start
import deepspeed
deepspeed.init_distributed("gloo", verbose=False)
engine = start(2, "1f1b")
engine.train_batch(data(False))
print("one step is done", flush=True)
print("at", time.time(), flush=True)
if engine.stage_id == 1:
    engine.module.get_submodule("2").fails_in = "forward"
engine.train_batch(data(False))
print("never printed", flush=True)
"""


def test_through_the_launcher(tmp_path: Path) -> None:
    # Kills: a run that hangs, an exit code of 0, output without the reason.
    script = tmp_path / "train.py"
    tests = Path(__file__).resolve().parents[3]
    script.write_text(SCRIPT.format(tests=str(tests)), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tests.parent)}
    command = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_gpus",
        "2",
        "--master_port",
        "0",
        str(script),
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"hangs: {process.communicate()[0][-3000:]}")
    assert process.returncode not in (0, None), output
    ended = time.time()
    assert output.count("one step is done") == 2 and "never printed" not in output, output
    assert ended - max(map(float, re.findall(r" at (\d+\.\d+)$", output, re.MULTILINE))) < LIMIT_S
    assert "a_forward_that_fails" in output and "Spoilt: in forward" in output, output
