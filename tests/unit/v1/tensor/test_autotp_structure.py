"""What AutoTP finds in a model, and what it refuses by name. No ranks are needed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.module_inject import LinearLayer
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.tensor_parallel.partition_config import PartitionConfig
from deepspeed.runtime.tensor_parallel.structure import plan_of
from unit.v1.tensor.architectures import ARCHITECTURES, model_of
from unit.v1.tensor.plain_decoder import PlainDecoder

pytest.importorskip("transformers")


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


@pytest.mark.parametrize(
    "name, size, more, text",
    [
        ("llama", 3, {}, "self_attn.k_proj has 2 parts of 4 elements (heads, say), too few for 3"),
        ("phi3", 4, {}, "self_attn.qkv_proj has 2 parts of 8 elements"),
        ("gpt_neox", 8, {}, "attention.query_key_value has 4 parts of 12 elements"),
        ("opt", 4, {"ffn_dim": 3}, "fc1 has 3 parts, too few for 4 ranks; use an autotp_size of"),
        ("gpt2", 2, {"add_cross_attention": True}, "crossattention.c_attn is no layer of queries"),
        ("falcon", 2, {"alibi": True}, "self_attention.query_key_value has alibi"),
        (
            "falcon",
            2,
            {"new_decoder_architecture": False, "multi_query": True},
            "self_attention.query_key_value has one key and value for all heads",
        ),
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


@pytest.mark.parametrize(
    "block, text",
    [
        ({"layers": []}, "partition_config.layers: "),
        ({"layer_specs": [{"patterns": [".*"], "kind": 1}]}, "layer_specs[0].kind: 1"),
        ({"layer_specs": [{"patterns": ".*"}]}, "layer_specs[0].patterns: expected a list"),
        ({"layer_specs": [{"patterns": ["("]}]}, "layer_specs[0].patterns: "),
        ({"layer_specs": [{"patterns": [".*"], "partition_type": "both"}]}, "'both' is none of"),
        ({"layer_specs": [1]}, "layer_specs[0]: expected an object"),
        (
            {"layer_specs": [{"patterns": [".*o_proj"], "partition_type": "row"}]},
            "has no column-parallel layer",
        ),
        (
            {"layer_specs": [{"patterns": [".*q_proj"], "shape": [3, -1]}]},
            "to which shape: [3, -1]",
        ),
        ({"layer_specs": [{"patterns": [".*q_proj"], "partition_dim": 1}]}, "partition_dim: 1"),
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
