"""Tiny models of transformers, one of each kind of layer to know, and a decoder of no library."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

# With what its models import at their first use: here every forked rank has it already.
pytest.importorskip("transformers.modeling_layers")

VOCABULARY = 24
LENGTH = 6
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_OWN_NAMES = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_GROUPED, "attention_bias": True, "mlp_bias": True},
    "mistral": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 8},
    "phi": {**_GROUPED, "qk_layernorm": True, "resid_pdrop": 0.0},
    "phi3": _GROUPED,
    "gemma": {**_GROUPED, "head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {
        **_OWN_NAMES,
        **{"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16},
        **{"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    },
    "gpt_neox": {**_COMMON, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "bloom": {**_OWN_NAMES, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "opt": {**_COMMON, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    "falcon": {
        **{**_COMMON, "num_kv_heads": 2},
        **{"new_decoder_architecture": True, "attention_dropout": 0.0},
    },
    "t5": {
        **_OWN_NAMES,
        **{"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
        **{"dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
    },
}
"""`model_type` -> configuration."""

_PLANNED = {**_GROUPED, "head_dim": 8}
PLANNED: dict[str, dict[str, Any]] = {
    "cohere": {**_PLANNED, "tie_word_embeddings": True},
    "exaone4": _PLANNED,
    "glm": _PLANNED,
    "olmo2": _GROUPED,
}
"""The same of types that only their own `tp_plan` knows."""


def model_of(name: str, **more: Any) -> Any:
    """A model in training mode, of random weights of a size that makes gradients visible."""
    transformers = __import__("transformers")
    keys = {**(ARCHITECTURES | PLANNED)[name], **more}
    config = transformers.AutoConfig.for_model(name, **keys)
    kind = "AutoModelForSeq2SeqLM" if name == "t5" else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_config(config, attn_implementation="eager")
    for param in model.parameters():
        mean, std = (0.0, 0.2) if param.dim() > 1 else (float(param.detach().mean().round()), 0.1)
        torch.nn.init.normal_(param, mean, std)
    return model.train()


def batch_of(samples: int, seed: int) -> dict[str, torch.Tensor]:
    """Arguments of a model; no token is padding."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids, labels = torch.randint(3, VOCABULARY, (2, samples, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": labels}


WIDTH = 16


class Attention(nn.Module):
    """Counts heads, of which several read one key and value, and does not say how wide they are."""

    def __init__(self, heads: int, pairs: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = heads, pairs
        self.q_proj = nn.Linear(WIDTH, 4 * heads)
        self.k_proj = nn.Linear(WIDTH, 4 * pairs)
        self.v_proj = nn.Linear(WIDTH, 4 * pairs)
        self.o_proj = nn.Linear(4 * heads, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        count, length = value.shape[:2]
        query, key, given = (
            project(value).view(count, length, number, -1).transpose(1, 2)
            for project, number in (
                (self.q_proj, self.num_heads),
                (self.k_proj, self.num_kv_heads),
                (self.v_proj, self.num_kv_heads),
            )
        )
        groups = self.num_heads // self.num_kv_heads
        key, given = key.repeat_interleave(groups, 1), given.repeat_interleave(groups, 1)
        seen = F.scaled_dot_product_attention(query, key, given, is_causal=True)
        return self.o_proj(seen.transpose(1, 2).reshape(count, length, -1))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, width)
        self.fc2 = nn.Linear(width, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.fc1(value)))


class Block(nn.Module):
    def __init__(self, heads: int, pairs: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(heads, pairs)
        self.mlp = Mlp(width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value + self.attention(self.norm(value))
        return value + self.mlp(value)


class PlainDecoder(nn.Module):
    """Called as the models of transformers are."""

    def __init__(self, heads: int = 4, pairs: int = 2, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(heads, pairs, width) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        value = self.embed(input_ids)
        for block in self.blocks:
            value = block(value)
        logits = self.head(value)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)
