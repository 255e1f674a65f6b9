"""The resharding matrix: what one division of ranks saved goes on in every other, bit for bit.

The suite runs a pairwise share; the campaign `reshard-matrix` runs every combination and prints
how many held (`DS_RESHARD_MATRIX`: the file to which it writes them).
"""

import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from unit.common import DistributedFixture, DistributedTest
from unit.models import seeded
from unit.one_process import train as train_on
from unit.v1.contract.matrix import covering
from unit.v1.gathering import from_all_ranks

from . import runs
from . import test_pipeline as pipeline
from .runs import ACCUMULATE, BF16, FP16, counts, decay_groups, keep, kept, zero


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


TABLE = os.environ.get("DS_RESHARD_MATRIX")
CUTS = [
    Cut(replicas, stages, instances)
    for stages, replicas, instances in itertools.product((1, 2), (1, 2, 3, 4), (1, 2))
    if replicas % instances == 0
]
if not TABLE:
    CUTS.append(Cut(1, 4, 1))  # stages between others, which the campaign leaves out


PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": BF16, "fp16": FP16}
CASES: dict[str, dict[str, Any]] = {
    **{
        f"{p}-{stage}": {**keys, **zero(stage)}
        for p, keys in PRECISIONS.items()
        for stage in range(4)
    },
    "accumulate-1": {**ACCUMULATE, **zero(1)},  # BF16_Optimizer
}


def cuts_of(case: str) -> list[Cut]:
    """Cuts that the case allows: no instances at stage 0, no stage 2 in pipelines."""
    stage = CASES[case]["zero_optimization"]["stage"]
    single = [cut for cut in CUTS if stage > 0 or cut.instances == 1]
    return [cut for cut in single if stage < 2 or cut.stages == 1]


class Combination(NamedTuple):
    """A checkpoint of `saved` that is loaded into `into`."""

    case: str
    saved: Cut
    into: Cut

    def __str__(self) -> str:
        return f"{self.case}: {self.saved} -> {self.into}"


def all_combinations() -> list[Combination]:
    """Every cut of every case into every other."""
    pairs = {case: itertools.permutations(cuts_of(case), 2) for case in CASES}
    return [Combination(case, *pair) for case, several in pairs.items() for pair in several]


def pairwise(combinations: Sequence[Combination]) -> list[Combination]:
    """A share of them in which each two properties of a combination occur together at least once.

    Those of few ranks come first: of several that show as much it is the first that is taken.
    """
    fields = [f"{which} {field}" for which in ("saved", "into") for field in Cut._fields]
    names = ("precision", "stage", *fields)
    rows = []
    for one in sorted(combinations, key=lambda one: one.saved.world + one.into.world):
        properties = (*one.case.split("-"), *one.saved, *one.into)
        rows.append({"one": one, **dict(zip(names, properties, strict=True))})
    return [row["one"] for row in covering(rows, dict.fromkeys(names, ()))]


class Plain(nn.Module):
    """The pipeline's layers as one module, for stages of ZeRO that pipelines have not."""

    def __init__(self) -> None:
        super().__init__()
        width = pipeline.WIDTH
        self.tied = nn.Linear(width, 5, bias=False)
        ends = nn.Linear(7, 3), nn.Linear(3, 7), nn.Linear(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), *ends)

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
        module = seeded(Plain, seed=seed)
        groups = [*decay_groups(module), {"params": []}]
        keys = pipeline.configuration(cut.replicas, **keys)
        self.engine = deepspeed.initialize(model=module, model_parameters=groups, config=keys)[0]

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Mean loss over all ranks and norm of the next steps; the whole batch is the same."""
        if self.is_pipeline:
            return pipeline.train(self.engine, steps)
        return [self._step() for _ in range(steps)]

    def _step(self) -> tuple[float, float]:
        engine, ranks, rank = self.engine, dist.get_world_size(), dist.get_rank()
        drawn = pipeline.draw(engine.global_steps, ranks, rank, engine.model_dtype)
        losses = train_on(
            engine, drawn, lambda model, batch: pipeline.loss_fn(model(batch[0]), batch[1])
        )
        total = torch.tensor(losses).mean()
        dist.all_reduce(total)
        return total.item() / ranks, float(engine.get_global_grad_norm())

    def held(self) -> dict[str, Any]:
        """Everything that no division over ranks may change, by name, on the first rank."""
        engine = self.engine
        scaler = vars(engine.optimizer.loss_scaler) if engine.fp16_enabled() else {}
        kept = {key: value for key, value in scaler.items() if key.startswith(("cur_", "last_"))}
        return {
            **pipeline.whole(engine),
            "scaler": kept,
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


EVERY = all_combinations()
# More than four ranks are the campaign's alone.
COMBINATIONS = (
    EVERY
    if TABLE
    else pairwise([one for one in EVERY if max(one.saved.world, one.into.world) <= 4])
)
WORLDS = sorted({cut.world for one in COMBINATIONS for cut in (one.saved, one.into)})
STEPS, AFTER = 2, 4
# Relative, of losses and norms. Other ranks add gradients in another order, in the model's dtype
# within a micro-batch, and activations of micro-batches of another size may be rounded otherwise:
# fp32 keeps 2**-24, bf16 2**-9, fp16 2**-12 of a value.
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2, "accumulate": 1e-2, "fp16": 2e-3}


def deviation(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The largest relative one of losses and norms."""
    pairs = [pair for steps in zip(found, wanted, strict=True) for pair in zip(*steps, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


class SavedCuts(DistributedFixture):
    """Every case in every cut, saved after two steps, with what it held and how it went on."""

    world_size = WORLDS
    exec_timeout = 1200 if TABLE else 120

    def run(self, class_tmpdir: Any) -> None:
        for case, cut, _ in by_cut(COMBINATIONS, "saved", dist.get_world_size()):
            # It has weights of its own, so that no other checkpoint is taken for it.
            run = Run(case, cut, seed=1 + CUTS.index(cut))
            run.train(STEPS)
            folder = f"{class_tmpdir}/{case}-{cut}"
            run.engine.save_checkpoint(folder)
            keep(folder, (run.held(), run.train(AFTER), run.held()))
            run.engine.destroy()  # the next run's ranks are divided otherwise


class TestMatrix(DistributedTest):
    """Kills: shards, padding or steps taken for others', ties taken twice or from nowhere, moments
    or a loss scale that stay what they were.
    """

    world_size = WORLDS
    exec_timeout = 1200 if TABLE else 120

    def test_goes_on(self, SavedCuts: Any, class_tmpdir: Any) -> None:
        outcomes = []
        for case, cut, combinations in by_cut(COMBINATIONS, "into", dist.get_world_size()):
            run = Run(case, cut, seed=100)
            run.train(1)  # state that loading must replace
            outcomes += [
                self.load(run, one, f"{class_tmpdir}/{case}-{one.saved}") for one in combinations
            ]
            run.engine.destroy()
        file = Path(class_tmpdir, f"outcomes-{dist.get_world_size()}.json")
        runs.on_rank_0(lambda: file.write_text(json.dumps(outcomes)))
        assert [f"{told}: {problem}" for told, problem, _ in outcomes if problem] == []

    def load(self, run: Run, one: Combination, folder: str) -> tuple[str, str, float]:
        """The combination, what is wrong if anything, and how far losses and norms are off."""
        told = str(one)
        held, wanted, wanted_later = kept(folder)
        try:
            run.engine.load_checkpoint(folder)
        except CheckpointError as error:  # on all ranks
            return told, str(error), math.inf
        found = runs.otherwise(held, run.held()) + runs.exported_otherwise(folder, held)
        went_on = run.train(AFTER)
        off = deviation(went_on, wanted)
        if off > TOLERANCES[one.case.partition("-")[0]]:
            found.append(f"losses or norms are off by {off:.1e}: {went_on} instead of {wanted}")
        later = run.held()
        if later["steps"] != wanted_later["steps"]:
            found.append(f"{AFTER} steps later {later['steps']} were counted")
        if one.case.startswith("fp32"):
            # Counting a step twice moves an update by a tenth of the rate of 1e-2; other precisions
            # round small gradients of other micro-batches otherwise.
            found += runs.masters_off(later, wanted_later, 1e-4)
        return told, "; ".join(found[:3]), off

    @pytest.mark.world_size(1)
    def test_none_was_left_out(self, class_tmpdir: Any) -> None:
        """Kills: a matrix that is green because it is empty."""
        files = sorted(Path(class_tmpdir).glob("outcomes-*.json"))
        outcomes = [outcome for file in files for outcome in json.loads(file.read_text())]
        if TABLE:
            of_case = {case: [o for o in outcomes if o[0].startswith(f"{case}:")] for case in CASES}
            lines = [self._line(case, several) for case, several in of_case.items()]
            held = sum(not problem for _, problem, _ in outcomes)
            lines.append(f"{held} of {len(COMBINATIONS)} combinations\n")
            Path(TABLE).write_text("\n".join(lines))
        assert {told for told, *_ in outcomes} == set(map(str, COMBINATIONS))

    @staticmethod
    def _line(case: str, outcomes: Sequence[Any]) -> str:
        held = sum(not problem for _, problem, _ in outcomes)
        worst = max((off for *_, off in outcomes), default=math.nan)
        held_of = f"{case}: {held} of {len(outcomes)} held"
        return f"{held_of}, losses and norms within {worst:.1e} of the saver's"
