"""AutoTP by the plan that a model of transformers has itself."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.tensor_parallel.partition_config import PartitionConfig
from deepspeed.runtime.tensor_parallel.structure import plan_of
from deepspeed.verify import check_budgets, check_streams
from unit.common import DistributedTest
from unit.v1.looping import each
from unit.v1.tensor.architectures import PLANNED, model_of
from unit.v1.tensor.plain_decoder import PlainDecoder
from unit.v1.tensor.test_autotp import check_training, start
from unit.v1.tensor.test_autotp_stage3 import alike, zero
from unit.v1.tensor.test_autotp_structure import refusal

pytest.importorskip("transformers")

OWN = {
    "blocks.*.attention.q_proj": "colwise",
    "blocks.*.attention.k_proj": "colwise",
    "blocks.*.attention.v_proj": "colwise",
    "blocks.*.attention.o_proj": "rowwise",
    "blocks.*.mlp.fc1": "colwise_rep",
    "blocks.*.mlp.fc2": "rowwise_rep",
    "head": "colwise_gather_output",
    "embed": "embedding_rowwise",
}


def planned(plan: dict[str, str], **sizes: int) -> Any:
    model: Any = PlainDecoder(**sizes)
    model.config = SimpleNamespace(base_model_tp_plan=dict(plan))
    return model


def cuts_of(model: torch.nn.Module, **how: Any) -> dict[str, str]:
    plan = plan_of(model, 2, how.get("preset_model"), how.get("partition"))
    kinds = {(False, False): "column", (True, False): "row"}
    return {cut.name: kinds.get((cut.is_row, cut.is_alone), "alone") for cut in plan.layers}


def test_what_comes_first() -> None:
    # Kills: a plan before what the configuration says, or before a known family; numbers in names
    # of layers (fc1) taken for those of blocks.
    model = planned({**OWN, "blocks.*.mlp.fc1": "replicate", "blocks.*.mlp.fc2": "replicate"})
    assert cuts_of(planned(OWN))["blocks.1.mlp.fc2"] == "alone"
    assert len(cuts_of(model)) == 9 and cuts_of(model)["head"] == "alone"
    by_names = PartitionConfig({"use_default_specs": True}, None)
    assert "head" not in cuts_of(model, partition=by_names)
    assert cuts_of(model, partition=by_names)["blocks.0.mlp.fc1"] == "column"
    assert "head" not in cuts_of(model, preset_model="llama")
    assert "lm_head" not in cuts_of(model_of("llama"))


def test_what_a_plan_does_not_say_is_whole_or_named() -> None:
    # Kills: weights that others read cut with an alone layer; a parameter between cut layers that
    # trains on a part of its gradient; a plan whose outer names are the inner model's.
    assert cuts_of(model_of("cohere")).get("lm_head") is None  # tied
    assert cuts_of(model_of("olmo2"))["lm_head"] == "alone"
    assert cuts_of(model_of("olmo2"))["model.layers.1.self_attn.k_proj"] == "alone"
    assert "head" not in cuts_of(planned({**OWN, "head": "replicate"}))
    model = planned(OWN)
    model.blocks[0].attention.scale = torch.nn.Parameter(torch.ones(3))
    model.blocks[0].outside = torch.nn.Parameter(torch.ones(3, 3))
    assert "blocks.0.attention.scale of shape (3,)" in refusal(model)
    model.config.base_model_tp_plan["blocks.*.attention.scale"] = "replicated_with_grad_allreduce"
    assert plan_of(model, 2, None, None).partial == ["blocks.0.attention.scale"]
    assert "has no row-parallel layer" in refusal(planned({**OWN, "blocks.*.mlp.fc1": "colwise"}))


def test_layers_in_one_are_cut_each() -> None:
    model = planned({**OWN, "blocks.*.mlp.fc1": "packed_colwise", "blocks.*.mlp.fc2": "rowwise"})
    for block in model.blocks:
        block.mlp.fc2 = torch.nn.Linear(12, 16)
    layers = {cut.name: cut.sizes for cut in plan_of(model, 2, None, None).layers}
    assert layers["blocks.1.mlp.fc1"] == (12, 12) and layers["blocks.1.mlp.fc2"] == (12,)


def test_a_style_that_is_not_known_leaves_all_to_names(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: a part of a plan that is followed.
    told: list[str] = []
    monkeypatch.setattr("deepspeed.runtime.tensor_parallel.partition_config.warn_once", told.append)
    model = planned({**OWN, "blocks.*.mlp.fc1": "sequence_parallel", "nowhere": "local"})
    assert cuts_of(model)["blocks.0.mlp.fc1"] == "column" and "head" not in cuts_of(model)
    assert "says 'sequence_parallel' of blocks.0.mlp.fc1.weight" in told[0]


class TestFourRanks(DistributedTest):
    """One group of ranks for all: to start them takes longer than a check."""

    world_size = 4

    def test_four_ranks(self) -> None:
        self.check_trains_like_one_process()
        self.check_layers_that_stand_alone()
        self.check_on_streams()

    @each(name=list(PLANNED))
    def check_trains_like_one_process(self, name: str) -> None:
        # Kills: outputs in another order than they lie; an input's gradient of one rank's part; a
        # norm of heads with its own rank's gradient.
        model, first = alike(name)
        engine = start(name, 2, 1, model, gradient_clipping=0.1)
        check_training(engine, first, name, 0.1, steps=1)
        engine.destroy()

    @each(how=[(0, True), (2, False), (3, True)])
    def check_layers_that_stand_alone(self, how: tuple[int, bool]) -> None:
        # Kills: slices of equal sizes where they are not; whole weights put together otherwise.
        stage, overlaps = how
        torch.manual_seed(dist.get_rank())
        model = planned(OWN, heads=6, pairs=3, width=25)
        torch.manual_seed(0)
        first = planned(OWN, heads=6, pairs=3, width=25)
        block = {"autotp_size": 2, "tp_overlap_comm": overlaps}
        more = {"zero_optimization": zero(stage), "tensor_parallel": block}
        engine = start("plain", 2, stage, model, **more)
        width = deepspeed.utils.safe_get_full_fp32_param(model.blocks[0].mlp.fc2.weight).shape[1]
        assert width == 13 - engine.get_tensor_parallel_rank()
        check_training(engine, first, "plain", 0.0)
        exported = engine._consolidated_16bit_state_dict()
        assert exported is None or exported["blocks.1.mlp.fc1.weight"].shape == (25, 16)
        engine.destroy()

    @each(stage=[2, 3])
    def check_on_streams(self, stage: int) -> None:
        # Kills: outputs that are read before they are gathered.
        with simulate(schedule=1, backward_streams=2), check_streams(), check_budgets():
            torch.manual_seed(0)
            model = planned(OWN)
            first = copy.deepcopy(model)
            engine = start("plain", 2, stage, model, zero_optimization=zero(stage))
            check_training(engine, first, "plain", 0.0, steps=1)
            engine.destroy()
