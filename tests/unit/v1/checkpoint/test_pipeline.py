"""Checkpoints of pipelines: any number of stages and data-parallel ranks goes on from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.pipe import LayerSpec, PipelineModule
from unit.common import DistributedFixture, DistributedTest

from .pipeline import make, train, whole
from .runs import differences

STAGES = {1: (1,), 2: (1, 2), 4: (2, 4)}
ALL = [(world, stages) for world, several in STAGES.items() for stages in several]
BF16 = {"bf16": {"enabled": True}}
CASES: dict[str, dict[str, Any]] = {
    "fp32-0": {"decay_groups": True},
    "fp32-1": {"zero_optimization": {"stage": 1}, "decay_groups": True},
    "bf16-1": {**BF16, "zero_optimization": {"stage": 1}},
    "accumulate-1": {**BF16, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}},
    "fp16-0": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
STEPS = 2


class SavedPipelines(DistributedFixture):
    """All cases, divided in all ways, saved after two steps, with what they held and how they went on."""

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
    """Kills: a stage that reads another's state, tied weights taken twice or from nowhere, a layer's file under a local number."""

    world_size = [1, 2, 4]
    exec_timeout = 120

    def test_goes_on(self, SavedPipelines: Any, class_tmpdir: Any) -> None:
        for number, (case, keys) in enumerate(CASES.items()):
            # Of the other cases half of the ways, another half for each.
            for saved_world, saved_stages in ALL if case == "fp32-1" else ALL[number % 2 :: 2]:
                name = f"{class_tmpdir}/{case}-{saved_world}-{saved_stages}"
                wanted = torch.load(f"{name}.pt", weights_only=False)
                for stages in STAGES[dist.get_world_size()]:
                    engine = make(stages, seed=2, **keys)
                    train(engine, 1)  # state that loading must replace
                    engine.load_checkpoint(name)
                    told = (case, saved_world, saved_stages, dist.get_world_size(), stages)
                    assert differences(wanted["held"], whole(engine)) == [], told
                    assert (engine.global_steps, engine.global_samples) == (STEPS, STEPS * 8), told
                    # Partial sums over ranks and micro-batches are rounded otherwise: in the model's dtype for activations.
                    tolerance = 1e-5 if case.startswith("fp32") else 2e-2
                    assert train(engine, 2) == [pytest.approx(step, rel=tolerance) for step in wanted["went_on"]], told


class TestFiles(DistributedTest):
    world_size = 2

    def test_names_and_refusals(self, tmpdir: Any) -> None:
        engine = make(2, **BF16, zero_optimization={"stage": 1})
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir), tag="t")
        folder = Path(str(tmpdir), "t")
        # Layer 6 uses layer 0's module on another stage; layer 2 has no parameters, and a file as upstream's.
        layers = [f"layer_0{index}-model_states.pt" for index in range(7)]
        parts = [f"mp_rank_0{stage}_model_states.pt" for stage in range(2)]
        shards = [f"bf16_zero_pp_rank_0_mp_rank_0{stage}_optim_states.pt" for stage in range(2)]
        hosts = [f"host_state_rank_{rank}.pt" for rank in range(2)]
        assert sorted(path.name for path in folder.iterdir()) == sorted([*layers, *parts, *shards, *hosts])
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
        with pytest.raises(CheckpointError, match=r"layer_05-model_states\.pt does not exist"):
            engine.load_checkpoint(str(tmpdir))
        assert differences(changed, whole(engine)) == []  # nothing was loaded on the stage that had all its files either
        assert differences(before, changed) != []


COMPAT = Path(__file__).resolve().parents[5] / "shared" / "compat" / "checkpoints"


@pytest.mark.skipif(not (COMPAT / "pipe2_zero1_bf16_w2").is_dir(), reason="upstream's checkpoints are not beside this repository")
class TestUpstreams(DistributedTest):
    """Kills: keys or names that only our own files have."""

    world_size = [1, 2]

    def test_goes_on_as_recorded(self) -> None:
        recorded = json.loads((COMPAT / "pipe2_zero1_bf16_w2.json").read_text())
        torch.manual_seed(7)
        model = [LayerSpec(nn.Linear, 16, 32), LayerSpec(nn.GELU), LayerSpec(nn.Linear, 32, 16)]

        def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return (outputs.float() - labels.float()).pow(2).mean()

        module = PipelineModule(model, num_stages=dist.get_world_size(), loss_fn=loss)
        engine = deepspeed.initialize(model=module, config=recorded["config"])[0]
        engine.load_checkpoint(str(COMPAT / "pipe2_zero1_bf16_w2"))
        saved = recorded["saved_after_step"]
        assert engine.global_steps == saved
        for step in range(saved, len(recorded["losses"])):
            generator = torch.Generator().manual_seed(1000 + step)
            drawn = [torch.randn(2, 4, 16, generator=generator).bfloat16() for _ in range(2)]
            found = float(engine.train_batch(iter([(x, target) for x, target in drawn])))
            # The tolerance that the recorded runs are comparable by: bf16 rounds to 2**-9.
            assert found == pytest.approx(recorded["losses"][step], rel=2e-3)
            assert float(engine.get_global_grad_norm()) == pytest.approx(recorded["grad_norms"][step], rel=2e-3)
