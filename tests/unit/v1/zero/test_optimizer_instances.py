"""Several optimizer instances: everything that one instance does, done by n of them, gives the same
numbers.

The contract suite holds gradients, norm and parameters against the single-process reference
(`contract/matrix.py`, `instance_cases`); here are the groups, the collectives' number and order,
the ways in which scripts drive an engine, and what is refused.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.watch.observation import CollectiveCall
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.utils import (
    groups,
    safe_get_full_fp32_params,
    safe_get_full_grad,
    safe_get_full_grads,
    safe_get_full_optimizer_states,
    safe_get_local_grad,
    safe_set_full_grad,
)
from unit.common import DistributedTest
from unit.models import config_of, drawn, seeded
from unit.v1.gathering import noted
from unit.v1.looping import each

ROWS, WIDTH = 3, 5
STEPS = 2
BF16_OPTIMIZER = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


class Net(nn.Module):
    """A layer that is used twice, an unused parameter, and one that only the last rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, 7)
        self.twice = nn.Linear(7, 7)
        self.after = nn.Linear(7, 3)
        self.sometimes = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(4))
        self.recompute = False

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: (ROWS, WIDTH)
        x = self.before(x).tanh()
        for _ in range(2):
            x = checkpoint(self.hidden, x, use_reentrant=True) if self.recompute else self.hidden(x)
        x = self.after(x)
        last = dist.get_rank() == dist.get_world_size() - 1
        return (x * self.sometimes if last else x).float().square().mean()


Seen = dict[str, torch.Tensor]
Way = Callable[[Any], list[Seen] | None]


def start(
    count: int, stage: int, accumulation: int = 1, zero: dict[str, Any] | None = None, **keys: Any
) -> Any:
    model = seeded(Net, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    zero = {"num_optimizer_instances": count, "reduce_bucket_size": 40, **(zero or {})}
    keys |= {"gradient_clipping": 0.5, "zero_optimization": {"overlap_comm": True, **zero}}
    config = config_of(stage, ROWS, accumulation, **keys)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def data(engine: Any, index: int) -> torch.Tensor:
    """Input of micro-batch `index`, different on each rank."""
    x = drawn(1000 * index + dist.get_rank(), ROWS, WIDTH)
    return x.to(engine.module.before.weight.dtype)


def look(engine: Any) -> Seen:
    """What a step left behind, whole."""
    names, params = zip(*engine.module.named_parameters(), strict=True)
    seen = {"norm": torch.tensor([float(engine.get_global_grad_norm())])}
    seen |= {name: param.detach().clone() for name, param in zip(names, params, strict=True)}
    masters = safe_get_full_fp32_params(params)
    momenta = safe_get_full_optimizer_states(params, "momentum_buffer")
    for name, master, momentum in zip(names, masters, momenta, strict=True):
        seen |= {f"{name}.master": master, f"{name}.momentum": momentum}
    return seen


# The ways in which scripts drive an engine: what is left behind then, and what a way gives, must
# not depend on the number of instances.


def backward(engine: Any, *indices: int) -> None:
    for index in indices:
        engine.backward(engine(data(engine, index)))


def managed(engine: Any) -> None:
    for index in range(STEPS * engine.gradient_accumulation_steps()):
        backward(engine, index)
        engine.step()


def plain(engine: Any) -> None:
    for index in range(engine.gradient_accumulation_steps()):
        engine(data(engine, index)).backward()
        engine.step()


def no_sync_but_last(engine: Any) -> None:
    engine.set_gradient_accumulation_boundary(False)
    for index in range(2):
        with engine.no_sync():
            backward(engine, index)
    engine.set_gradient_accumulation_boundary(True)
    backward(engine, 2)
    engine.step()


def coalesced(engine: Any) -> None:
    engine.set_gradient_accumulation_boundary(True)
    with engine.coalesce_grad_reduction():
        backward(engine, 0, 1)
    engine.step()


def two_backwards_at_the_boundary(engine: Any) -> None:
    engine.set_gradient_accumulation_boundary(True)
    backward(engine, 0, 1)
    engine.step()


def forget_and_start_over(engine: Any) -> None:
    backward(engine, 7)
    engine.zero_grad()
    managed(engine)


def boundary_said_late(engine: Any) -> None:
    engine.set_gradient_accumulation_boundary(False)
    backward(engine, 0)
    engine.step()
    backward(engine, 1)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def read_and_write_gradients(engine: Any) -> list[Seen]:
    seen = []
    for index in range(engine.gradient_accumulation_steps()):
        if index:
            engine.step()
        backward(engine, index)
        names, params = zip(*engine.module.named_parameters(), strict=True)
        seen.append(dict(zip(names, safe_get_full_grads(params) or (), strict=False)))
    if dist.get_rank() == 1:
        # Alone: reading what one owns must not start a collective that the others come to later, or
        # never.
        for param in engine.module.parameters():
            safe_get_local_grad(param)
    for param in engine.module.parameters():
        safe_set_full_grad(param, 2 * safe_get_full_grad(param))
    engine.step()
    return seen


def late_on_one_instance(engine: Any) -> None:
    """Only the last rank's gradient comes in parts; all must agree to send a bucket again."""
    engine.module.recompute = dist.get_rank() == dist.get_world_size() - 1
    managed(engine)


WAYS: tuple[Way, ...] = (
    managed,
    plain,
    no_sync_but_last,
    coalesced,
    two_backwards_at_the_boundary,
    forget_and_start_over,
    boundary_said_late,
    read_and_write_gradients,
    late_on_one_instance,
)
APART = {"overlap_comm": False, "contiguous_gradients": False}
ON_HOST = {"offload_optimizer": {"device": "cpu"}, "round_robin_gradients": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 1, all-reduce": {"stage": 1, "zero": {"reduce_scatter": False, "overlap_comm": False}},
    "stage 2": {"stage": 2},
    "stage 2, nothing overlaps": {"stage": 2, "zero": APART},
    "stage 2, offload": {"stage": 2, "zero": ON_HOST},
    "stage 2, prescale": {"stage": 2, "prescale_gradients": True, "gradient_allreduce_op": "sum"},
    "BF16_Optimizer": {"stage": 1, **BF16_OPTIMIZER},
}

# One way, in turns, with options that change one thing.
WAYS_WITH = {name: (WAYS[number + 2],) for number, name in enumerate(OPTIONS)}
WAYS_WITH |= {"stage 2": WAYS, "BF16_Optimizer": WAYS[::3]}

# Instances of one rank each too.
ALONE = [("stage 2", way) for way in WAYS[::8]]


def run(way: Way, count: int, options: dict[str, Any]) -> list[Seen]:
    engine = start(count, accumulation=2, **options)
    seen = [*(way(engine) or ()), look(engine)]
    engine.destroy()
    return seen


@functools.cache
def run_of_one(way: Way, options: str) -> list[Seen]:
    """With one instance: stages, their reductions and offload change rounding alone."""
    return run(way, 1, OPTIONS[options])


def bitwise_equal_everywhere(seen: Seen) -> bool:
    flat = torch.cat([torch.zeros(1), *(tensor.reshape(-1).float() for tensor in seen.values())])
    copies = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, flat)
    return all(torch.equal(copy, flat) for copy in copies)


Call = tuple[str, str, int]


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Over whom this rank's collectives are, in order, their names and sizes."""
    instances = groups._get_optimizer_instances(2)
    names = {id(instances.inside): "inside", id(instances.across): "across"}
    names[id(dist.get_world_group())] = "all"

    def note(call: CollectiveCall) -> list[Call]:
        numel = sum(tensor.numel() for tensor in call.reads or call.writes)
        return [(names[id(call.group or dist.get_world_group())], call.name, numel)]

    with noted(note) as calls:
        yield calls


def buckets(calls: list[Call]) -> str:
    """Reductions of buckets: S and R for a slice inside the instance, A for one across."""
    letters = {("inside", "irecv"): "R", ("inside", "isend"): "S", ("across", "all_reduce"): "A"}
    return "".join(letters.get(call[:2], "") for call in calls)


def expected_order(num_buckets: int, overlap: bool) -> str:
    """What `buckets` sees."""
    if not overlap:
        return "SRA" * num_buckets
    # The next bucket is on its way inside while one is waited for to be reduced between instances.
    return "SR" + "SRA" * (num_buckets - 1) + "A"


def train_step(engine: Any) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        backward(engine, 0)
        engine.step()


class TestInstances(DistributedTest):
    """n instances against one, which `test_backward_forms` holds against plain torch."""

    world_size = 4
    exec_timeout = 90

    @each(options=tuple(OPTIONS))
    def test_as_with_one_instance(self, options: str) -> None:
        # Kills: crossing in some reductions only (a second backward would mix sums of an instance
        # with sums of all); gradients that are read before they have crossed; agreeing on late
        # gradients inside an instance; a factor that knows of n.
        for way in WAYS_WITH[options]:
            has_own = options in ("BF16_Optimizer", "stage 2, prescale")
            expected = run_of_one(way, options if has_own else "stage 2")
            for count in (2, 4) if (options, way) in ALONE else (2,):
                found = run(way, count, OPTIONS[options])
                for number, (one, several) in enumerate(zip(expected, found, strict=True)):
                    assert one.keys() == several.keys(), (way.__name__, count, number)
                    where = f"{way.__name__}, {count} instances, look {number}"
                    assert bitwise_equal_everywhere(several), f"{where}: instances differ"
                    for name, value in one.items():
                        # bf16 parameters are compared through their fp32 masters.
                        if value.dtype == torch.float32:
                            torch.testing.assert_close(
                                several[name], value, rtol=1e-5, atol=1e-6, msg=f"{where}: {name}"
                            )

    def test_an_overflow_and_an_interrupted_backward(self) -> None:
        # Kills: a decision to skip that an instance takes from its own ranks' gradients.
        fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
        for count in (2, 4):
            engine = start(count, 2, fp16=fp16)
            before = [param.detach().clone() for param in engine.module.parameters()]
            x = data(engine, 0)
            if dist.get_rank() == 3:
                x[0, 0] = float("inf")
            engine.backward(engine(x))
            engine.step()
            assert engine.skipped_steps == 1 and engine.optimizer.loss_scale == 2.0**3
            assert all(map(torch.equal, before, engine.module.parameters()))
            engine.destroy()
        # Kills: a bucket that is completed after an error without having been to the other
        # instances.
        engine = start(2, 2)
        handle = engine.module.before.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(engine, 0)
        handle.remove()
        engine.optimizer.finish_gradients()
        shard = torch.cat([group.grad for group in engine.optimizer.groups])
        copies = [torch.empty_like(shard) for _ in range(4)]
        dist.all_gather(copies, shard)
        assert shard.count_nonzero(), "no bucket was sent before the error; the test tests nothing"
        assert torch.equal(copies[0], copies[2]) and torch.equal(copies[1], copies[3])
        engine.zero_grad()
        backward(engine, 1)
        engine.step()
        assert bitwise_equal_everywhere(look(engine))

    def test_every_bucket_crosses_once_after_it_was_reduced_inside(self) -> None:
        # Kills: crossing before the instance's sum is there; waiting for each bucket in turn
        # although overlap is asked for; collectives that depend on the rank; crossing again at the
        # step; sending more than the owned slice.
        for stage, overlap in ((1, False), (1, True), (2, False), (2, True)):
            engine = start(2, stage, 2, zero={"overlap_comm": overlap})
            parts = [plan.own_numel for plan in engine.optimizer.plans]
            assert len(parts) >= 4
            train_step(engine)  # what is agreed on once is agreed on before counting
            for boundary in (False, True):
                with recording() as calls:
                    backward(engine, 1)
                sends = stage == 2 or boundary
                expected = expected_order(len(parts), overlap) if sends else ""
                assert buckets(calls) == expected, (stage, overlap, boundary, calls)
                sent = [numel for group, _, numel in calls if group == "across"]
                assert sent == (parts if sends else [])
                with recording() as calls:
                    engine.step()
                assert "A" not in buckets(calls)
                scalars = [call for call in calls if call[2] == 1]
                # One norm over all ranks, in which instance 0 counts: norms of their own may differ
                # in the last bit.
                assert scalars == ([("all", "all_reduce", 1)] if boundary else []), calls
            engine.destroy()
        # Kills: BF16_Optimizer averaging inside its instance only.
        engine = start(2, 1, **BF16_OPTIMIZER)
        with recording() as calls:
            backward(engine, 0)
        reduced = [call for call in calls if call[1] == "all_reduce"]
        assert reduced and {group for group, _, _ in reduced} == {"all"}
        numel = engine.optimizer.groups[0].table.padded_numel
        assert sum(own for _, _, own in reduced) == numel
        with recording() as calls:
            engine.step()
        assert {group for group, name, _ in calls if name in ("isend", "irecv")} == {"inside"}

    def test_consecutive_ranks_are_an_instance(self) -> None:
        # Kills: instances of different sizes; a count that is accepted where it means nothing.
        for arguments, keys, said in (
            ((3, 1), {}, "3 does not divide the 4 .* use one of 1, 2, 4"),
            ((2, 0), {}, "2 .*stage: 0 .* use stage 1, 2 or 3"),
            ((2, 0), BF16_OPTIMIZER, "2 .*stage: 0"),
        ):
            with pytest.raises(DeepSpeedConfigError, match=f"num_optimizer_instances: {said}"):
                start(*arguments, **keys)  # type: ignore[arg-type]  # blocks
        with pytest.raises(ValueError, match="4 .* ranks cannot be split into 3 optimizer inst"):
            groups._get_optimizer_instances(3)
        # Kills: instances of strided ranks; groups made anew for each engine; groups that outlive a
        # reset.
        rank, ranks_of = dist.get_rank(), dist.get_all_ranks_from_group
        one = groups._get_optimizer_instances(1)
        assert (one.inside, one.across) == (dist.get_world_group(), None)
        assert (one.index, one.count) == (0, 1)
        two, four = groups._get_optimizer_instances(2), groups._get_optimizer_instances(4)
        assert ranks_of(two.inside) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert ranks_of(two.across) == [rank % 2, rank % 2 + 2]
        assert (two.index, two.count) == (rank // 2, 2)
        assert ranks_of(four.inside) == [rank]
        assert ranks_of(four.across) == [0, 1, 2, 3]
        assert groups._get_optimizer_instances(2) is two
        groups.reset()
        assert groups._get_optimizer_instances(2) is not two
        # Kills: groups made of the own data-parallel ranks only, whose making the other ranks do
        # not take part in.
        groups.reset()
        own = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        groups.initialize(mpu=SimpleNamespace(get_data_parallel_group=lambda: own))
        instances = groups._get_optimizer_instances(2)
        assert ranks_of(instances.inside) == [rank]
        assert ranks_of(instances.across) == [rank % 2, rank % 2 + 2]
        assert instances.index == rank // 2
