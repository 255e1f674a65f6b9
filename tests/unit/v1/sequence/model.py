"""A small causal transformer for sequence parallelism, its data, and its single-process run."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from unit import models
from unit.models import seeded

VOCABULARY, LENGTH, ROWS, HEAD = 11, 8, 2, 3
LEARNING_RATE = 0.2
IGNORED = -100

Tensors = dict[str, torch.Tensor]


class CausalCore(nn.Module):
    """Attention over whole sequences, [s, b, h, d] or [b, s, h, d]; key heads may be fewer."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The context, heads and features in one dimension."""
        order = (1, 2, 0, 3) if self.positions == 0 else (0, 2, 1, 3)
        query, key, value = (t.permute(order) for t in (query, key, value))  # [b, h, s, d]
        times = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(times, dim=1) for t in (key, value))
        scores = query @ key.transpose(-1, -2) / HEAD**0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        context = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        back = (2, 0, 1, 3) if self.positions == 0 else (0, 2, 1, 3)
        return context.permute(back).flatten(2)


class Block(nn.Module):
    """Embeds, attends, and returns logits, [b, s, vocabulary]."""

    def __init__(self, heads: int = 4, key_heads: int = 4, positions: int = 1) -> None:
        super().__init__()
        self.heads, self.key_heads, self.positions = heads, key_heads, positions
        width = heads * HEAD
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(LENGTH, width)
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * key_heads * HEAD)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY)
        self.attention: Any = CausalCore(positions)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Logits of tokens [b, s] at places [s]."""
        hidden = self.embed(tokens) + self.place(places)
        rows_first = self.positions == 1
        normed = self.norm(hidden) if rows_first else self.norm(hidden).transpose(0, 1)
        query = self.query(normed).unflatten(-1, (self.heads, HEAD))
        key, value = self.key_value(normed).unflatten(-1, (2, self.key_heads, HEAD)).unbind(2)
        batch = () if isinstance(self.attention, CausalCore) else (1 - self.positions,)
        context = self.out(self.attention(query, key, value, *batch))
        hidden = hidden + (context if rows_first else context.transpose(0, 1))
        return self.head(hidden.tanh())


def make_model(heads: int = 4, key_heads: int = 4, positions: int = 1) -> Block:
    """The same weights each time."""
    return seeded(Block, heads, key_heads, positions, seed=1)


def samples(
    step: int, micro: int, data_rank: int, ignore: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [b, s]; with `ignore` another number of labels counts on every rank."""
    seed = 1000 * step + 100 * data_rank + micro
    tokens, labels = models.tokens(seed, VOCABULARY, 2, ROWS, LENGTH)
    if ignore:
        labels[0, 3 + data_rank :] = IGNORED
        labels[1, 0] = IGNORED
    return tokens, labels


def reference_step(
    model: Block, step: int, accumulation: int, data_ranks: int, ignore: bool = False
) -> tuple[float, Tensors]:
    """One SGD step on the whole batch; returns the loss and the gradients before it."""
    indices = [(micro, rank) for rank in range(data_ranks) for micro in range(accumulation)]
    batch = [samples(step, *index, ignore) for index in indices]
    tokens, labels = (torch.cat(parts) for parts in zip(*batch, strict=True))
    logits = model(tokens, torch.arange(LENGTH))
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    model.zero_grad(set_to_none=True)
    loss.backward()
    return loss.item(), {name: param.grad.clone() for name, param in model.named_parameters()}
