"""A GPT-2 of some thousand parameters, built from a configuration, and data that it can learn."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 32
LENGTH = 16


def tiny_gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """Two layers, tied embeddings, and dropout, so that random states have to be restored."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from their index, modulo the vocabulary."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}
