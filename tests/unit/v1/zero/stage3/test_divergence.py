"""Ranks that take different ways at stage 3: all raise with the collective check, or it is told."""

import logging
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.watch import intent, lone_waits
from deepspeed.comm.watch.intent import CollectiveMismatchError, intent_store
from deepspeed.runtime.zero import GatheredParameters, Init
from deepspeed.utils.logging import logger
from unit.common import DistributedTest
from unit.v1.zero.stage3.models import SHARDED, config_of, engine_of

WIDTH = 5
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
    zero = {**SHARDED, "stage3_max_reuse_distance": 0}
    return engine_of(model, {**config_of(3, 1, **zero), "verify": verify})


def step(engine: Any, **kwargs: Any) -> None:
    engine.backward(engine(torch.ones(4, WIDTH), **kwargs).square().mean())
    engine.step()


class TestChecked(DistributedTest):
    """With `"verify": {"collectives": true}`."""

    world_size = [2, 3]

    def test_every_kind_raises_on_all_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
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
            (generation, r"the gather of \w+", "the gather of left|irecv of"),
        )
        for act, others, own in kinds if last == 1 else kinds[::4]:
            text = self._failure(act)
            first = "rank 0" if last == 1 else r"rank(s 0, 1| 0)"
            assert re.search(f"{first}(:| waits in) {others} at ", text), text
            assert re.search(f"rank {last}(:| waits in) ({own})", text), text

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

    def test_models_that_differ(self) -> None:
        # Kills: shards of different sizes that are put together, buckets that only some ranks have.
        is_last = dist.get_rank() == dist.get_world_size() - 1
        with pytest.raises(RuntimeError, match=r"outlet\.weight is \(5, 5\) of .+ 0, .*\(6, 5\)"):
            engine_with(Forks(6 if is_last else 5))
        model = Forks()
        model.left.requires_grad_(not is_last)
        with pytest.raises(RuntimeError, match=r"left\.weight is \(5, 5\) of .+ 0, .*frozen"):
            engine_with(model)

    def test_models_that_differ_under_init(self) -> None:
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


class TestReported(DistributedTest):
    world_size = 3

    def test_a_gather_that_stays_alone(self) -> None:
        # Kills: a silent wait; a report without the module, or where nobody waits long.
        said: list[tuple[float, str]] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append((time.monotonic(), record.getMessage()))  # type: ignore[method-assign]  # a list is all that is needed
        logger.addHandler(handler)
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
            said.clear()
            dist.barrier()
            started = time.monotonic()
            if is_late:
                time.sleep(1.0)
            act()
            # It is written a moment after the others were asked what they wait for.
            while not is_late and not said and time.monotonic() - started < LIMIT_S:
                time.sleep(0.02)
            found = [(at, text) for at, text in said if f"s for {what}, which not all" in text]
            assert len(found) == (0 if is_late else 1), said
            for at, text in found:
                assert at - started >= 0.2
                assert "test_divergence.py" in text
                assert f"rank {late} has not waited so long" in text
        lone_waits.watch.report_s = lone_waits.DEFAULT_REPORT_S
        logger.removeHandler(handler)
