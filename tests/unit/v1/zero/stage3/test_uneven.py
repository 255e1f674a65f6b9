"""Parameters that some ranks use and others do not: as one process, collectives in one order. Ranks
that take different ways all raise with the collective check, or it is told.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed import comm as dist
from deepspeed.comm.watch import intent, lone_waits
from deepspeed.comm.watch.intent import CollectiveMismatchError, intent_store
from deepspeed.runtime.zero import GatheredParameters, Init
from unit.common import DistributedTest
from unit.models import drawn, seeded
from unit.one_process import OneProcess, go_through
from unit.v1.gathering import collectives
from unit.v1.zero.stage3.models import (
    BOUNDED,
    LR,
    SHARDED,
    Tensors,
    config_of,
    distance,
    engine_of,
    values_of,
)
from unit.v1.zero.usage import Reports

WIDTH = 5
STEPS = 2
ACCUMULATION = 2
UNPREFETCHED: dict[str, Any] = {**BOUNDED, "stage3_prefetch_bucket_size": 0}
Wants = Callable[[int], bool]  # whether a place takes its branch


class Side(nn.Module):
    """A layer, and others that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, wanted: bool) -> torch.Tensor:
        x = self.always(x).tanh()
        return x + self.sometimes(x) * self.scale if wanted else x


class Passing(nn.Linear):
    """A unit of its own, of which nothing may be used."""

    def forward(self, x: torch.Tensor, wanted: bool) -> torch.Tensor:  # type: ignore[override]  # it has a second input
        return super().forward(x).tanh() if wanted else x


class Apart(nn.Sequential):
    """Of data alone, and cut off where it is not wanted: backward never comes here then."""

    def forward(self, x: torch.Tensor, wanted: bool) -> torch.Tensor:  # type: ignore[override]  # it has a second input
        result: torch.Tensor = super().forward(x)
        return result if wanted else torch.zeros_like(x)


class Mixture(nn.Module):
    """A leaf whose experts each rank chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor, wanted: bool) -> torch.Tensor:
        for expert in self.experts[: 2 if wanted else 1]:
            x = x + expert(x).tanh()
        return x


class Uneven(nn.Module):
    """Places where ranks may part: at the beginning, between blocks (perhaps recomputed), at the
    end.
    """

    PLACES = 8

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.first = Passing(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Side() for _ in range(3)])
        # Backward reads the second's weight.
        self.apart = Apart(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.between = Passing(WIDTH, WIDTH)
        self.moe = Mixture()
        self.last = Passing(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.inlet.weight = self.head.weight  # tied
        self.recompute = recompute

    def forward(self, x: torch.Tensor, wants: Wants, again: bool = True) -> torch.Tensor:
        data = x
        x = self.inlet(self.first(x, wants(0)))
        for index, block in enumerate(self.blocks):
            x = self.run(block, x, wants(2 + index))
            if index == 0:
                x = self.between(x + self.apart(data, wants(1)), wants(5))
        x = self.moe(x, wants(6))
        if again:
            x = self.run(self.blocks[1], x, wants(3))
        out: torch.Tensor = self.head(self.last(x, wants(7)))
        return out

    def run(self, block: nn.Module, x: torch.Tensor, wanted: bool) -> torch.Tensor:
        def part(x: torch.Tensor) -> torch.Tensor:
            # Of which backward asks before it comes to what the block gave.
            result: torch.Tensor = block(x, wanted).sin()
            return result

        if self.recompute is None:
            return part(x)
        return checkpoint(part, x, use_reentrant=self.recompute)  # type: ignore[no-any-return]  # torch's are untyped


class Between(nn.Module):
    """Something that some ranks pass by, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.between = Passing(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, wants: Wants) -> torch.Tensor:
        out: torch.Tensor = self.last(self.between(self.first(x), wants(0)))
        return out


class Branches(nn.Module):
    """Blocks that a compiler cuts otherwise on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Side() for _ in range(2)])

    def forward(self, x: torch.Tensor, wants: Wants) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, wants(index))
        return x


class Frozen(nn.Module):
    """Frozen blocks, through which gradients flow on the ranks that use what is trained before: a
    module with a unit, a parameter that is read, or a small one that stays whole.
    """

    def __init__(self, trained: str, recompute: bool = False) -> None:
        super().__init__()
        self.tower = nn.Linear(WIDTH, 2 * WIDTH)
        self.inlet = nn.Linear(2 * WIDTH, WIDTH)
        self.body = nn.ModuleDict({"gate": nn.LayerNorm(WIDTH), "block": Side(), "last": Side()})
        self.extra = Passing(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        for frozen in (self.tower, self.inlet, self.body, self.extra):
            frozen.requires_grad_(False)
        (self.body["gate"] if trained == "small" else self.extra).requires_grad_(True)
        self.trained, self.recompute = trained, recompute

    def forward(self, x: torch.Tensor, wants: Wants) -> torch.Tensor:
        x = self.inlet(self.tower(x).tanh())
        if self.trained == "unit":
            x = self.extra(x, wants(0))
        elif self.trained == "small":
            x = self.body["gate"](x) if wants(0) else x
        else:
            weight = self.extra.weight
            x = x @ weight if wants(0) else x
        block = self.body["block"]
        x = checkpoint(block, x, True, use_reentrant=False) if self.recompute else block(x, True)
        out: torch.Tensor = self.head(self.body["last"](x, wants(1)))
        return out


def made(**kwargs: Any) -> Uneven:
    return seeded(Uneven, **kwargs)


def data_of(index: int, rank: int) -> torch.Tensor:
    return drawn(100 * index + rank, 4, WIDTH)


def wants_of(index: int, rank: int) -> Wants:
    """In turns each place is taken by one rank only, by all but one, by all and by none."""

    def wants(place: int) -> bool:
        kind = (index + place) % 4
        is_chosen = rank == place % dist.get_world_size()
        return (is_chosen, not is_chosen, True, False)[kind]

    return wants


Loss = Callable[[Any, int, int], torch.Tensor]


def loss_of(model: Any, index: int, rank: int) -> torch.Tensor:
    out: torch.Tensor = model(data_of(index, rank), wants_of(index, rank))
    return out.square().mean()


def loss_of_two(model: Any, index: int, rank: int) -> torch.Tensor:
    """Of two forwards, behind which one without a backward comes."""
    first = model(data_of(index, rank), wants_of(index, rank))
    second = model(data_of(index + 50, rank), wants_of(index + 1, rank), again=False)
    model(data_of(index, rank), wants_of(index, rank))
    return first.square().mean() + (second * first).mean()


def loss_and_penalty(model: Any, index: int, rank: int) -> torch.Tensor:
    """A gradient is asked for before backward: by outputs not the engine's, or that counts."""
    x = data_of(index, rank).requires_grad_()
    out = getattr(model, "module", model)(x, wants_of(index, rank))
    torch.autograd.grad(out.sum(), x, retain_graph=True, allow_unused=True)
    return out.square().mean()


def reference(model: nn.Module, loss: Loss = loss_of) -> Tensors:
    one = OneProcess(model, LR, lambda model, at: loss(model, *at))
    return one.train(lambda *at: at, STEPS, ACCUMULATION)


def train(engine: Any, loss: Loss = loss_of, plain: bool = False) -> None:
    numbers = range(STEPS * ACCUMULATION)
    go_through(engine, numbers, lambda model, i: loss(model, i, dist.get_rank()), plain)


def trained(
    stage: int, model: nn.Module, loss: Loss = loss_of, plain: bool = False, **zero: Any
) -> Tensors:
    engine = engine_of(model, config_of(stage, ACCUMULATION, **zero))
    train(engine, loss, plain)
    engine.destroy()
    return values_of(model)


@contextmanager
def compared() -> Iterator[None]:
    """Two ranks that part raise at once; more, where comparing takes as long as training, wait."""
    is_compared = dist.get_world_size() == 2
    if is_compared:
        intent.enable(timeout_s=20)
    try:
        yield
    finally:
        if is_compared:
            intent.disable()


SETTINGS: tuple[dict[str, Any], ...] = (
    UNPREFETCHED,
    SHARDED,
    {**UNPREFETCHED, "stage3_prefetch_bucket_size": 100},
    {**SHARDED, "stage3_max_live_parameters": 60},
    {"stage3_param_persistence_threshold": 6, "stage3_unit_fusion_size": 0, "overlap_comm": False},
    {**UNPREFETCHED, "stage3_unit_fusion_size": 800},
    {**UNPREFETCHED, "overlap_comm": True, "reduce_scatter": False},
    {},
)


# What every rank may take to raise, where each core has no more than 4 processes to run: beside
# more of them it waits for its turn.
LIMIT_S = 5.0 * max(1.0, os.getloadavg()[0] / (4 * (os.cpu_count() or 1)))


class Forks(nn.Module):
    """Two branches of one size, of which a forward takes one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.outlet = nn.Linear(WIDTH, width)

    def forward(self, x: torch.Tensor, goes_left: bool = True) -> torch.Tensor:
        x = self.inlet(x)
        out: torch.Tensor = self.outlet(self.left(x) if goes_left else self.right(x))
        return out


class Routed(nn.Module):
    """One expert each time. Called `experts` they were one unit, and ranks could take any."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.specialists = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, expert: int = 0) -> torch.Tensor:
        out: torch.Tensor = self.specialists[expert](self.router(x))
        return out


def engine_with(model: nn.Module, **verify: Any) -> Any:
    return engine_of(model, {**config_of(3, 1, **BOUNDED), "verify": verify})


def step(engine: Any, **kwargs: Any) -> None:
    engine.backward(engine(torch.ones(4, WIDTH), **kwargs).square().mean())
    engine.step()


class TestUneven(DistributedTest):
    world_size = [2, 3]
    exec_timeout = 120

    def test_equals_one_process(self) -> None:
        # Kills: a bucket that leaves when its last gradient comes, which is later or never on some
        # ranks; a unit that is gathered in backward only where something was computed with it.
        wanted = reference(made())
        stage2 = trained(2, made())
        assert distance(stage2, wanted) < 1e-5
        for zero in SETTINGS[dist.get_world_size() - 2 :: 2]:  # each on some number of ranks
            with compared() if zero is UNPREFETCHED else nullcontext():
                found = trained(3, made(), **zero)
            assert distance(found, wanted) < 1e-5, zero
            if zero.get("reduce_scatter", True):  # otherwise rounded elsewhere
                assert distance(found, stage2) == 0, zero

    @pytest.mark.world_size(2)
    def test_recomputation_and_frozen_behind_what_some_ranks_pass_by(self) -> None:
        # Kills: gradients sent before those of the block's other use, a recomputation that starts
        # while others are gathering what comes before it.
        wanted = reference(made())
        with compared():
            for recompute in (False, True):
                found = trained(3, made(recompute=recompute), **UNPREFETCHED)
                assert distance(found, wanted) < 1e-5, recompute
        # Kills: a frozen block that is gathered in backward where this rank has a gradient for it;
        # a count of what comes before that leaves out what has no hooks, or is only read.
        small = {**UNPREFETCHED, "stage3_param_persistence_threshold": 2 * WIDTH}
        with compared():
            for what, zero in (("unit", UNPREFETCHED), ("read", UNPREFETCHED), ("small", small)):
                wanted = reference(seeded(Frozen, trained=what))
                for recompute in (False, True):
                    model = seeded(Frozen, trained=what, recompute=recompute)
                    found = trained(3, model, **zero)
                    assert distance(found, wanted) < 1e-5, (what, recompute)

    def test_unused_parameters_are_refused_on_all_ranks(self) -> None:
        # Kills: a rank that raises alone, while the others wait for its gradients.
        last = dist.get_world_size() - 1
        for stage, zero in ((3, UNPREFETCHED), (3, {}), (2, {"reduce_bucket_size": 20}), (1, {})):
            model = Between()
            config = config_of(stage, 1, ignore_unused_parameters=False, **zero)
            engine = engine_of(model, config)
            with compared():
                for _ in range(2):
                    engine.backward(engine(data_of(0, 0), lambda place: True).sum())
                    engine.step()
                loss = engine(data_of(0, 0), lambda place: dist.get_rank() != last).sum()
                with pytest.raises(RuntimeError) as failed:
                    engine.backward(loss)
            text = str(failed.value)
            reached = rf"reached between\.\w+, between\.\w+ on rank {last}; zero"
            assert re.search(reached, text), text

    @pytest.mark.world_size(2)
    def test_other_ways_to_backward_and_buckets_that_leave_during_it(self) -> None:
        # Kills: a unit that is done with in the later of two forwards, a graph that is gone through
        # twice, a backward that nobody announced.
        with compared():
            for loss, plain in ((loss_of_two, False), (loss_and_penalty, False), (loss_of, True)):
                wanted = reference(made(), loss)
                found = trained(3, made(), loss, plain, **UNPREFETCHED)
                assert distance(found, wanted) < 1e-5, loss
        # Kills: gradients that all wait for the end, more than two gathers and one reduction of a
        # unit.
        engine = engine_of(made(), config_of(3, 1, **UNPREFETCHED, allgather_partitions=False))
        units = engine.parameter_offload.units
        sent: list[int] = []
        original = engine.optimizer.average_tensor
        engine.optimizer.average_tensor = lambda index, grads: (
            sent.append(torch._C._current_graph_task_id()),
            original(index, grads),
        )
        for index in range(4):
            loss = loss_of(engine, index, dist.get_rank())
            sent.clear()
            with collectives() as issued:
                engine.backward(loss)
            # The first ones, and what is tied to them, are complete when backward is.
            assert len(sent) == len(units)
            assert sum(task != -1 for task in sent) >= len(units) - 4, sent
            # By broadcast: as many as ranks for each gather. The second block is used twice, and
            # so is what is tied.
            gathers = issued.count("broadcast") / dist.get_world_size()
            assert gathers <= len(units) + 2, issued
            engine.step()

    def test_every_kind_raises_on_all_ranks_and_models_that_differ_under_init(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a gather that is compared by its size alone (the branches are alike), a rank that
        # is not told, a message that does not say which modules.
        monkeypatch.setattr(intent_store, "LOOK_S", 0.05)
        last = dist.get_world_size() - 1
        is_last = dist.get_rank() == last

        def branch(engine: Any) -> None:
            step(engine, goes_left=not is_last)

        def expert(engine: Any) -> None:
            step(engine, expert=2 if is_last else 1)

        def shape(engine: Any) -> None:
            engine(torch.ones(4, WIDTH))
            dist.all_reduce(torch.ones(3 if is_last else 2))

        def early_exit(engine: Any) -> None:
            for _ in range(1 if is_last else 2):
                step(engine)
            dist.barrier()

        def generation(engine: Any) -> None:
            with torch.no_grad():
                for _ in range(2 if is_last else 3):
                    engine(torch.ones(4, WIDTH))
            step(engine)

        kinds = (
            (branch, "the gather of inlet", "the gather of right"),
            (expert, r"the gather of specialists\.1", r"the gather of specialists\.2"),
            (shape, r"all_reduce.* of float32\[2\]", r"all_reduce.* of float32\[3\]"),
            (early_exit, "the gather of inlet", "barrier"),
            # What one rank gathers for its backward the others gather for their next forward.
            (generation, r"the gather of \w+", "the gather of left|isend of"),
        )
        for act, others, own in kinds if last == 1 else kinds[::4]:
            text = self._failure(act)
            first = "rank 0" if last == 1 else r"rank(s 0, 1| 0)"
            assert re.search(f"{first}(:| waits in) {others} at ", text), text
            assert re.search(f"rank {last}(:| waits in) ({own})", text), text
        # Kills: shards of different sizes that are put together, buckets that only some ranks have.
        is_last = dist.get_rank() == dist.get_world_size() - 1
        with pytest.raises(RuntimeError, match=r"outlet\.weight is \(5, 5\) of .+ 0, .*\(6, 5\)"):
            engine_with(Forks(6 if is_last else 5))
        model = Forks()
        model.left.requires_grad_(not is_last)
        with pytest.raises(RuntimeError, match=r"left\.weight is \(5, 5\) of .+ 0, .*frozen"):
            engine_with(model)
        # Kills: a backend's error, or a wait, when shards of other shapes are handed out.
        width = 6 if dist.get_rank() == dist.get_world_size() - 1 else 5
        for make, text in (
            (lambda: nn.Linear(5, width), r"weight of Linear is \(5, 5\) of .+ 0, .*\(6, 5\) of"),
            (lambda: nn.Linear(5, 5, bias=width == 5), r"bias of Linear is .* 0, .*not there on"),
        ):
            with pytest.raises(RuntimeError, match=f"zero.Init: ranks make .*{text}"):
                with Init():
                    make()
        with Init():
            assert nn.Linear(5, 5).weight.numel() == 0

    @staticmethod
    def _failure(act: Callable[[Any], None]) -> str:
        engine = engine_with(Routed() if act.__name__ == "expert" else Forks(), collectives=True)
        step(engine)
        started = time.monotonic()
        with pytest.raises(CollectiveMismatchError) as failed:
            act(engine)
        took = time.monotonic() - started
        intent.disable()
        assert took < LIMIT_S, took
        return str(failed.value)

    @pytest.mark.world_size(3)
    def test_a_gather_that_stays_alone(self) -> None:
        # Kills: a silent wait; a report without the module, or where nobody waits long.
        model = Forks()
        engine = engine_with(model, lone_gather_report=0.2)
        assert lone_waits.watch.report_s == 0.2
        late = dist.get_world_size() - 1
        is_late = dist.get_rank() == late
        waits: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("the gather of inlet", lambda: step(engine)),
            (
                "GatheredParameters with left.weight",
                lambda: GatheredParameters(model.left.weight).__enter__(),
            ),
        )
        for what, act in waits:
            dist.barrier()
            started = time.monotonic()
            with Reports(f"s for {what}, which not all") as said:
                if is_late:
                    said.await_others(LIMIT_S)
                act()
            assert len(said()) == (0 if is_late else 1), said.texts
            for text in said():
                assert said.since - started >= 0.2
                assert "test_uneven.py" in text
                # On a busy machine it has, for something before.
                whose = [
                    line for line in text.splitlines() if re.match(rf"ranks? .*\b{late}\b", line)
                ]
                assert whose and not any(f"so long for {what}" in line for line in whose), text
        lone_waits.watch.report_s = lone_waits.DEFAULT_REPORT_S
