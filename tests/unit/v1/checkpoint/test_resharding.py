"""A checkpoint goes on with other ranks, stages and parameter groups: all is found by name."""

from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.resharding.cuts import ParallelDegrees
from unit.common import DistributedFixture, DistributedTest

from .runs import ACCUMULATE, BF16, by_name, config, differences, start, train

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
TORCH_ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
WORLDS = (1, 2, 4)
STEPS = 2


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 50, **keys}}


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


def make(case: str, seed: int = 1, **more: Any) -> Any:
    """An engine whose global batch is the same in every world."""
    keys = {
        "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
        "gradient_accumulation_steps": 1,
    }
    return start({**config(**CASES[case]), **keys}, seed=seed, **more)


def expected(engine: Any) -> dict[str, Any]:
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    state = (
        {key: value for key, value in vars(scaler).items() if key.startswith("cur_")}
        if engine.fp16_enabled()
        else {}
    )
    counts = (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.get_lr())
    return {
        **by_name(engine),
        "scaler": state,
        "counts": counts,
        "data": engine.training_dataloader.state_dict(),
    }


def masters_and_moments(found: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in found.items()
        if key.startswith(("master", "exp_avg")) or key in ("counts",)
    }


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
            torch.save(
                expected(engine),
                f"{class_tmpdir}/{case}-{dist.get_world_size()}-{dist.get_rank()}.pt",
            )


class TestOtherWorlds(DistributedTest):
    """Kills: elements in others' places, padding taken for elements, a group's in one shard."""

    world_size = list(WORLDS)
    exec_timeout = 120

    def test_the_same_by_name(self, Saved: Any, class_tmpdir: Any) -> None:
        world = dist.get_world_size()
        others = [saved for saved in WORLDS if saved != world]  # the same is test_resume's
        for number, case in enumerate(CASES):
            self.load(str(class_tmpdir), case, case, others[number % 2])
        for number, (case, into) in enumerate(ACROSS):
            self.load(str(class_tmpdir), case, into, WORLDS[number % 3])

    def load(self, folder: str, case: str, into: str, saved: int) -> None:
        engine = make(into, seed=2)
        train(engine, 1)  # state that loading must replace
        engine.load_checkpoint(f"{folder}/{case}/{saved}")
        wanted = torch.load(f"{folder}/{case}-{saved}-0.pt", weights_only=False)
        found = expected(engine)
        if case != into:
            wanted, found = masters_and_moments(wanted), masters_and_moments(found)
        assert differences(wanted, found) == [], (case, into, saved)


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        ({}, (1, 1, 1)),
        ({"module": {}, "mp_world_size": 1}, (1, 1, 1)),
        (
            {
                "module": {},
                "mp_world_size": 4,
                "checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": 2},
            },
            (2, 2, 4),
        ),
        ({"mp_world_size": 2, "checkpoint_parallel_dimensions": {"tp_degree": 2}}, (1, 2, 2)),
        ({"module": {}, "mp_world_size": 2}, (1, 2, 2)),
        ({"module": None, "mp_world_size": 2}, (2, 1, 2)),
        ({"module": None, "mp_world_size": 2, "checkpoint_parallel_dimensions": None}, (2, 1, 2)),
    ],
)
def test_of_a_file(model: dict[str, Any], degrees: tuple[int, int, int]) -> None:
    assert ParallelDegrees.of_file(model) == degrees


def test_ranks_of_a_slice() -> None:
    degrees = ParallelDegrees(stages=3, tensor=2, parts=6)
    assert [list(degrees.ranks_of_slice(rank)) for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]


def test_fields_are_those_of_files() -> None:
    """The manifest and the files of processes hold them by these names."""
    assert ParallelDegrees._fields == ("stages", "tensor", "parts")
