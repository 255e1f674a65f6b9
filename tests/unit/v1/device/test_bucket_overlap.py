"""Copy, reduction and sum of successive buckets run beside one another: who waits for whom."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.models import config_of, drawn, linears, sgd
from unit.one_process import mean_square, placed

WIDTH, LAYERS, ROWS, MICRO_BATCHES = 8, 6, 2, 2


class Launched(NamedTuple):
    """An operator, and up to where on each stream everything runs before it."""

    operator: str
    stream: Hashable
    position: int
    clock: dict[Hashable, int]

    def waits_for(self, other: Launched) -> bool:
        return self.clock.get(other.stream, 0) >= other.position


class Order:
    """A tracer that writes down what runs before what, by streams alone."""

    def __init__(self) -> None:
        self.launches: list[Launched] = []
        self._clocks: dict[Hashable, dict[Hashable, int]] = {}
        self._events: dict[Hashable, dict[Hashable, int]] = {}

    def launched(self, operator: str, stream: Hashable, accesses: Sequence[Any]) -> None:
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        self.launches.append(Launched(operator, stream, clock[stream], dict(clock)))

    def event_recorded(self, event: Hashable, stream: Hashable) -> None:
        self._events[event] = dict(self._clocks.get(stream, {}))

    def event_waited(self, event: Hashable, stream: Hashable) -> None:
        clock = self._clocks.setdefault(stream, {})
        for other, position in self._events.get(event, {}).items():
            clock[other] = max(clock.get(other, 0), position)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def engine_of(stage: int, overlap: bool, **zero: Any) -> Any:
    zero = {"overlap_comm": overlap, "reduce_bucket_size": WIDTH * WIDTH, **zero}
    config = config_of(stage, ROWS, MICRO_BATCHES, optimizer=sgd(0.1), zero_optimization=zero)
    return deepspeed.initialize(model=linears(LAYERS, WIDTH, bias=False), config=config)[0]


def step(engine: Any, number: int) -> None:
    for micro in range(MICRO_BATCHES):
        x = drawn(100 * number + 10 * micro + dist.get_rank(), ROWS, WIDTH)
        engine.backward(mean_square(engine, placed(engine, x)))
        engine.step()


def on_stream(launches: list[Launched], name: str, operator: str) -> list[Launched]:
    return [
        launch
        for launch in launches
        if repr(launch.stream).startswith(f"<{name}") and operator in launch.operator
    ]


def waits(launches: list[Launched], others: list[Launched]) -> list[bool]:
    """Whether each waits for the other of its place."""
    return [launch.waits_for(other) for launch, other in zip(launches, others, strict=False)]


class TestOverlap(DistributedTest):
    world_size = 2
    backend = "gloo"

    @pytest.mark.parametrize("stage", [1, 2])
    def test_a_copy_waits_for_the_reduction_before_the_last(self, stage: int) -> None:
        # Kills: one stream for all three: the copy of a bucket then waits for the reduction of the
        # bucket before. More buffers than two, which would hide that a copy waits for nothing.
        for overlap in (True, False):
            order = Order()
            with simulate() as device:
                engine = engine_of(stage, overlap)
                step(engine, 0)
                with device.trace_streams(order):
                    step(engine, 1)
                buffers = len(engine.optimizer.reduction.buffers.free)
                engine.destroy()
            copies = on_stream(order.launches, "reduction stream", "_foreach_copy_")
            sums = on_stream(order.launches, "nccl stream", "reduce")[: len(copies)]
            assert len(copies) == len(sums) == LAYERS * (MICRO_BATCHES if stage == 2 else 1)
            behind = waits(copies[2:], sums)
            beside = waits(copies[1:], sums)
            assert all(behind)
            assert not any(beside) if overlap else all(beside), beside
            assert buffers == (2 if overlap else 1)

    @pytest.mark.parametrize("zero", [{}, {"reduce_scatter": False}])
    def test_sums_are_the_same(self, zero: dict[str, Any]) -> None:
        # Kills: a piece that is added before its reduction, in another order, or not at all.
        found = []
        for stage, overlap in ((1, False), (1, True), (2, False), (2, True)):
            with simulate(schedule=overlap + 1, backward_streams=2), check_streams():
                engine = engine_of(stage, overlap, **zero)
                for number in range(2):
                    step(engine, number)
                get_accelerator().synchronize()
                with torch.no_grad():
                    found.append([param.clone() for param in engine.module.parameters()])
                get_accelerator().synchronize()
                engine.destroy()
        for apart, beside in (found[:2], found[2:]):
            assert all(map(torch.equal, apart, beside))
