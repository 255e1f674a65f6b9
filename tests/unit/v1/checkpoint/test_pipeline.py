"""Checkpoints of pipelines of four stages go on with fewer, and the other way round."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from unit.common import DistributedFixture, DistributedTest

from .pipeline import BATCH, make, train, whole
from .runs import differences

STAGES = {1: (1,), 2: (1, 2), 4: (2, 4)}
ALL = [(world, stages) for world, several in STAGES.items() for stages in several]
BF16 = {"bf16": {"enabled": True}}
CASES: dict[str, dict[str, Any]] = {
    "fp32-1": {"zero_optimization": {"stage": 1}, "grouped": True},
    "accumulate-1": {
        **BF16,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
    },
}
STEPS = 2


class SavedPipelines(DistributedFixture):
    """All cases, divided in all ways, saved after two steps, and how they went on."""

    world_size = [1, 2, 4]
    exec_timeout = 120

    def run(self, class_tmpdir: Any) -> None:
        for case, keys in CASES.items():
            for stages in STAGES[dist.get_world_size()]:
                name = f"{class_tmpdir}/{case}-{dist.get_world_size()}-{stages}"
                engine = make(stages, **keys)
                train(engine, STEPS)
                engine.save_checkpoint(name)
                held = whole(engine)
                went_on = train(engine, 2)
                if dist.get_rank() == 0:
                    torch.save({"held": held, "went_on": went_on}, f"{name}.pt")


class TestOtherStages(DistributedTest):
    """Kills: another stage's state, ties twice or from nowhere, a layer under a local number."""

    world_size = [1, 2, 4]
    exec_timeout = 120

    def test_goes_on(self, SavedPipelines: Any, class_tmpdir: Any) -> None:
        for number, (case, keys) in enumerate(CASES.items()):
            for place, (saved_world, saved_stages) in enumerate(ALL):
                name = f"{class_tmpdir}/{case}-{saved_world}-{saved_stages}"
                wanted = torch.load(f"{name}.pt", weights_only=False)
                for stages in STAGES[dist.get_world_size()]:
                    into = ALL.index((dist.get_world_size(), stages))
                    if 4 not in (saved_stages, stages) or (place + into) % 2 != number:
                        continue
                    engine = make(stages, seed=2, **keys)
                    train(engine, 1)  # state that loading must replace
                    engine.load_checkpoint(name)
                    told = (case, saved_world, saved_stages, dist.get_world_size(), stages)
                    assert differences(wanted["held"], whole(engine)) == [], told
                    assert (engine.global_steps, engine.global_samples) == (STEPS, STEPS * BATCH), (
                        told
                    )
                    # Partial sums over ranks and micro-batches are rounded otherwise: in the
                    # model's dtype for activations.
                    tolerance = 1e-5 if case.startswith("fp32") else 2e-2
                    assert train(engine, 2) == [
                        pytest.approx(step, rel=tolerance) for step in wanted["went_on"]
                    ], told


class TestFiles(DistributedTest):
    world_size = 2

    def test_names_and_refusals(self, tmpdir: Any) -> None:
        engine = make(2, **BF16, zero_optimization={"stage": 1})
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir), tag="t")
        folder = Path(str(tmpdir), "t")
        # Layer 6 uses layer 0's module on another stage; layer 2 has no parameters, and a file as
        # upstream's.
        layers = [f"layer_0{index}-model_states.pt" for index in range(7)]
        parts = [f"mp_rank_0{stage}_model_states.pt" for stage in range(2)]
        shards = [f"bf16_zero_pp_rank_0_mp_rank_0{stage}_optim_states.pt" for stage in range(2)]
        hosts = [f"host_state_rank_{rank}.pt" for rank in range(2)]
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            ["manifest.json", *layers, *parts, *shards, *hosts]
        )
        model = torch.load(folder / parts[1], weights_only=True)
        assert model["module"] is None
        assert (model["dp_world_size"], model["mp_world_size"]) == (1, 2)
        assert model["checkpoint_parallel_dimensions"] == {"pp_degree": 2, "tp_degree": 1}
        with pytest.raises(ValueError, match="custom_load_fn: a PipelineModule"):
            engine.load_checkpoint(str(tmpdir), custom_load_fn=print)
        before = whole(engine)
        train(engine, 1)
        changed = whole(engine)
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / layers[5]).unlink()
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"layer_05-model_states\.pt is missing"):
            engine.load_checkpoint(str(tmpdir))
        # Nothing was loaded on the stage that had all its files either.
        assert differences(changed, whole(engine)) == []
        assert differences(before, changed) != []
