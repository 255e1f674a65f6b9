"""Copy, reduction and sum of successive buckets run beside one another, and gathers of parameters
beside a forward (`overlap_param_gather`): who waits for whom, every read finds updated values.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.module_hooks.parameter_arrivals import PendingParameter
from deepspeed.runtime.module_hooks.parameter_reads import ParameterDict
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.models import config_of, drawn, linears, sgd
from unit.one_process import mean_square, placed
from unit.v1.gathering import collectives, from_all_ranks
from unit.v1.looping import each
from unit.verify import gather_scenarios as gathered

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

    @each(stage=(1, 2))
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

    @each(zero=({}, {"reduce_scatter": False}))
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


CASES: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2, "dtype": "bf16"},
    {"stage": 1, "dtype": "bf16+fp32"},
    {"stage": 2, "dtype": "fp16", "offload": True},
    {"stage": 2, "allgather_partitions": False},
    {"stage": 2, "overlap_comm": True},
]


def weights(engine: Any) -> list[torch.Tensor]:
    """Read outside of modules, by the parameters themselves."""
    return [param.detach().clone() for param in engine.module.parameters()]


def under_state_dict(engine: Any) -> list[torch.Tensor]:
    return [value.clone() for value in engine.module.state_dict().values()]


def by_data(engine: Any) -> list[torch.Tensor]:
    return [param.data.clone() for param in engine.known]


def in_lists(engine: Any) -> list[torch.Tensor]:
    return list(torch._foreach_mul(engine.known, 1.0))


def of_another(module: nn.Module) -> list[torch.Tensor]:
    assert all(type(param) is nn.Parameter for param in module.parameters())
    return [param.detach() for param in module.parameters()]


def by_copies(engine: Any) -> list[torch.Tensor]:
    return of_another(copy.deepcopy(engine.module))


def by_pickles(engine: Any) -> list[torch.Tensor]:
    return of_another(pickle.loads(pickle.dumps(engine.module)))


def on_another_stream(engine: Any) -> list[torch.Tensor]:
    accelerator = get_accelerator()
    weights(engine)  # this stream has waited; the other has not
    side = accelerator.Stream()
    with accelerator.stream(side):
        found = by_data(engine)
    accelerator.current_stream().wait_stream(side)
    return found


READS = (weights, under_state_dict, by_data, in_lists, by_copies, by_pickles, on_another_stream)


class TestGathers(DistributedTest):
    world_size = 2
    backend = "gloo"

    @each(case=list(zip(CASES, itertools.cycle((0, 3)), strict=False)))
    def test_values(self, case: tuple[dict[str, Any], int]) -> None:
        # Kills: a gather of what the update has not written, or a forward that reads what the
        # gather has not.
        settings, schedule = case
        found = []
        for overlapped in (False, True):
            with simulate(schedule=schedule, backward_streams=2), check_streams():
                engine = gathered.make_engine(**settings, overlap_param_gather=overlapped)
                gathered.train(engine)
                pending = [type(param) is PendingParameter for param in engine.module.parameters()]
                assert all(pending) if overlapped else not any(pending)
                found.append(weights(engine))
                get_accelerator().synchronize()
                engine.destroy()
            assert not any(type(m._parameters) is ParameterDict for m in engine.module.modules())
        assert all(map(torch.equal, *found))

    @each(read=READS)
    def test_reads_outside_of_modules(self, read: Callable[[Any], list[torch.Tensor]]) -> None:
        # Kills: a way to read that is not heard.
        with simulate(), check_streams():
            engine = gathered.make_engine()
            engine.__dict__["known"] = list(engine.module.parameters())
            for _ in range(2):
                gathered.train(engine, 1)
                with torch.no_grad():
                    found = read(engine)
            first, second = from_all_ranks([value.tolist() for value in found])
            assert first == second
            masters = deepspeed.utils.safe_get_full_fp32_params(engine.known)
            get_accelerator().synchronize()
            assert all(map(torch.equal, found, masters))
            engine.destroy()

    def test_a_module_waits_for_its_own(self) -> None:
        # Kills: a wait for all gathers before the first module, or at the end of the step.
        with simulate() as simulated:
            engine = gathered.make_engine()
            gathered.train(engine, 1)
            order = Order()
            with simulated.trace_streams(order):
                gathered.train(engine, 2)
            engine.destroy()
        gathers = on_stream(order.launches, "nccl stream", "all_gather")[: gathered.LAYERS + 1]
        assert len(gathers) == gathered.LAYERS + 1
        after = order.launches[order.launches.index(gathers[-1]) :]
        products = on_stream(after, "default stream", "aten::mm")[: gathered.LAYERS + 1]
        for layer, product in enumerate(products):
            waits = [product.waits_for(gather) for gather in gathers]
            assert waits == [other <= layer for other in range(gathered.LAYERS + 1)]

    def test_costs(self) -> None:
        # Kills: a collective, or a wait of the host, that only the overlap has.
        def cost(overlapped: bool) -> tuple[list[str], int]:
            with simulate():
                engine = gathered.make_engine(dtype="fp16", overlap_param_gather=overlapped)
                gathered.train(engine, 2)
                with collectives() as issued, get_accelerator().count_host_waits() as waits:
                    gathered.train(engine, 2)
                engine.destroy()
            return issued, waits.total

        assert cost(True) == cost(False)

    def test_where_reads_are_not_heard(self, tmp_path: Path) -> None:
        # Kills: compiled code, or a parameter of the client's class, that is not waited for.
        class Theirs(nn.Parameter):
            pass

        with simulate(), check_streams():
            engine = gathered.make_engine()
            engine.module[0].weight.__class__ = Theirs
            gathered.train(engine, 2)
            assert type(engine.module[0].weight) is Theirs
            assert type(engine.module[1].weight) is PendingParameter
            engine.module[1].compile(backend="eager")
            gathered.train(engine, 2)
            assert type(engine.module[2].weight) is nn.Parameter
            engine.save_checkpoint(str(tmp_path))
            gathered.train(engine, 1)
            engine.load_checkpoint(str(tmp_path))
            gathered.train(engine, 1)
            engine.destroy()

    def test_nothing_to_gather(self) -> None:
        # Kills: the key accepted where it means nothing.
        for stage in (0, 3):
            with pytest.raises(DeepSpeedConfigError, match="overlap_param_gather: true at stage"):
                gathered.make_engine(stage=stage)
        engine = gathered.make_engine()  # a host has no streams: readers have nothing to wait for
        gathered.train(engine, 2)
        assert all(type(param) is nn.Parameter for param in engine.module.parameters())
        engine.destroy()
