"""`"verify": {"streams": true}`: training raises its races at the step, on all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.streams import SideStream
from deepspeed.verify import StreamRaceError, disable_stream_checking
from unit.common import DistributedTest

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 72},
    "verify": {"streams": True},
}


@contextmanager
def checked_device() -> Iterator[None]:
    with simulate(backward_streams=2):
        try:
            yield
        finally:
            disable_stream_checking()


def train() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
    engine.destroy()


class TestStreamsBlock(DistributedTest):
    world_size = 2

    def test_silent_when_all_is_ordered(self) -> None:
        # Kills: false alarms of the switch, which sees construction and every step.
        with checked_device():
            train()

    def test_a_race_on_one_rank_stops_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a key that is accepted and ignored; a rank that goes on and hangs in its next
        # collective.
        if dist.get_rank() == 1:
            monkeypatch.setattr(SideStream, "wait_for", lambda self, producers: None)
        expected = (
            "never waits for <backward stream" if dist.get_rank() == 1 else "another rank left"
        )
        with checked_device(), pytest.raises(StreamRaceError, match=expected):
            train()

    def test_refused_without_streams(self) -> None:
        # Kills: a check that is asked for and silently does nothing.
        with pytest.raises(RuntimeError, match="DS_ACCELERATOR=sim"):
            train()
