"""A checkpoint goes on with other ranks, stages and parameter groups: all is found by name."""

from typing import Any

import pytest

from deepspeed import comm as dist
from deepspeed.checkpoint.resharding.cuts import ParallelDegrees
from unit.common import DistributedFixture, DistributedTest

from .runs import (
    ACCUMULATE,
    BF16,
    TORCH_ADAM,
    by_name,
    config,
    differences,
    keep,
    kept,
    start,
    train,
    zero,
)

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
WORLDS = (1, 2, 4)
STEPS = 2
# Each is saved by all worlds and loaded in all of them, from one of the others.
CASES: dict[str, dict[str, Any]] = {
    "fp32-0": {},
    "fp32-1": zero(1),
    "fp32-2": zero(2),
    "fp32-2-elastic": zero(2, elastic_checkpoint=True),
    "fp32-2-dealt": zero(2, round_robin_gradients=True),
    "bf16-0": BF16,
    "bf16-1": {**BF16, **zero(1)},
    "bf16-2": {**BF16, **zero(2)},
    "accumulate-0": ACCUMULATE,
    "accumulate-1": {**ACCUMULATE, **zero(1)},
    "fp16-0": FP16,
    "fp16-0-whole": {**FP16, **TORCH_ADAM},
    "fp16-2": {**FP16, **zero(2)},
}
# Files of the first become state of the second.
ACROSS = [
    ("fp32-0", "fp32-2"),
    ("fp32-2", "fp32-0"),
    ("fp32-2-dealt", "fp32-1"),
    ("bf16-2", "bf16-0"),
    ("bf16-0", "accumulate-1"),
    ("accumulate-1", "bf16-2"),
    ("fp16-0", "fp16-0-whole"),
    ("fp16-0-whole", "fp16-2"),
    ("fp16-2", "fp16-0"),
]


def make(case: str, seed: int = 1, **keys: Any) -> Any:
    """An engine whose global batch is the same in every world."""
    rows = 4 // dist.get_world_size()
    sizes = {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": 1}
    return start(config(**CASES[case], **sizes, **keys), seed)


def expected(engine: Any) -> dict[str, Any]:
    scaler = vars(engine.optimizer.loss_scaler) if engine.fp16_enabled() else {}
    return {
        **by_name(engine),
        "scaler": {key: value for key, value in scaler.items() if key.startswith("cur_")},
        "counts": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "rates": engine.get_lr(),
        "data": engine.training_dataloader.state_dict(),
    }


def masters_and_moments(found: dict[str, Any]) -> dict[str, Any]:
    kinds = ("master", "exp_avg", "counts", "rates")
    return {key: value for key, value in found.items() if key.startswith(kinds)}


class Saved(DistributedFixture):
    """All cases, saved in every world, with what each holds."""

    world_size = list(WORLDS)
    exec_timeout = 120

    def run(self, class_tmpdir: Any) -> None:
        for case in CASES:
            folder = f"{class_tmpdir}/{case}/{dist.get_world_size()}"
            engine = make(case)
            train(engine, STEPS)
            engine.save_checkpoint(folder)
            keep(folder, expected(engine))


class TestOtherWorlds(DistributedTest):
    """Kills: elements in others' places, padding taken for elements, a group's in one shard."""

    world_size = list(WORLDS)
    exec_timeout = 120

    def test_the_same_by_name(self, Saved: Any, class_tmpdir: Any) -> None:
        world = dist.get_world_size()
        others = [saved for saved in WORLDS if saved != world]  # the same is test_resume's
        for number, case in enumerate(CASES):
            self.load(f"{class_tmpdir}/{case}/{others[number % 2]}", case, case)
        for number, (case, into) in enumerate(ACROSS):
            self.load(f"{class_tmpdir}/{case}/{WORLDS[number % 3]}", case, into)

    def load(self, folder: str, case: str, into: str) -> None:
        engine = make(into, seed=2)
        train(engine, 1)  # state that loading must replace
        engine.load_checkpoint(folder)
        wanted, found = kept(folder), expected(engine)
        if case != into:
            wanted, found = masters_and_moments(wanted), masters_and_moments(found)
        assert differences(wanted, found) == [], (folder, into)


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
