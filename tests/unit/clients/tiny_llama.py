"""A Llama of some thousand parameters, built from a configuration."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 32


def tiny_llama() -> LlamaForCausalLM:
    """Two layers, two query heads for each key head; the same weights each time."""
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
    )
