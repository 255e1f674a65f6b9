"""Faults of one unit in the last place: found by digests, and located by `ds_diff`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from deepspeed import comm as dist
from deepspeed.ops.squares import ExactSquares
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.gradients import canonical
from deepspeed.runtime.gradients.canonical import CanonicalSums
from deepspeed.runtime.optimizers import step_sequence
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.verify import diff
from unit.common import DistributedTest
from unit.v1.reproducibility.cases import Case
from unit.v1.reproducibility.runs import engine_of, train

PLANTED_AT = 2  # step
RANK = 1


def up(value: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(value, torch.full_like(value, torch.inf))


class Planted:
    """Is in force in the planted step, on one rank."""

    engine: Any = None

    @classmethod
    def is_now(cls) -> bool:
        at = cls.engine is not None and cls.engine.global_steps == PLANTED_AT - 1
        return at and dist.get_rank() == RANK


def instead(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """Where the fault is in force call `change` with the function, and what that is given."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if Planted.is_now():
            return change(original, *args, **kwargs)
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, call)


def on_leaves(change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Any:
    """Change what one call of `CanonicalSums.add` is given."""

    def add(original: Any, sums: Any, target: torch.Tensor, parts: Any, *rest: Any) -> None:
        original(sums, target, change([part.clone() for part in parts]), *rest)

    return instead(CanonicalSums, "add", add)


def doubled(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The leaf of another rank is this one's."""
    return [parts[1], parts[1]]


def nudged(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every element by one unit: of a single one the sum's own rounding may leave nothing, and the
    gradients differ with the processor's products.
    """
    return [up(parts[0]), *parts[1:]]


def after_step(change: Callable[[Any], None]) -> Any:
    """Change the optimizer's state at the end of a step."""

    def step(original: Any, sequence: StepSequence) -> None:
        original(sequence)
        change(sequence)

    return instead(StepSequence, "step", step)


def master(sequence: Any) -> torch.Tensor:
    found: torch.Tensor = sequence.masters.groups[0].masters[0].data
    return found


def state(sequence: Any) -> dict[str, Any]:
    found: dict[str, Any] = sequence.state[sequence.masters.groups[0].masters[0]]
    return found


def flip_a_moment(sequence: Any) -> None:
    state(sequence)["exp_avg_sq"].view(torch.int32)[3] ^= 1


def nudge_a_tail(sequence: Any) -> None:
    # What lies there, padding left out.
    own = sequence.masters.groups[0].table.of_shard(RANK)[-1].in_shard
    master(sequence)[own.stop - 1] = up(master(sequence)[own.stop - 1])


def exchange_elements(sequence: Any) -> None:
    master(sequence)[[0, 1]] = master(sequence)[[1, 0]]


def count_twice(sequence: Any) -> None:
    state(sequence)["step"] += 1


def by_reciprocal() -> Any:
    def div(_: Any, total: torch.Tensor, divisor: float, out: torch.Tensor) -> torch.Tensor:
        return torch.mul(total, 1.0 / divisor, out=out)

    return instead(canonical.torch, "div", div)


def off_by(factor: float, owner: Any, name: str) -> Any:
    """A function gives so many times what it would give."""
    return instead(owner, name, lambda original, *args: original(*args) * factor)


def seeds_of_another_rank() -> Any:
    def seed_forward(original: Any, engine: DeepSpeedEngine, micro_step: int) -> None:
        original(engine, micro_step)
        torch.manual_seed(7)

    return instead(DeepSpeedEngine, "_seed_forward", seed_forward)


def rate_one_off() -> Any:
    def step(original: Any, sequence: Any) -> None:
        groups = sequence.masters.optimizer.param_groups
        rate = groups[0]["lr"]
        groups[0]["lr"] = rate * (1 + 2**-23)
        original(sequence)
        groups[0]["lr"] = rate

    return instead(StepSequence, "step", step)


FAULTS: dict[str, Callable[[], Any]] = {
    "a leaf twice": lambda: on_leaves(doubled),
    "a leaf lost": lambda: on_leaves(lambda parts: [torch.zeros_like(parts[0]), parts[1]]),
    "leaves paired otherwise": lambda: on_leaves(
        lambda parts: [torch.zeros_like(parts[0]), *parts]
    ),
    "leaves of one micro-batch summed before": lambda: on_leaves(
        lambda parts: [torch.zeros_like(parts[0]), parts[0] + parts[1].bfloat16()]
    ),
    "a leaf rounded": lambda: on_leaves(lambda parts: [parts[0].bfloat16().float(), parts[1]]),
    "a leaf one off": lambda: on_leaves(nudged),
    "a product with the reciprocal": by_reciprocal,
    "a norm one off": lambda: off_by(1 + 2**-20, ExactSquares, "totals"),
    "a clip factor one off": lambda: off_by(1 + 2**-22, step_sequence, "clip_factor"),
    "seeds of another rank": seeds_of_another_rank,
    "a learning rate one off": rate_one_off,
    "a bit of a moment": lambda: after_step(flip_a_moment),
    "the last element of a slice": lambda: after_step(nudge_a_tail),
    "two elements exchanged": lambda: after_step(exchange_elements),
    "a step counted twice": lambda: after_step(count_twice),
}


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    watch = {"enabled": True, "output_path": str(folder.parent), "job_name": folder.name}
    more = {"seed_forwards": True, "world_size_invariant": True, "digest_every": 1}
    engine = engine_of(Case(2), watch={**watch, "refresh_seconds": 0}, reproducibility=more)
    Planted.engine = engine
    yield
    train(engine, steps=3)
    Planted.engine = None
    engine.destroy()


class TestFaults(DistributedTest):
    world_size = 2

    def test_the_step_and_the_parameters(self, tmpdir: Any) -> None:
        with recorded(Path(tmpdir, "right")):
            pass
        with recorded(Path(tmpdir, "again")):
            pass
        silent = []
        for number, planted in enumerate(FAULTS.values()):
            with planted(), recorded(Path(tmpdir, str(number))):
                pass
        dist.barrier()
        if dist.get_rank() == 0:
            assert diff.compare(Path(tmpdir, "right"), Path(tmpdir, "again")).exit_code == 0
            for number, name in enumerate(FAULTS):
                found = diff.compare(Path(tmpdir, "right"), Path(tmpdir, str(number)))
                named = [each.name for each in found.differences if each.what == "digest"]
                if found.step != PLANTED_AT or not named:
                    silent.append((name, found.step, named))
                assert found.steps[0] == (1, True), name
        assert silent == []
