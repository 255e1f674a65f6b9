"""After a change of layout an optimizer goes on as one process of plain torch that never stopped.

The suite runs the cases that have been wrong, at every stage, and each optimizer in some; the
contract product has every grouping, stage and number of ranks into every other.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.ops.muon.muon import MARK, MuonWithAuxAdam
from deepspeed.utils import groups
from unit.common import DistributedFixture, DistributedTest

from .known_gradients import GROUPINGS, LR, MakeOptimizer, reference, start, train, values_of
from .runs import counts
from .test_universal import UNIVERSAL, convert

WORLDS = (1, 2)
STEPS, AFTER = 2, 2
# The order of the operations on an element may differ by layout, not more; values are about 1.
TOLERANCE = 2e-6
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}}}


def of_torch(name: str, **options: Any) -> MakeOptimizer:
    """One of torch's optimizers."""
    return lambda params: getattr(torch.optim, name)(params, lr=LR, **options)


def halved(params: Any, key: str, value_for: Callable[[torch.Tensor], Any]) -> list[dict[str, Any]]:
    """Groups with each of two values of an option, one or the other without parameters."""
    return [
        {"params": [param for param in group["params"] if value_for(param) == value], key: value}
        for group in params
        for value in sorted({value_for(torch.zeros(1)), value_for(torch.zeros(2, 2))})
    ]


def muon(params: Any) -> torch.optim.Optimizer:
    """Muon for matrices, AdamW for the rest: two optimizers, of which each has state of its own."""
    halves = halved(params, MARK, lambda param: param.dim() > 1)
    return MuonWithAuxAdam(halves, lr=LR, momentum=0.9)


def some_momentum(params: Any) -> torch.optim.Optimizer:
    """State that groups have or not by a number, not by a switch."""
    halves = halved(params, "momentum", lambda param: 0.9 if param.numel() == 1 else 0.0)
    return torch.optim.RMSprop(halves, lr=LR)


# None: the configuration's AdamW.
OPTIMIZERS: dict[str, MakeOptimizer | None] = {
    "AdamW": None,
    "Adam, amsgrad": of_torch("Adam", amsgrad=True),
    "NAdam": of_torch("NAdam"),
    "RAdam": of_torch("RAdam"),
    "ASGD": of_torch("ASGD"),
    "Adadelta": of_torch("Adadelta"),
    "Adagrad": of_torch("Adagrad", initial_accumulator_value=0.5),
    "RMSprop": of_torch("RMSprop", momentum=0.9, centered=True),
    "RMSprop, some momentum": some_momentum,
    "Rprop": of_torch("Rprop"),
    "SGD": of_torch("SGD", momentum=0.9),
    "Muon": muon,
    "Adafactor": of_torch("Adafactor"),
}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ELASTIC = {"elastic_checkpoint": True}
# Of `zero_optimization`.
KEYS: dict[str, dict[str, Any]] = {
    "": {},
    "offload": OFFLOAD,
    "elastic": ELASTIC,
    "elastic, offload": {**OFFLOAD, **ELASTIC},
}


class Layout(NamedTuple):
    """How a run divides its parameters; `pipeline` is a number of stages, 0 for none."""

    stage: int
    grouping: str
    world: int
    pipeline: int = 0
    keys: str = ""


class Case(NamedTuple):
    """What is saved in one layout and loaded in another; `universal`: by `ds_to_universal`."""

    saved: Layout
    into: Layout
    optimizer: str = "AdamW"
    universal: bool = False

    def __str__(self) -> str:
        return f"{self.optimizer}: {tuple(self.saved)} -> {tuple(self.into)}" + (
            ", universal" if self.universal else ""
        )


def seen_wrong(stage: int) -> list[tuple[Layout, Layout]]:
    """What counted steps twice: empty groups, those of one element, one of two, two of one."""
    return [
        (Layout(stage, "empty", 2), Layout(stage, "empty", 1)),
        (Layout(stage, "lone", 1), Layout(stage, "lone", 2)),
        (Layout(stage, "one", 1), Layout(stage, "two", 1)),
        (Layout(stage, "two", 2), Layout(stage, "one", 2)),
        (Layout(stage, "turned", 2), Layout(stage, "empty-first", 1)),
    ]


CASES = [Case(*pair) for stage in range(4) for pair in seen_wrong(stage)]
# A group's one count became that of each of its parameters.
CASES += [
    Case(Layout(saved, "one", 1 + (saved + into) % 2), Layout(into, "lone", 1))
    for saved, into in itertools.permutations(range(4), 2)
]
CASES += [
    Case(Layout(1, "lone", 1), Layout(1, "lone", 2), optimizer)
    for optimizer in list(OPTIMIZERS)[1:]
]
# Numbers beside the state of a parameter without dimensions.
CASES += [Case(Layout(0, "lone", 1), Layout(2, "one", 1), name) for name in ("NAdam", "ASGD")]
CASES += [
    Case(Layout(2, "empty", 2), Layout(2, "empty", 1), "Muon"),
    Case(Layout(3, "one", 1), Layout(3, "turned", 2), "Muon"),
    Case(Layout(3, "two", 2), Layout(1, "empty", 1), "Adafactor"),
]
CASES += [
    Case(Layout(stage, saved, 2, 2), Layout(stage, into, world, pipeline))
    for stage, saved, into, world, pipeline in (
        (0, "lone", "two", 1, 1),
        (1, "empty", "empty", 1, 1),
        (1, "two", "lone", 2, 1),
    )
]
CASES += [
    Case(Layout(1, "one", 1, 1), Layout(1, "turned", 2, 2)),
    Case(Layout(2, "empty", 2), Layout(2, "empty", 1), universal=True),
    Case(Layout(3, "one", 2), Layout(1, "lone", 2), universal=True),
    Case(Layout(2, "lone", 1, keys="offload"), Layout(2, "lone", 2)),
    Case(Layout(2, "one", 1), Layout(2, "lone", 2, keys="offload")),
    Case(Layout(2, "one", 1, keys="elastic"), Layout(2, "lone", 1, keys="elastic")),
    Case(Layout(1, "two", 1, keys="elastic, offload"), Layout(1, "two", 1, keys="elastic")),
]


def product() -> list[Case]:
    """Every layout of AdamW into every other, some of the other optimizers', and pipelines."""
    every = [Layout(*one) for one in itertools.product(range(4), GROUPINGS, WORLDS)]
    some = [one for one in every if one.stage != 2 and one.grouping in ("one", "lone", "empty")]
    pipelines = [
        Layout(stage, grouping, world, pipeline)
        for stage, grouping, (world, pipeline) in itertools.product(
            (0, 1), GROUPINGS, ((1, 1), (2, 1), (2, 2))
        )
    ]
    return [
        Case(*pair, optimizer)
        for optimizer in OPTIMIZERS
        for layouts in ((every, pipelines) if optimizer == "AdamW" else (some,))
        for pair in itertools.permutations(layouts, 2)
    ]


def begun(layout: Layout, optimizer: str, universal: bool = False) -> Any:
    """An engine of a layout."""
    groups.reset()  # a pipeline divides the ranks otherwise
    make = OPTIMIZERS[optimizer]
    keys = {**(UNIVERSAL if universal else {}), **({} if make else ADAMW)}
    zero = {"zero_optimization": KEYS[layout.keys]}
    return start(layout.grouping, layout.stage, make, layout.pipeline, **keys, **zero)


def folder_of(saved: Layout, optimizer: str, base: Any) -> str:
    return f"{base}/{optimizer}-{'-'.join(map(str, saved))}"


def here(cases: Sequence[Case], which: str) -> Iterator[Case]:
    return (case for case in cases if getattr(case, which).world == dist.get_world_size())


class Saved(DistributedFixture):
    """Every layout that some case wants."""

    world_size = list(WORLDS)
    exec_timeout = 120
    cases = CASES

    def run(self, class_tmpdir: Any) -> None:
        done: dict[str, bool] = {}
        for case in here(self.cases, "saved"):
            folder = folder_of(case.saved, case.optimizer, class_tmpdir)
            if folder not in done:
                engine = begun(case.saved, case.optimizer)
                train(engine, STEPS)
                engine.save_checkpoint(folder)
                engine.destroy()
            if case.universal and not done.get(folder) and dist.get_rank() == 0:
                convert(folder)
            done[folder] = done.get(folder, False) or case.universal


class SavedOfAll(Saved):
    exec_timeout = 3600
    cases = product()


class TestUpdates(DistributedTest):
    """Kills: a step count that several states share; padding that resembles state; numbers taken
    for a parameter's state; moments of another element.
    """

    world_size = list(WORLDS)
    exec_timeout = 120

    def test_goes_on(self, Saved: Any, class_tmpdir: Any) -> None:
        self.check(CASES, class_tmpdir)

    def check(self, cases: Sequence[Case], folder: Any) -> None:
        wanted = {
            name: reference(make or of_torch("AdamW", weight_decay=0.1), STEPS + AFTER)
            for name, make in OPTIMIZERS.items()
        }
        found = [self.load(case, wanted[case.optimizer], folder) for case in here(cases, "into")]
        assert [line for lines in found for line in lines] == []

    def load(self, case: Case, wanted: list[dict[str, torch.Tensor]], base: Any) -> list[str]:
        """What is wrong."""
        engine = begun(case.into, case.optimizer, case.universal)
        train(engine, 1)  # state that loading must replace
        try:
            engine.load_checkpoint(folder_of(case.saved, case.optimizer, base))
        except CheckpointError as error:  # on all ranks
            return [f"{case}: {error}"]
        found = []
        if counts(engine) - {STEPS}:
            found.append(f"{case}: {sorted(counts(engine))} steps were counted, not {STEPS}")
        seen = [values_of(engine.module), *train(engine, AFTER)]
        if counts(engine) - {STEPS + AFTER}:
            found.append(f"{case}: {AFTER} steps later {sorted(counts(engine))}")
        for later, (own, values) in enumerate(zip(seen, wanted[STEPS:], strict=True)):
            off = {name: float((own[name] - values[name]).abs().max()) for name in own}
            found += [
                f"{case}: {later} steps later {name} is off by {far:.1e}"
                for name, far in off.items()
                if not far <= TOLERANCE
            ]
        engine.destroy()
        return found[:3]


@pytest.mark.contract
class TestEveryUpdate(TestUpdates):
    exec_timeout = 3600

    def test_goes_on(self, SavedOfAll: Any, class_tmpdir: Any) -> None:
        self.check(product(), class_tmpdir)
