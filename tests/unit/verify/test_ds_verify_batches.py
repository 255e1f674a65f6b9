"""The batches of `ds_verify`: drawn by shapes, made by a function beside the model's, cut; and what
it says of those that are missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from deepspeed.verify.oracle import UsageError
from deepspeed.verify.oracle.batches import GlobalBatches, Shape
from deepspeed.verify.oracle.cli import main
from deepspeed.verify.oracle.drawn import DrawnBatches, read_inputs
from deepspeed.verify.oracle.workload import Workload, load_workload
from unit.verify.oracle_runs import MODELS, config_of

SHAPE, STEPS = Shape(world=2, accumulation=2, rows=4), 2
PLAIN = f"{MODELS}:without_batches"
# A user's whole file.
FILE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        return self.layer(x).square().mean()

def make_model():
    return Net()
"""
BESIDE = """
import torch

def batch(step, rank):
    return torch.arange(8.0) + 100 * step + 1000 * rank
"""


@pytest.fixture
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A file of a name that no other test imports."""
    return tmp_path / f"{re.sub('[^a-z_0-9]', '_', request.node.name)}.py"


def test_a_plain_model_is_verified_with_shapes(file: Path, capsys: pytest.CaptureFixture) -> None:
    """The whole command, at the first try. Kills: shapes that ranks cannot read; batches that ranks
    draw otherwise; a batch of two micro-batches that is refused, or cut without a word.
    """
    file.write_text(FILE)
    config = file.with_suffix(".json")
    config.write_text(json.dumps(config_of(1)))
    few = "--steps 1 --schedules 0 --compile none".split()
    model = ["--config", str(config), "--model", f"{file}:make_model"]
    assert main([*model, "--data", "float32[8,8]", *few]) == 0
    said = capsys.readouterr().out
    assert "2 ranks made equal weights and batches" in said
    assert "note: batches of 8 samples are cut into micro-batches of 4" in said


# What --data says, and the dtypes, shapes and ends of what is drawn, by name or place.
SHAPES: dict[str, dict[str | int, tuple[torch.dtype, tuple[int, ...], tuple[float, float]]]] = {
    "float32[999]": {0: (torch.float32, (999,), (-6, 6))},
    "bfloat16[500, 2]:-0.5..1.5": {0: (torch.bfloat16, (500, 2), (-0.5, 1.5))},
    " int64 [ 200,3 ] : -1 .. 1 ,bool[200]": {
        0: (torch.int64, (200, 3), (-1, 1)),
        1: (torch.bool, (200,), (0, 1)),
    },
    "ids=int32[300,1]:5..7, x=float64[300]": {
        "ids": (torch.int32, (300, 1), (5, 7)),
        "x": (torch.float64, (300,), (-6, 6)),
    },
    "uint8[4000]:0..255": {0: (torch.uint8, (4000,), (0, 255))},
}


@pytest.mark.parametrize("spec", SHAPES)
def test_shapes_are_drawn_as_written(spec: str) -> None:
    """Kills: a range without one of its ends, an input in the place of another."""
    drawn = load_workload(PLAIN, spec, 0, 0).batches(rank=0, step=0)
    wanted = SHAPES[spec]
    named = (
        drawn
        if isinstance(drawn, dict)
        else dict(enumerate([drawn] if len(wanted) == 1 else drawn))
    )
    assert named.keys() == wanted.keys()
    for name, (dtype, sizes, (low, high)) in wanted.items():
        tensor = named[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, sizes)
        assert low <= tensor.min() and tensor.max() <= high
        if not dtype.is_floating_point:
            assert {int(tensor.min()), int(tensor.max())} == {low, high}
        elif high == 6:  # standard normal
            assert tensor.mean().abs() < 0.2 and (tensor.std() - 1).abs() < 0.2
        else:
            assert tensor.max() - tensor.min() > 0.9 * (high - low)


def test_places_and_seeds_draw_other_numbers() -> None:
    """Kills: one batch for all ranks or steps, behind which errors of reducing do not show."""
    places = [(seed, rank, step) for seed in (0, 1) for rank in (0, 1) for step in (0, 1)]
    inputs = read_inputs("float32[4]")
    drawn = [DrawnBatches(inputs, seed)(rank, step) for seed, rank, step in places]
    assert len({tuple(one.tolist()) for one in drawn}) == len(places)
    assert torch.equal(drawn[3], DrawnBatches(inputs, 0)(1, 1))


# Shapes that cannot be drawn, and all that is said of each.
WRONG = {
    "flaot32[8], int64[8]": ("flaot32[8]: the dtype is one of float32,", "such as int64[8]:0..99"),
    "float32[], float32[0,2]": ("float32[]: sizes are pos", "float32[0,2]: sizes are pos"),
    "x=float32[8], x=float32[8]": ("x is there twice",),
    "x=float32[8], float32[8]": ("a name to each tensor or to none",),
    "float32[8]:2..1, bool[8]:0..1": ("2..1: the range is empty", "bool has no range"),
    "int8[8]:0..128, int8[8]:0.5..2": ("int8 holds no such number", "integers as its ends"),
    "float32[8,16], float32(8)": ("'float32(8)' is no [NAME=]DTYPE[SIZES]",),
}


@pytest.mark.parametrize("spec", WRONG)
def test_wrong_shapes_are_told_at_once(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_workload(PLAIN, spec, 0, 0)
    for text in (f"--data '{spec}': ", *WRONG[spec], "Write it like 'float32[8,16], int"):
        assert text in str(caught.value)


def numbers(batches: GlobalBatches) -> list[list[float]]:
    """The first number of each micro-batch, for each step."""
    steps = [batches.micro_batches(step) for step in range(STEPS)]
    assert all(len(one) == SHAPE.rows for step in steps for one in step)
    return [[float(one[0]) for one in step] for step in steps]


def test_a_function_beside_the_model_gives_batches(file: Path) -> None:
    """Two micro-batches for each step of a rank. Kills: a function that nobody looks for, rank and
    step in each other's place, ranks that share what is cut.
    """
    file.write_text(FILE + BESIDE)
    wanted = [[0, 1000, 4, 1004], [100, 1100, 104, 1104]]
    for model, data in ((f"{file}:make_model", None), (PLAIN, f"{file}:batch")):
        workload = load_workload(model, data, 0, 0)
        assert numbers(GlobalBatches(workload, SHAPE, STEPS)) == wanted


def test_shapes_come_before_a_function_beside_the_model(file: Path) -> None:
    file.write_text(FILE + BESIDE)
    workload = load_workload(f"{file}:make_model", "float32[4,8]", 0, 0)
    assert isinstance(workload.batches, DrawnBatches)


def counted(samples: int) -> Callable[[int, int], torch.Tensor]:
    return lambda rank, step: torch.arange(float(samples)) + 100 * step + 1000 * rank


def placed(step: int, micro_batch: int, rank: int) -> torch.Tensor:
    return torch.arange(8.0) + 10 * micro_batch + 100 * step + 1000 * rank


def loaded() -> Iterator[torch.Tensor]:
    return iter(torch.arange(0.0, 32.0).split(16))


# What the user gives, and the first numbers of each step's micro-batches.
CUT: dict[str, tuple[Callable[[], Any], list[list[float]]]] = {
    "one micro-batch": (lambda: counted(4), [[0, 1000, 100, 1100], [200, 1200, 300, 1300]]),
    "three of them": (lambda: counted(12), [[0, 1000, 4, 1004], [8, 1008, 100, 1100]]),
    "by micro-batch": (lambda: placed, [[0, 1000, 4, 1004], [10, 1010, 14, 1014]]),
    "a loader": (loaded, [[0, 4, 8, 12], [16, 20, 24, 28]]),
}


@pytest.mark.parametrize("name", CUT)
def test_larger_batches_are_cut(name: str) -> None:
    """Kills: samples that are left out, trained twice, or given to another rank."""
    make, wanted = CUT[name]
    batches = GlobalBatches(Workload(nn.Linear(1, 1), make()), SHAPE, STEPS)
    assert numbers(batches) == wanted
    assert bool(batches.notes) == (name != "one micro-batch")


def test_the_parts_of_a_batch_are_cut_alike() -> None:
    """Kills: labels of other samples; a number that belongs to the whole batch and is cut."""
    rows = torch.arange(16)
    given = [{"x": rows[:, None].repeat(1, 3), "y": rows, "scale": torch.tensor(2.0), "k": 7}]
    batches = GlobalBatches(Workload(nn.Linear(1, 1), given), Shape(2, 2, 4), 1)
    for place, one in enumerate(batches.micro_batches(0)):
        assert one["y"].tolist() == one["x"][:, 2].tolist() == [*range(4 * place, 4 * place + 4)]
        assert (one["scale"].item(), one["k"]) == (2.0, 7)


def test_all_that_is_wrong_with_batches_is_told_at_once() -> None:
    """Kills: a second mistake that is only told when the first is mended."""
    given = [(torch.randn(6, 2), torch.arange(6))] * 3
    with pytest.raises(UsageError) as caught:
        GlobalBatches(Workload(nn.Linear(2, 1), given), SHAPE, STEPS)
    for text in (
        *(
            "batches ended after 3, and batch 0 has 6 samples;",
            "of a multiple of it, which are cut",
        ),
        "2 steps x 2 micro-batches x 2 ranks need 8 micro-batches of 4 samples (train_micro_",
        *("--data 'float32[4,2], int64[4]:0..5'\n", "like those there are"),
        "def batch(rank, step): return torch.randn((4, 2)), torch.randint(0, 6, (4,))",
    ):
        assert text in str(caught.value)


def test_the_right_size_of_shapes_is_told() -> None:
    """Kills: a remedy that has lost names or ranges."""
    batches = DrawnBatches(read_inputs("x=float32[6,2], y=int64[6]:0..99"), 0)
    with pytest.raises(UsageError, match=r"--data 'x=float32\[4,2\], y=int64\[4\]:0..99'$"):
        GlobalBatches(Workload(nn.Linear(2, 1), batches), SHAPE, STEPS)


class Flat(nn.Sequential):
    """Layers whose output is the smaller the better."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class Aimed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))

    def forward(self, x: torch.Tensor, aim: torch.Tensor, power: int = 2) -> torch.Tensor:
        return (self.inner(x) - aim).pow(power).mean()


class Tokens(nn.Module):
    """Takes what models of transformers take."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert input_ids is not None and labels is not None and mask is None
        scores = self.head(self.words(input_ids))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def squared(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output - batch[1]).square().mean()


UNFED: dict[str, tuple[nn.Module, Any]] = {
    "layers": (Flat(nn.GELU(), nn.Linear(5, 3)), None),
    "image": (Flat(nn.Conv2d(3, 2, 3)), None),
    "two inputs": (Aimed(), None),
    "tokens": (Tokens(), None),
    "with a loss": (nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)), squared),
    "without layers": (Flat(nn.LayerNorm(8)), None),
}


@pytest.mark.parametrize("name", UNFED)
def test_the_lines_of_the_error_work(name: str) -> None:
    """A guess from the layers can be pasted. Kills: one that the command or the model refuses."""
    module, loss = UNFED[name]
    with pytest.raises(UsageError, match="there are no batches; 2 steps x 2 micro-") as caught:
        GlobalBatches(Workload(module, None, loss), SHAPE, STEPS)
    said = str(caught.value)
    assert "guessed from the layers" in said
    assert ("(module, None, loss)" in said) == (loss is None)
    (shapes,) = re.findall(r"^  --data '(.*)'$", said, re.MULTILINE)
    (code,) = re.findall(r"^  (def batch\(.*)$", said, re.MULTILINE)
    written: dict[str, Any] = {"torch": torch}
    exec(code, written)
    drawn = load_workload(PLAIN, shapes, 0, 0).batches
    for batches in (drawn, written["batch"]):
        workload = Workload(module, batches, loss)
        found = GlobalBatches(workload, SHAPE, STEPS)
        assert found.whole_reason is None and not found.notes
        first = found.micro_batches(0)[0]
        assert workload.loss_of(module, first, torch.float32).isfinite()
    kinds = [
        [(one.dtype, one.shape) for one in tree_leaves(made(0, 0))]
        for made in (drawn, written["batch"])
    ]
    assert kinds[0] == kinds[1]
