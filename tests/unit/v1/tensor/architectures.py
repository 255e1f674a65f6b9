"""Tiny models of transformers, one of each kind of layer that tensor parallelism has to know."""

from typing import Any

import torch

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
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "gpt_neox": {**_COMMON, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "bloom": {**_OWN_NAMES, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "opt": {**_COMMON, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    "falcon": {
        **_COMMON,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "attention_dropout": 0.0,
    },
    "t5": {
        **_OWN_NAMES,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": 0,
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


def config_of(name: str, **more: Any) -> Any:
    transformers = __import__("transformers")
    return transformers.AutoConfig.for_model(name, **{**(ARCHITECTURES | PLANNED)[name], **more})


def model_of(name: str, **more: Any) -> Any:
    """A model in training mode, of random weights of a size that makes gradients visible."""
    transformers = __import__("transformers")
    config = config_of(name, **more)
    kind = "AutoModelForSeq2SeqLM" if name == "t5" else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_config(config, attn_implementation="eager")
    for param in model.parameters():
        if param.dim() > 1:
            torch.nn.init.normal_(param, std=0.2)
        else:
            torch.nn.init.normal_(param, mean=float(param.detach().mean().round()), std=0.1)
    return model.train()


def batch_of(name: str, samples: int, seed: int) -> dict[str, torch.Tensor]:
    """Arguments of a model; no token is padding."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.randint(3, VOCABULARY, (samples, LENGTH), generator=generator)
    labels = torch.randint(3, VOCABULARY, (samples, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": labels}
