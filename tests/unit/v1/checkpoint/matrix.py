"""The resharding matrix: precisions, stages of ZeRO, divisions of ranks, and a run of each."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from unit.v1.gathering import from_all_ranks

from . import pipeline
from .runs import counts

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
ACCUMULATE = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}


class Cut(NamedTuple):
    """How the ranks of a run are divided."""

    replicas: int
    stages: int
    instances: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replicas * self.stages

    def __str__(self) -> str:
        return f"dp{self.replicas}-pp{self.stages}-oi{self.instances}"


CUTS = [
    Cut(replicas, stages, instances)
    for stages, replicas, instances in itertools.product((1, 2), (1, 2, 3, 4), (1, 2))
    if replicas % instances == 0
]
WORLDS = sorted({cut.world for cut in CUTS})


def zero(stage: int) -> dict[str, Any]:
    """Buckets of 50 elements: every parameter's gradient is spread over several."""
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 50}}


CASES: dict[str, dict[str, Any]] = {
    "fp32-0": zero(0),
    "fp32-1": zero(1),
    "fp32-2": zero(2),
    "fp32-3": zero(3),
    "bf16-0": {**BF16, **zero(0)},
    "bf16-1": {**BF16, **zero(1)},
    "bf16-2": {**BF16, **zero(2)},
    "bf16-3": {**BF16, **zero(3)},
    "accumulate-1": {**ACCUMULATE, **zero(1)},  # BF16_Optimizer
    "fp16-0": {**FP16, **zero(0)},
    "fp16-1": {**FP16, **zero(1)},
    "fp16-2": {**FP16, **zero(2)},
    "fp16-3": {**FP16, **zero(3)},
}


def cuts_of(case: str) -> list[Cut]:
    """Cuts that the case allows: no instances at stage 0, no stage 2 in pipelines."""
    stage = CASES[case]["zero_optimization"]["stage"]
    return [
        cut for cut in CUTS if (stage > 0 or cut.instances == 1) and (stage < 2 or cut.stages == 1)
    ]


class Combination(NamedTuple):
    """A checkpoint of `saved` that is loaded into `into`."""

    case: str
    saved: Cut
    into: Cut


def all_combinations() -> list[Combination]:
    """Every cut of every case into every other."""
    return [
        Combination(case, *pair)
        for case in CASES
        for pair in itertools.permutations(cuts_of(case), 2)
    ]


def pairwise(combinations: Sequence[Combination]) -> list[Combination]:
    """A share of them in which each two properties of a combination occur together at least once.

    Greedy: always the next that shows most new pairs, of those one whose runs are made anyway,
    with few ranks.
    """

    def pairs(one: Combination) -> set[Any]:
        return set(
            itertools.combinations(enumerate((*one.case.split("-"), *one.saved, *one.into)), 2)
        )

    def shared(one: Combination) -> int:
        return (("saved", one.case, one.saved) in runs) + (("into", one.case, one.into) in runs)

    runs: set[Any] = set()
    shown = {one: pairs(one) for one in combinations}
    missing = set().union(*shown.values())
    chosen = []
    while missing:
        best = max(
            combinations,
            key=lambda one: (
                len(shown[one] & missing),
                shared(one),
                -one.saved.world - one.into.world,
            ),
        )
        chosen.append(best)
        runs |= {("saved", best.case, best.saved), ("into", best.case, best.into)}
        missing -= shown[best]
    return chosen


class Plain(nn.Module):
    """The pipeline's layers as one module, for stages of ZeRO that pipelines have not."""

    def __init__(self) -> None:
        super().__init__()
        width = pipeline.WIDTH
        self.tied = nn.Linear(width, 5, bias=False)
        self.body = nn.Sequential(
            nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 7), nn.Linear(7, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: (batch, WIDTH)
        return pipeline.transposed(self.tied, self.body(self.tied(x)))


class Run:
    """One engine of a case and a cut, in a world of as many ranks; `seed` draws weights."""

    def __init__(self, case: str, cut: Cut, seed: int) -> None:
        self.is_pipeline = any(other.stages > 1 for other in cuts_of(case))
        keys = dict(CASES[case])
        keys["zero_optimization"] = {
            **keys["zero_optimization"],
            **({"stage3_param_persistence_threshold": 6} if case.endswith("3") else {}),
            "num_optimizer_instances": cut.instances,
        }
        if self.is_pipeline:
            self.engine = pipeline.make(cut.stages, seed=seed, grouped=True, **keys)
            return
        torch.manual_seed(seed)
        module = Plain()
        configuration = pipeline.configuration(cut.replicas, **keys)
        self.engine = deepspeed.initialize(
            model=module, model_parameters=pipeline.decay_groups(module), config=configuration
        )[0]

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Mean loss over all ranks and norm of the next steps; the whole batch is the same."""
        return (
            pipeline.train(self.engine, steps)
            if self.is_pipeline
            else [self._step() for _ in range(steps)]
        )

    def _step(self) -> tuple[float, float]:
        engine, losses = self.engine, []
        drawn = pipeline.draw(
            engine.global_steps,
            dist.get_world_size(),
            dist.get_rank(),
            next(engine.module.parameters()).dtype,
        )
        for x, labels in drawn:
            loss = pipeline.loss_fn(engine(x), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        total = torch.stack(losses).mean()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size(), float(engine.get_global_grad_norm())

    def held(self) -> dict[str, Any]:
        """Everything that no division over ranks may change, by name, on every rank."""
        engine = self.engine
        scaler = vars(engine.optimizer.loss_scaler) if engine.fp16_enabled() else {}
        return {
            **pipeline.whole(engine),
            "scaler": {
                key: value for key, value in scaler.items() if key.startswith(("cur_", "last_"))
            },
            "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
            "rates": engine.get_lr(),
            "schedule": engine.lr_scheduler.state_dict(),
            "steps": set().union(*from_all_ranks(counts(engine))),
        }


def by_cut(
    combinations: Sequence[Combination], which: str, world: int
) -> Iterator[tuple[str, Cut, list[Combination]]]:
    """Case, cut and combinations of each run that a world of this size saves or loads."""
    here = [one for one in combinations if getattr(one, which).world == world]
    for case, cut in dict.fromkeys((one.case, getattr(one, which)) for one in here):
        yield case, cut, [one for one in here if (one.case, getattr(one, which)) == (case, cut)]
