"""A checkpoint made universal goes on with other ranks, stages and groups: all is found by name.
Slices of tensor-parallel ranks are joined and cut by the client's patterns.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO, UNIVERSAL_FOLDER
from deepspeed.checkpoint.resharding.cuts import ParallelDegrees
from deepspeed.utils import groups
from unit.common import DistributedFixture, DistributedTest
from unit.one_process import train as train_on
from unit.v1.tensor.megatron import CUT, Mpu, Parallel, batch

from . import runs, test_experts
from . import test_pipeline as pipeline
from .runs import BF16, TAG, UNIVERSAL, convert, differences, keep, kept, refused, train, zero
from .test_ways import STEPS, held, make

# Saved as the first, loaded as the second.
CONVERTED = [
    ("fp32: 2, dealt", "fp32: 1"),
    ("fp32: 0", "fp32: 2"),
    ("bf16: 0", "bf16: 0"),
    ("bf16: 2", "bf16: 1, accumulate"),
    ("bf16: 3", "bf16: 2"),
    ("bf16: 3", "bf16: 3"),
    ("fp16: 2", "fp16: 2"),
    ("fp16: 2", "fp16: 0"),
    ("fp16: 0, whole", "fp16: 2"),
    ("fp32: 2, elastic", "fp32: 0"),
]
BF16_1 = {**BF16, **zero(1)}
PIPELINES = {"fp32-1": {**zero(1), "grouped": True}, "fp32-0": {}, "bf16-1": BF16_1}
EXPERTS: dict[str, dict[str, Any]] = {"fp32-0": {}, "fp32-2": zero(2), "bf16-1": BF16_1}


class SavedByTwo(DistributedFixture):
    """Some cases, saved by two ranks and converted, with what each holds."""

    world_size = 2
    exec_timeout = 120

    def run(self, class_tmpdir: Any) -> None:
        for case in sorted({case for case, _ in CONVERTED}):
            engine = make(case)
            train(engine, STEPS)
            self.save(engine, f"{class_tmpdir}/{case}", held(engine))
        for case, keys in EXPERTS.items():
            engine = test_experts.make(2, 1, **keys)
            test_experts.train(engine, STEPS)
            self.save(engine, f"{class_tmpdir}/experts-{case}", test_experts.whole(engine))
        groups.reset()  # a pipeline divides the ranks otherwise
        for case, keys in PIPELINES.items():
            engine = pipeline.make(2, **keys)
            pipeline.train(engine, STEPS)
            self.save(engine, f"{class_tmpdir}/pipeline-{case}", pipeline.whole(engine))

    @staticmethod
    def save(engine: Any, folder: str, seen: Any) -> None:
        engine.save_checkpoint(folder)
        keep(folder, seen)
        runs.on_rank_0(lambda: convert(folder))


def load(engine: Any, folder: str) -> Any:
    """Load the universal checkpoint in `folder`; returns what the run that saved it held."""
    path, _ = engine.load_checkpoint(folder)
    assert path == f"{folder}/{TAG}"
    return kept(folder)


class TestOtherDivisions(DistributedTest):
    """Kills: elements in the order of files; padding kept; a group's options for another's; the
    step, scale or position in the data lost; a frozen, tied or expert's weight forgotten.
    """

    world_size = [1, 3]
    exec_timeout = 120

    def test_the_same_by_name(self, SavedByTwo: Any, class_tmpdir: Any) -> None:
        # One test: the fixture runs for each.
        self.other_worlds(str(class_tmpdir))
        self.other_expert_groups(str(class_tmpdir))
        groups.reset()
        self.other_stages(str(class_tmpdir))

    def other_worlds(self, folder: str) -> None:
        for case, into in CONVERTED:
            engine = make(into, seed=2, **UNIVERSAL)
            train(engine, 1)  # state that loading must replace
            wanted = load(engine, f"{folder}/{case}")
            assert differences(wanted, held(engine)) == [], (case, into)
            assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
            train(engine, 1)

    def other_stages(self, folder: str) -> None:
        for case, keys in PIPELINES.items():
            engine = pipeline.make(dist.get_world_size(), seed=2, **keys, **UNIVERSAL)
            pipeline.train(engine, 1)
            wanted = load(engine, f"{folder}/pipeline-{case}")
            assert runs.otherwise(wanted, pipeline.whole(engine)) == [], case
            assert engine.global_steps == STEPS
            pipeline.train(engine, 1)

    def other_expert_groups(self, folder: str) -> None:
        for case, keys in EXPERTS.items():
            engine = test_experts.make(1, 2, **keys, **UNIVERSAL)  # each rank has all of them
            wanted = load(engine, f"{folder}/experts-{case}")
            assert runs.otherwise(wanted, test_experts.whole(engine)) == [], case
            test_experts.train(engine, 1)


class TestIncomplete(DistributedTest):
    """Of upstream's folder without a manifest. Kills: what is missing taken for zeros or left."""

    world_size = 1

    def test_refused_and_nothing_changed(self, tmp_path: Path) -> None:
        unchecked = {"checkpoint": {"load_universal": True, "verify": "off"}}
        engine = make("fp32: 2", **unchecked)
        train(engine, 1)
        engine.save_checkpoint(tmp_path, tag="t")
        convert(tmp_path)
        train(engine, 1)
        before = held(engine)
        bad = tmp_path / "bad" / UNIVERSAL_FOLDER
        first, last = bad / "first.bias", bad / "last.bias"
        damages: dict[str, Callable[[], Any]] = {
            r"of the \d+ elements .* of first\.weight": lambda: shutil.rmtree(bad / "last.weight"),
            "only some of .* have optimizer state 'exp_avg'": (first / "exp_avg.pt").unlink,
            r"exp_avg_sq\.pt .* cannot be read": lambda: os.truncate(first / "exp_avg_sq.pt", 700),
            "more.bias is not in this model": lambda: shutil.copytree(last, bad / "more.bias"),
            r"first\.bias has shape \(3,\)": lambda: shutil.copy(last / "fp32.pt", first),
            r"optimizer_state\.pt does not exist": (bad / "optimizer_state.pt").unlink,
            "is no universal checkpoint.*ds_to_universal": lambda: shutil.rmtree(bad),
        }
        for message, damage in damages.items():
            shutil.copytree(tmp_path / TAG, bad.parent)
            damage()
            with refused(message):
                engine.load_checkpoint(tmp_path, tag="bad")
            assert differences(before, held(engine)) == []
            shutil.rmtree(bad.parent)
        engine.load_checkpoint(tmp_path)
        assert differences(before, held(engine)) != []


# Another number of tensor-parallel ranks

INFO = {
    "universal_checkpoint_version": 0.4,
    "parameter_with_row_parallelism_patterns": [r"row\.weight"],
    "tp_replicated_parameter_patterns": [r"norm\.", r"head\.", r"row\.bias"],
}
SLICED: dict[str, dict[str, Any]] = {"fp32-0": {}, "fp32-2": zero(2), "bf16-1": BF16_1}


def make_sliced(size: int, case: str = "fp32-0", **keys: Any) -> Any:
    """An engine of `size` tensor-parallel ranks; one case freezes the row-parallel weight."""
    groups.reset()
    mpu = Mpu(size)
    model = Parallel(mpu)
    model.row.weight.requires_grad_(case != "fp32-2")
    keys = {"train_micro_batch_size_per_gpu": 4, **runs.TORCH_ADAM, **SLICED[case], **keys}
    trained = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=keys, mpu=mpu)[0]


def train_sliced(engine: Any, steps: int) -> list[float]:
    several = (batch(engine.global_steps + step, 1, 1) for step in range(steps))
    return train_on(engine, ((x[0, 0].to(engine.model_dtype), y[0, 0]) for x, y in several))


def whole(engine: Any) -> dict[str, Any]:
    """`by_name`, whole over the tensor-parallel ranks."""
    found, group = runs.by_name(engine), groups.get_tensor_model_parallel_group()
    for key, value in found.items():
        if (name := key.split(".", 1)[1]) in CUT:
            parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group=group))]
            dist.all_gather(parts, value.contiguous(), group=group)
            found[key] = torch.cat(parts, CUT[name])
    return found


class SavedSlices(DistributedFixture):
    """Runs of one and of two tensor-parallel ranks, with what they held and how they went on."""

    world_size = 2

    def run(self, class_tmpdir: Any) -> None:
        for case in SLICED:
            for size in (1, 2):
                folder = f"{class_tmpdir}/{case}-{size}"
                engine = make_sliced(size, case)
                train_sliced(engine, 2)
                engine.save_checkpoint(folder, client_state={UNIVERSAL_CHECKPOINT_INFO: INFO})
                keep(folder, (whole(engine), train_sliced(engine, 2)))
                runs.on_rank_0(lambda folder=folder: convert(folder))


class TestOtherTensorRanks(DistributedTest):
    """Kills: a wrong dimension, replicated weights joined, rank 0's slice for all, frozen ones."""

    world_size = 2

    def test_goes_on(self, SavedSlices: Any, class_tmpdir: Any) -> None:
        ways = ((1, 2, True), (2, 1, True), (1, 2, False), (2, 1, False), (2, 2, True))
        for case in SLICED:
            for size, saved, universal in ways:
                self.goes_on(f"{class_tmpdir}/{case}-{saved}", case, size, universal)

    def goes_on(self, folder: str, case: str, size: int, universal: bool) -> None:
        engine = make_sliced(size, case, **(UNIVERSAL if universal else {}))
        with torch.no_grad():
            for param in engine.module.parameters():
                param.zero_()  # the frozen one, too, must be loaded
        path, client_state = engine.load_checkpoint(folder)
        assert os.path.basename(path) == (TAG if universal else "global_step2")
        assert client_state[UNIVERSAL_CHECKPOINT_INFO] == INFO
        wanted, went_on = kept(folder)
        assert differences(wanted, whole(engine)) == [], (folder, size, universal)
        # Sums over ranks are rounded otherwise.
        tolerance = 1e-5 if case.startswith("fp32") else 2e-2
        assert train_sliced(engine, 2) == pytest.approx(went_on, rel=tolerance)

    def test_refusals(self, tmp_path: Path) -> None:
        # Kills: slices concatenated in dimension 0 because nothing said otherwise, and trained on.
        engine = make_sliced(2)
        train_sliced(engine, 1)
        wrong = {**INFO, "parameter_with_row_parallelism_patterns": []}
        state = {UNIVERSAL_CHECKPOINT_INFO: wrong}
        engine.save_checkpoint(tmp_path, tag="wrong", client_state=state)
        engine.save_checkpoint(tmp_path, tag="silent")
        engine = make_sliced(1)
        train_sliced(engine, 1)
        before = whole(engine)
        with refused("this run has 1: only the model knows.*universal_checkpoint_info"):
            engine.load_checkpoint(tmp_path, tag="silent")
        shape = r"row\.weight has shape \(12, 4\)"
        with refused(f"{shape}.*does not say how row.weight is sliced"):
            engine.load_checkpoint(tmp_path, tag="wrong")
        assert differences(before, whole(engine)) == []
        if dist.get_rank() == 0:
            with refused("The client saves it by save_checkpoint"):
                convert(tmp_path)
        dist.barrier()


# What files say of ranks

DIMENSIONS = "checkpoint_parallel_dimensions"
FOUR = {"module": {}, "mp_world_size": 4, DIMENSIONS: {"pp_degree": 2, "tp_degree": 2}}


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        ({}, (1, 1, 1)),
        ({"module": {}, "mp_world_size": 1}, (1, 1, 1)),
        (FOUR, (2, 2, 4)),
        ({"mp_world_size": 2, DIMENSIONS: {"tp_degree": 2}}, (1, 2, 2)),
        ({"module": {}, "mp_world_size": 2}, (1, 2, 2)),
        ({"module": None, "mp_world_size": 2}, (2, 1, 2)),
        ({"module": None, "mp_world_size": 2, DIMENSIONS: None}, (2, 1, 2)),
    ],
)
def test_of_a_file(model: dict[str, Any], degrees: tuple[int, int, int]) -> None:
    assert ParallelDegrees.of_file(model) == degrees


def test_fields_and_ranks_of_a_slice() -> None:
    # The manifest and the files of processes hold them by these names.
    assert ParallelDegrees._fields == ("stages", "tensor", "parts")
    degrees = ParallelDegrees(stages=3, tensor=2, parts=6)
    assert [list(degrees.ranks_of_slice(rank)) for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]
