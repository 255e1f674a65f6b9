"""What AutoTP finds in a model or reads in its plan, and what it refuses by name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.module_inject import LinearLayer
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.tensor_parallel.partition_config import PartitionConfig
from deepspeed.runtime.tensor_parallel.structure import plan_of
from deepspeed.verify import check_budgets, check_streams
from unit.common import DistributedTest
from unit.v1.looping import each
from unit.v1.tensor.architectures import ARCHITECTURES, PLANNED, PlainDecoder, model_of
from unit.v1.tensor.test_autotp import alike, check_training, start


def refusal(model: nn.Module, size: int = 2, **how: Any) -> str:
    block = how.get("partition_config")
    with pytest.raises(DeepSpeedConfigError) as caught:
        partition = None if block is None else PartitionConfig(block, "own")
        plan_of(model, size, how.get("preset_model"), partition)
    return str(caught.value)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_matrix_of_every_block_is_cut(name: str) -> None:
    # Kills: a layer that stays whole.
    model = model_of(name)
    plan = plan_of(model, 2, None, None)
    cut = {f"{layer.name}.weight" for layer in plan.layers}
    cut |= {f"{embedding}.weight" for embedding in plan.embeddings}
    matrices = {key for key, param in model.named_parameters() if param.dim() > 1}
    outside = {key for key in matrices if not any(part.isdigit() for part in key.split("."))}
    assert cut == matrices - outside and len(cut) >= 8


ONE_KEY = {"new_decoder_architecture": False, "multi_query": True}


@pytest.mark.parametrize(
    "name, size, more, text",
    [
        ("llama", 3, {}, "self_attn.k_proj has 2 parts of 4 elements (heads, say), too few for 3"),
        ("phi3", 4, {}, "self_attn.qkv_proj has 2 parts of 8 elements"),
        ("gpt_neox", 8, {}, "attention.query_key_value has 4 parts of 12 elements"),
        ("opt", 4, {"ffn_dim": 3}, "fc1 has 3 parts, too few for 4 ranks; use an autotp_size of"),
        ("gpt2", 2, {"add_cross_attention": True}, "crossattention.c_attn is no layer of queries"),
        ("falcon", 2, {"alibi": True}, "self_attention.query_key_value has alibi"),
        ("falcon", 2, ONE_KEY, "self_attention.query_key_value has one key and value for all"),
        ("bloom", 2, {"pretraining_tp": 2, "slow_but_exact": True}, "reads slices of weights"),
    ],
)
def test_what_cannot_be_cut_is_named(name: str, size: int, more: dict[str, Any], text: str) -> None:
    # Kills: half a head; one piece of another length; what reads weights behind the layer's back.
    assert text in refusal(model_of(name, **more), size)


def test_a_parameter_that_is_not_known_is_named() -> None:
    # Kills: a norm over all heads, experts or an adapter that train on a part of their gradient.
    model = model_of("llama")
    model.model.layers[1].self_attn.over_all_heads = nn.LayerNorm(16)
    model.model.layers[0].mlp.experts = nn.Parameter(torch.ones(2, 16, 16))
    text = refusal(model)
    assert "model.layers.1.self_attn.over_all_heads.weight of shape (16,)" in text
    assert "model.layers.0.mlp.experts of shape (2, 16, 16)" in text and '"skip"' in text


def test_a_layer_that_is_two_by_its_width_is_named() -> None:
    # Kills: gate and up of one layer that is called as if it were one, cut so that ranks pair gates
    # with gates.
    model = model_of("gpt_neox")
    model.gpt_neox.layers[0].mlp.dense_h_to_4h = nn.Linear(16, 48)
    assert "layers.0.mlp.dense_h_to_4h has 48 outputs, and" in refusal(model)


def test_heads_whose_width_nothing_says_are_named() -> None:
    # Kills: heads counted by a configuration that the attention does not follow; keys that are cut
    # within a head.
    for attribute, value in (("num_heads", None), ("num_heads", 5), ("num_kv_heads", 4)):
        model: Any = PlainDecoder()
        model.config = SimpleNamespace(num_attention_heads=4, head_dim=4)
        setattr(model.blocks[1].attention, attribute, value)
        text = refusal(model)
        assert "blocks.1.attention.q_proj has 16 outputs" in text, text
        assert "does not say by head_dim, or by num_heads" in text
        assert "blocks.0" not in text


def test_layers_without_a_partner_or_an_order_are_named() -> None:
    model = model_of("llama")
    del model.model.layers[0].mlp.down_proj
    assert "model.layers.0.mlp has no row-parallel layer beside" in refusal(model)
    assert "is several layers in one" in refusal(model_of("phi3"), preset_model="llama")
    assert "no layer that could be cut" in refusal(nn.Linear(4, 4))
    assert "use one of bloom, falcon" in refusal(model_of("llama"), preset_model="nobody")


def specs(**spec: Any) -> dict[str, Any]:
    return {"layer_specs": [spec]}


@pytest.mark.parametrize(
    "block, text",
    [
        ({"layers": []}, "partition_config.layers: "),
        (specs(patterns=[".*"], kind=1), "layer_specs[0].kind: 1"),
        (specs(patterns=".*"), "layer_specs[0].patterns: expected a list"),
        (specs(patterns=["("]), "layer_specs[0].patterns: "),
        (specs(patterns=[".*"], partition_type="both"), "'both' is none of"),
        ({"layer_specs": [1]}, "layer_specs[0]: expected an object"),
        (specs(patterns=[".*o_proj"], partition_type="row"), "has no column-parallel layer"),
        (specs(patterns=[".*q_proj"], shape=[3, -1]), "to which shape: [3, -1]"),
        (specs(patterns=[".*q_proj"], partition_dim=1), "partition_dim: 1"),
    ],
)
def test_what_patterns_cannot_mean_is_named(block: dict[str, Any], text: str) -> None:
    # Kills: a key that is accepted and ignored.
    assert text in refusal(model_of("llama"), partition_config=block)


def test_patterns_come_before_names() -> None:
    block = {
        "use_default_specs": True,
        "layer_specs": [
            {"patterns": [".*mlp.*"], "partition_type": "skip", "model_types": ["llama"]},
            {"patterns": [".*"], "partition_type": "skip", "model_types": ["other"]},
        ],
    }
    plan = plan_of(model_of("llama"), 2, None, PartitionConfig(block, "llama"))
    assert len(plan.layers) == 8 and all("self_attn" in cut.name for cut in plan.layers)


def test_a_layer_is_not_made_by_hand() -> None:
    with pytest.raises(TypeError, match="cut in place, by deepspeed.tp_model_init"):
        LinearLayer(nn.Linear(2, 2))


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
        model, first = alike(model_of, name)
        engine = start(model, 2, 1, gradient_clipping=0.1)
        check_training(engine, first, 0.1)

    @each(how=[(0, True), (2, False), (3, True)])
    def check_layers_that_stand_alone(self, how: tuple[int, bool]) -> None:
        # Kills: slices of equal sizes where they are not; whole weights put together otherwise.
        stage, overlaps = how
        model, first = alike(planned, OWN, heads=6, pairs=3, width=25)
        block = {"autotp_size": 2, "tp_overlap_comm": overlaps}
        engine = start(model, 2, stage, tensor_parallel=block)
        width = deepspeed.utils.safe_get_full_fp32_param(model.blocks[0].mlp.fc2.weight).shape[1]
        assert width == 13 - engine.get_tensor_parallel_rank()
        exported = engine._consolidated_16bit_state_dict()
        assert exported is None or exported["blocks.1.mlp.fc1.weight"].shape == (25, 16)
        check_training(engine, first)

    @each(stage=[2, 3])
    def check_on_streams(self, stage: int) -> None:
        # Kills: outputs that are read before they are gathered.
        with simulate(schedule=1, backward_streams=2), check_streams(), check_budgets():
            model, first = alike(planned, OWN)
            check_training(start(model, 2, stage), first)
