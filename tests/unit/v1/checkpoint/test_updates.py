"""After a change of layout an optimizer goes on as one process of plain torch that never stopped;
it has state of its own, and its parameters' rates.

The suite runs the cases that have been wrong, at every stage, and each optimizer in some; the
contract product has every grouping, stage and number of ranks into every other.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.ops.muon.muon import MARK, MuonWithAuxAdam
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.zero import sharded_state
from deepspeed.utils import groups
from unit import one_process
from unit.common import DistributedFixture, DistributedTest
from unit.models import config_of, drawn, tokens
from unit.one_process import OneProcess

from .runs import CPU, UNIVERSAL, convert, counts, differences, refused, zero

# A model whose gradients are exact in any division over ranks: means of integers and halves. What
# an optimizer makes of them elementwise depends on the layout by no more than the last bit, and a
# step that is counted twice shows at once.

FEATURES, BATCH, MICRO_BATCHES = 3, 8, 2
# A matrix, a vector that no number of ranks divides, one element, and no dimensions at all.
SHAPES = {"0.value": (4, 3), "1.value": (5,), "2.value": (1,), "3.value": ()}
NAMES = list(SHAPES)
# Names in each parameter group; groups without any are what adapters leave of a decay / no-decay
# pair.
GROUPINGS: dict[str, list[list[str]]] = {
    "one": [NAMES],
    "two": [NAMES[:1], NAMES[1:]],
    "lone": [[*NAMES[:2], NAMES[3]], [NAMES[2]]],
    "empty": [NAMES, []],
    "empty-first": [[], NAMES],
    "turned": [[NAMES[3]], [], NAMES[1:3], NAMES[:1]],
}
LR = 2.0**-6
MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Term(nn.Module):
    """Adds a parameter times coefficients of the input to the last column, where the sum is."""

    def __init__(self, name: str) -> None:
        super().__init__()
        shape, number = torch.Size(SHAPES[name]), NAMES.index(name)
        self.value = nn.Parameter(drawn(number, *shape))
        self.coefficients: torch.Tensor
        halves = 1 + tokens(number, 6, FEATURES, shape.numel())
        self.register_buffer("coefficients", halves / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: (batch, FEATURES + 1)
        factors = x[:, :FEATURES] @ self.coefficients.to(x.dtype)
        term = factors @ self.value.view(-1, 1)
        return torch.cat([x[:, :FEATURES], x[:, FEATURES:] + term], dim=1)


def loss_fn(outputs: torch.Tensor, labels: Any = None) -> torch.Tensor:
    """Mean of the sums."""
    return outputs[:, FEATURES].mean()


def made() -> nn.Module:
    """The same in every run."""
    return nn.Sequential(*(Term(name) for name in NAMES))


def batch(step: int) -> torch.Tensor:
    """Of all ranks; the last column is what terms are added to."""
    return torch.cat([tokens(100 + step, 7, BATCH, FEATURES) - 3.0, torch.zeros(BATCH, 1)], dim=1)


def grouped(module: nn.Module, grouping: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Parameter groups of a module that has all of these parameters, or of a stage, some."""
    own = dict(module.named_parameters())
    return [{"params": [own[name] for name in names if name in own]} for names in grouping]


def reference(make: MakeOptimizer, steps: int) -> list[dict[str, torch.Tensor]]:
    """Values before the first and after each step of one process of plain torch."""
    module = made()
    one = OneProcess(module, make(grouped(module, [NAMES])), lambda m, x: loss_fn(m(x)))
    seen = [one.params()]
    for step in range(steps):
        one.step([batch(step)])
        seen.append(one.params())
    return seen


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter whole, at any stage, on every rank."""
    params = dict(module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(params.values())):
        return {name: param.detach().clone() for name, param in params.items()}


def start(
    grouping: Sequence[Sequence[str]],
    stage: int,
    make: MakeOptimizer | None = None,
    stages: int = 0,
    schedule: Callable[[Any], Any] | None = None,
    **keys: Any,
) -> Any:
    """An engine over a fresh model; `make` gives a client's optimizer, or `keys` name one;
    `stages` of a pipeline, or 0.
    """
    module: Any = made()
    if stages:
        layers = [LayerSpec(Term, name) for name in NAMES]
        how = {"loss_fn": loss_fn, "partition_method": "uniform"}
        module = PipelineModule(layers, num_stages=stages, **how)
    groups = grouped(module, grouping)
    given: dict[str, Any] = (
        {"model_parameters": groups} if make is None else {"optimizer": make(groups)}
    )
    if schedule is not None:
        given["lr_scheduler"] = schedule(given["optimizer"])
    at_stage_3 = {"stage3_param_persistence_threshold": 3} if stage == 3 else {}
    block = {"reduce_bucket_size": 20, **at_stage_3, **keys.pop("zero_optimization", {})}
    ranks = dist.get_world_size() // max(stages, 1)
    rows = BATCH // ranks // MICRO_BATCHES
    settings = config_of(stage, rows, MICRO_BATCHES, zero_optimization=block, **keys)
    return deepspeed.initialize(model=module, config=settings, **given)[0]


def train(engine: Any, steps: int) -> list[dict[str, torch.Tensor]]:
    """Take steps; this rank's values after each."""
    seen = []
    ranks = engine.parallel_map.replicas
    for _ in range(steps):
        own = batch(engine.global_steps).chunk(len(ranks.ranks))[ranks.rank]
        parts = own.chunk(MICRO_BATCHES)
        if isinstance(engine.module, PipelineModule):
            engine.train_batch(iter([(part, part) for part in parts]))
        else:
            one_process.train(engine, parts, lambda model, x: loss_fn(model(x)))
        seen.append(values_of(engine.module))
    return seen


# The layouts

WORLDS = (1, 2)
STEPS, AFTER = 2, 4
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
ELASTIC = {"elastic_checkpoint": True}
# Of `zero_optimization`.
KEYS: dict[str, dict[str, Any]] = {
    "": {},
    "offload": CPU,
    "elastic": ELASTIC,
    "elastic, offload": {**CPU, **ELASTIC},
    "params": {"offload_param": {"device": "cpu"}},
    "0.01": {"offload_optimizer": {"device": "cpu", "ratio": 0.01}},
    "0.4": {"offload_optimizer": {"device": "cpu", "ratio": 0.4}},
    "0.7": {"offload_optimizer": {"device": "cpu", "ratio": 0.7}},
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
        layouts = f"{tuple(self.saved)} -> {tuple(self.into)}"
        return f"{self.optimizer}: {layouts}{', universal' if self.universal else ''}"


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
LONE = (Layout(1, "lone", 1), Layout(1, "lone", 2))
CASES += [Case(*LONE, optimizer) for optimizer in list(OPTIMIZERS)[1:]]
# Numbers beside the state of a parameter without dimensions.
CASES += [Case(Layout(0, "lone", 1), Layout(2, "one", 1), name) for name in ("NAdam", "ASGD")]
CASES += [
    Case(Layout(2, "empty", 2), Layout(2, "empty", 1), "Muon"),
    Case(Layout(3, "one", 1), Layout(3, "turned", 2), "Muon"),
    Case(Layout(3, "two", 2), Layout(1, "empty", 1), "Adafactor"),
]
CASES += [
    Case(Layout(0, "lone", 2, 2), Layout(0, "two", 1, 1)),
    Case(Layout(1, "empty", 2, 2), Layout(1, "empty", 1, 1)),
    Case(Layout(1, "two", 2, 2), Layout(1, "lone", 2, 1)),
    Case(Layout(1, "one", 1, 1), Layout(1, "turned", 2, 2)),
    Case(Layout(2, "empty", 2), Layout(2, "empty", 1), universal=True),
    Case(Layout(3, "one", 2), Layout(1, "lone", 2), universal=True),
    Case(Layout(2, "lone", 1, keys="offload"), Layout(2, "lone", 2)),
    Case(Layout(2, "one", 1), Layout(2, "lone", 2, keys="offload")),
    Case(Layout(2, "one", 1, keys="elastic"), Layout(2, "lone", 1, keys="elastic")),
    Case(Layout(1, "two", 1, keys="elastic, offload"), Layout(1, "two", 1, keys="elastic")),
    Case(Layout(3, "one", 2), Layout(3, "one", 2, keys="params")),
    Case(Layout(3, "one", 2, keys="params"), Layout(3, "one", 2)),
]
# Parts of the optimizer on the host: none, some or almost none, and what goes from one to another.
CASES += [
    Case(Layout(3, "two", 2, keys=one), Layout(3, "two", 2, keys=other), optimizer)
    for one, other in itertools.pairwise(("offload", "0.4", "0.01", "0.7", ""))
    for optimizer in ("AdamW", "SGD")
]
CASES += [Case(Layout(2, "two", 2), Layout(3, "two", 2, keys="0.4"), "SGD")]


def product() -> list[Case]:
    """Every layout of AdamW into every other, some of the other optimizers', and pipelines."""
    every = [Layout(*one) for one in itertools.product(range(4), GROUPINGS, WORLDS)]
    some = [one for one in every if one.stage != 2 and one.grouping in ("one", "lone", "empty")]
    divided = itertools.product((0, 1), GROUPINGS, ((1, 1), (2, 1), (2, 2)))
    pipelines = [Layout(stage, grouping, *ranks) for stage, grouping, ranks in divided]
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
    keys["zero_optimization"] = KEYS[layout.keys]
    return start(GROUPINGS[layout.grouping], layout.stage, make, layout.pipeline, **keys)


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
    for a parameter's state; moments of another element; parts of a partial offload in another order
    than parameters, or one count of steps for both.
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


# What optimizers have after loading

# Stage, and how its files are.
LAYOUTS = [*(Layout(stage, "two", 1) for stage in range(4)), Layout(2, "two", 1, keys="elastic")]


def share_counts(engine: Any) -> None:
    """Leave one step count to all states, as earlier versions did when they resharded."""
    first, *others = engine.optimizer.state.values()
    for own in others:
        own["step"] = first["step"]


class TestMemory(DistributedTest):
    world_size = 1

    def test_a_file_with_one_count_for_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: state that is taken from a file as it is.
        for layout in LAYOUTS:
            folder = tmp_path / str(layout)
            engine = begun(layout, "AdamW")
            train(engine, STEPS)
            share_counts(engine)
            engine.save_checkpoint(folder)
            engine = begun(layout, "AdamW")
            engine.load_checkpoint(folder)
            train(engine, AFTER)
            assert counts(engine) == {STEPS + AFTER}, layout

        # Kills: a way of loading that forgets it, and nobody notices.
        def forgetful(optimizer: Any, state: Any) -> None:
            optimizer.load_state_dict(state)

        monkeypatch.setattr(sharded_state, "load_in_place", forgetful)
        with pytest.raises(AssertionError, match="'step'"):
            begun(LAYOUTS[2], "AdamW").load_checkpoint(tmp_path / str(LAYOUTS[2]))

    def test_of_a_program_stays_its_own(self) -> None:
        # Kills: two engines that count and average in the same tensors.
        for stage in (1, 2, 3):
            one, other = (begun(Layout(stage, "two", 1), "AdamW") for _ in range(2))
            train(one, STEPS)
            given = one.optimizer.state_dict()
            state = given["base_optimizer_state" if stage < 3 else "optimizer_state_dict"]
            before = copy.deepcopy(state)
            other.optimizer.load_state_dict(given)
            train(other, AFTER)
            assert differences(state, before) == [], stage
            assert (counts(one), counts(other)) == ({STEPS}, {STEPS + AFTER}), stage


RATES = {"0.value": 2**-5, "2.value": 2**-7}


def scaled(numerator: float, offset: float) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: numerator / (offset + n))


SCHEDULES: dict[str, Any] = {
    "lambda": scaled(1, 1),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [scaled(1, 1)(optimizer), scaled(2, 3)(optimizer)], milestones=[3]
    ),
}
DIVIDED = {
    "saved": [NAMES[:2], NAMES[2:]],
    "turned": [NAMES[2:], NAMES[:2]],
    "split": [NAMES[3:], NAMES[1:2], NAMES[:1], NAMES[2:3]],
}


def scheduled(grouping: list[list[str]], schedule: str, rates: dict[str, float]) -> Any:
    """An engine over these groups, each with the rate of its first parameter."""

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        pairs = zip(groups, grouping, strict=True)
        return torch.optim.AdamW([{**group, "lr": rates[names[0]]} for group, names in pairs])

    return start(grouping, 1, make, schedule=SCHEDULES[schedule])


def rates_of(engine: Any, grouping: list[list[str]]) -> dict[str, float]:
    return {
        name: group["lr"]
        for names, group in zip(grouping, engine.optimizer.param_groups, strict=True)
        for name in names
    }


class TestRates(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_follow_parameters_into_other_groups(self, tmp_path: Path, schedule: str) -> None:
        # Kills: base rates of a schedule by number of a group that is another now.
        engine = scheduled(DIVIDED["saved"], schedule, RATES)
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        train(engine, 3)
        wanted = rates_of(engine, DIVIDED["saved"])
        assert len(set(wanted.values())) == 2
        for name in ("turned", "split"):
            engine = scheduled(DIVIDED[name], schedule, dict.fromkeys(NAMES, 0.5))
            engine.load_checkpoint(tmp_path)
            train(engine, 3)
            assert rates_of(engine, DIVIDED[name]) == wanted, name

    def test_are_not_one_tensor(self, tmp_path: Path) -> None:
        # Kills: groups made of one, of which a schedule that writes in place changes all.
        def make(groups: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(groups, lr=torch.tensor(LR), foreach=False)

        engine = start(GROUPINGS["one"], 1, make)
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
        engine = start(GROUPINGS["two"], 1, make)
        engine.load_checkpoint(tmp_path)
        first, second = engine.optimizer.param_groups
        first["lr"].fill_(0.5)
        assert float(second["lr"]) == LR


def decaying(grouping: list[list[str]], decays: list[float]) -> Any:
    """An engine over two parameters of which two ranks have one each."""
    module = nn.Module()
    for name in ("first", "second"):
        module.register_parameter(name, nn.Parameter(torch.ones(8)))
    module.forward = lambda x: (x * module.first * module.second).sum()  # type: ignore[method-assign]
    groups = grouped(module, grouping)
    for group, decay in zip(groups, decays, strict=True):
        group["weight_decay"] = decay
    config = {"train_batch_size": 2, **zero(1), **ADAMW}
    engine = deepspeed.initialize(model=module, model_parameters=groups, config=config)[0]
    engine.backward(engine(torch.ones(8)))
    engine.step()
    return engine


class SavedWithTwoDecays(DistributedFixture):
    world_size = 1

    def run(self, class_tmpdir: Any) -> None:
        decaying([["first"], ["second"]], [0.1, 0.0]).save_checkpoint(class_tmpdir)


class TestHyperparameters(DistributedTest):
    world_size = 2

    def test_that_differ_are_refused_by_every_rank(
        self, SavedWithTwoDecays: Any, class_tmpdir: Any
    ) -> None:
        # Kills: a group that decays on one rank and not on the other, each having one of the two.
        engine = decaying([["first", "second"]], [0.1])
        with refused("first and second.*'weight_decay'"):
            engine.load_checkpoint(class_tmpdir)
