"""The intent check around whole programs: training is silent, and ranks that end are named."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.watch import intent, observation
from deepspeed.comm.watch.intent import CollectiveMismatchError
from deepspeed.comm.watch.observation import CollectiveCall
from unit.common import DistributedTest, get_master_port
from unit.models import config_of


class Counter:
    """Counts operations by name."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def run(self, call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
        self.counts[call.name] = self.counts.get(call.name, 0) + 1
        return proceed()


SMALL = {"overlap_comm": True, "reduce_bucket_size": 64, "allgather_bucket_size": 64}
SETTINGS: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "zero_optimization": SMALL,
    "verify": {"collectives": True, "collectives_timeout": 20},
}


def train(stage: int, steps: int = 3) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    config = config_of(stage, 2, 2, "bf16", **SETTINGS)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for _ in range(2 * steps):
        engine.backward(engine(torch.randn(2, 7, dtype=torch.bfloat16)).float().square().mean())
        engine.step()


class TestTraining(DistributedTest):
    world_size = 3  # odd: slices are uneven

    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_is_silent(self, stage: int) -> None:
        counter = Counter()
        observation.add_observer(counter)
        train(stage)
        assert intent.is_enabled() and sum(counter.counts.values()) >= (7 if stage == 0 else 20)
        intent.disable()

    def test_a_rank_that_skips_one_is_named(self) -> None:
        train(stage=1, steps=1)  # switches the check on, so that the next observer is outside of it
        skip = SkipFirst("all_reduce" if dist.get_rank() == 2 else "")
        observation.add_observer(skip)
        with pytest.raises(CollectiveMismatchError) as failed:
            train(stage=1)
        observation.remove_observer(skip)
        text = str(failed.value)
        assert "ranks 0, 1: all_reduce(" in text and "rank 2: " in text
        assert "rank 2 skipped it or is one ahead" in text
        # The lines of the package that issue the two, not those of the communication layer.
        assert text.count("deepspeed/runtime/") >= 2 and "deepspeed/comm" not in text
        intent.disable()


class SkipFirst:
    """Leaves out the first operation of a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
        if call.name != self.name:
            return proceed()
        self.name = ""
        return None


PROGRAM = """
import torch
from deepspeed import comm as dist
from deepspeed.comm.watch import intent

dist.init_distributed("gloo", verbose=False)
intent.enable(60.0)
dist.all_reduce(torch.ones(3))
if dist.get_rank() == 0:
    raise ValueError("planted")
dist.all_reduce(torch.ones(5))
"""


def test_a_rank_that_ends_by_an_exception_is_named() -> None:
    """The one that hosts the store: it stays until the others have read why it ends."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": get_master_port()}
    common.update(WORLD_SIZE="2", OMP_NUM_THREADS="1")
    common["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen(command, env={**common, "RANK": rank, "LOCAL_RANK": rank}, **how)
        for rank in ("0", "1")
    ]
    try:
        _, text = [rank.communicate(timeout=50)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert "CollectiveMismatchError: rank 0 ended and will not come" in text
    assert "rank 1 waits in all_reduce(SUM) of float32[5]" in text
    last = "its last collective was all_reduce(SUM) of float32[3]"
    assert f"rank 0 has ended after ValueError: planted; {last}" in text


class TestStore(DistributedTest):
    world_size = 1
    init_distributed = False

    def test_a_rank_that_takes_the_store_with_it(self) -> None:
        """Killed, it leaves no note, for which nobody may wait. It is the only rank's child."""
        rank = "1" if os.fork() else "0"
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
        try:
            dist.init_distributed("gloo", verbose=False)
            intent.enable(60.0)
            dist.all_reduce(torch.ones(3))
        finally:
            if rank == "0":
                os._exit(3)
        lost = "the key-value store of the process group cannot be reached"
        with pytest.raises(CollectiveMismatchError, match=lost):
            dist.all_reduce(torch.ones(5))
