"""A decoder of no library: its attention counts heads and does not say how wide they are."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from unit.v1.tensor.architectures import VOCABULARY

WIDTH = 16


class Attention(nn.Module):
    """Several query heads read one key and value."""

    def __init__(self, heads: int, pairs: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = heads, pairs
        self.q_proj = nn.Linear(WIDTH, 4 * heads)
        self.k_proj = nn.Linear(WIDTH, 4 * pairs)
        self.v_proj = nn.Linear(WIDTH, 4 * pairs)
        self.o_proj = nn.Linear(4 * heads, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        count, length = value.shape[:2]
        query = self.q_proj(value).view(count, length, self.num_heads, -1).transpose(1, 2)
        key = self.k_proj(value).view(count, length, self.num_kv_heads, -1).transpose(1, 2)
        given = self.v_proj(value).view(count, length, self.num_kv_heads, -1).transpose(1, 2)
        groups = self.num_heads // self.num_kv_heads
        key, given = key.repeat_interleave(groups, 1), given.repeat_interleave(groups, 1)
        seen = F.scaled_dot_product_attention(query, key, given, is_causal=True)
        result: torch.Tensor = self.o_proj(seen.transpose(1, 2).reshape(count, length, -1))
        return result


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, width)
        self.fc2 = nn.Linear(width, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc2(torch.tanh(self.fc1(value)))
        return result


class Block(nn.Module):
    def __init__(self, heads: int, pairs: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(heads, pairs)
        self.mlp = Mlp(width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value + self.attention(self.norm(value))
        result: torch.Tensor = value + self.mlp(value)
        return result


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
