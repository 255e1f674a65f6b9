"""Models of some thousand parameters, built from a configuration, and data that they can learn."""

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY = 32


def llama(
    width: int = 16, vocabulary: int = VOCABULARY, heads: int = 4, **words: Any
) -> LlamaConfig:
    """Two layers."""
    sizes = {"hidden_size": width, "intermediate_size": 3 * width // 2, "num_hidden_layers": 2}
    return LlamaConfig(vocab_size=vocabulary, num_attention_heads=heads, **sizes, **words)


def tiny_llama() -> LlamaForCausalLM:
    """Two query heads for each key head; the same weights each time."""
    torch.manual_seed(3)
    words = {"num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False}
    return LlamaForCausalLM(llama(**words))


def tiny_gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """Two layers, tied embeddings, and dropout, so that random states have to be restored."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from their index, modulo the vocabulary."""

    def __init__(self, size: int, length: int = 16) -> None:
        self.size, self.length = size, length

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(self.length) + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}
