"""Checkpoints of several optimizer instances: one instance's files, from which any number of
instances goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unit.common import DistributedFixture, DistributedTest

from .runs import by_name, config, differences, look, start, train

BF16_OPTIMIZER = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage1-accumulate": (1, BF16_OPTIMIZER),
    "stage2": (2, {"bf16": {"enabled": True}}),
    "stage3": (3, {"bf16": {"enabled": True}}),
    "stage2-fp16": (
        2,
        {
            "fp16": {
                "enabled": True,
                "initial_scale_power": 20,
                "loss_scale_window": 2,
                "hysteresis": 2,
            }
        },
    ),
}
STEPS, SAVED_AT = 4, 2


def configuration(case: str, instances: int) -> dict[str, Any]:
    stage, keys = CASES[case]
    return config(
        **keys,
        zero_optimization={
            "stage": stage,
            "reduce_bucket_size": 50,
            "num_optimizer_instances": instances,
        },
    )


class TestSameInstances(DistributedTest):
    world_size = 4

    def test_bit_equal(self, tmpdir: Any) -> None:
        # Kills: an instance that reads another rank's shard; shards of the second instance written
        # over those of the first.
        for case in CASES:
            folder = Path(str(tmpdir)) / case
            engine = start(configuration(case, 2))
            train(engine, SAVED_AT)
            engine.save_checkpoint(str(folder))
            straight = train(engine, STEPS - SAVED_AT)
            written = sorted(
                path.name for path in (folder / f"global_step{SAVED_AT}").glob("*optim_states.pt")
            )
            # Upstream's tools take the ranks' files for the shards, and look for as many as the
            # model file says.
            assert [name.partition("zero_")[2][:9] for name in written] == [
                "pp_rank_0",
                "pp_rank_1",
            ]
            models = sorted((folder / f"global_step{SAVED_AT}").glob("*model_states.pt"))
            # At stage 3 each shard's owner in the first instance writes its own.
            assert len(models) == (2 if CASES[case][0] == 3 else 1)
            saved = torch.load(models[0], weights_only=False)
            assert saved["dp_world_size"] == 2
            resumed = start(configuration(case, 2), seed=2)
            train(resumed, 1)
            resumed.load_checkpoint(str(folder))
            assert differences(straight, train(resumed, STEPS - SAVED_AT)) == [], case

    def test_shards_of_another_size_are_cut_anew(self, tmpdir: Any) -> None:
        # Kills: an instance's shards taken for those of all ranks, or the other way round.
        for case in ("stage2", "stage3"):
            folder = f"{tmpdir}/{case}"
            engine = start(configuration(case, 2))
            train(engine, 2)
            engine.save_checkpoint(folder)
            wanted = by_name(engine)
            for instances in (1, 4):
                other = start(configuration(case, instances), seed=2)
                train(other, 1)
                other.load_checkpoint(folder)
                assert differences(wanted, by_name(other)) == [], (case, instances)


class SavedByTwoInstances(DistributedFixture):
    """Two instances of two ranks, saved, in processes that have ended."""

    world_size = 4

    def run(self, class_tmpdir: Any) -> None:
        engine = start(configuration("stage2", 2))
        train(engine, SAVED_AT)
        engine.save_checkpoint(str(class_tmpdir))
        torch.save(owned(engine), f"{class_tmpdir}/owned{torch.distributed.get_rank()}.pt")


def owned(engine: Any) -> dict[str, Any]:
    """Masters, moments and weights of this rank."""
    return {
        name: value
        for name, value in look(engine).items()
        if name.startswith(("master.", "state.", "module."))
    }


class TestOtherNumberOfInstances(DistributedTest):
    world_size = 2

    def test_one_instance_of_the_same_size_goes_on(
        self, SavedByTwoInstances: Any, class_tmpdir: Any
    ) -> None:
        # Kills: files that only the number of ranks which wrote them can read.
        engine = start(configuration("stage2", 1), seed=7)
        engine.load_checkpoint(str(class_tmpdir))
        saved = torch.load(
            f"{class_tmpdir}/owned{torch.distributed.get_rank()}.pt", weights_only=False
        )
        assert differences(saved, owned(engine)) == []
        assert any(name.startswith("state.") for name in saved)
