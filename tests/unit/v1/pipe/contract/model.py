"""The layers and data of the pipeline's contract: all that a stage can get wrong.

What travels is a tuple of the hidden states and a boolean tensor that says who takes a branch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 13
WIDTH = 7
ROWS = 3  # samples in a micro-batch, where they do not vary

Carried = tuple[torch.Tensor, torch.Tensor]  # hidden [rows, width] and branch [rows]


class Micro(NamedTuple):
    """A micro-batch as the engine reads it."""

    inputs: Carried  # tokens [rows], branch [rows]
    labels: torch.Tensor  # [rows]


class Embed(nn.Module):
    """Tokens to hidden states; where it is tied, also the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, inputs: Carried) -> Carried:
        tokens, branch = inputs
        return F.embedding(tokens, self.weight), branch


def project(layer: nn.Module, inputs: Carried) -> torch.Tensor:
    """Hidden states to logits by a weight like `Embed`'s."""
    return F.linear(inputs[0], layer.weight)  # type: ignore[arg-type]  # modules' attributes are tensors or modules


class Head(Embed):
    """The last layer, where it has a weight of its own."""

    def forward(self, inputs: Carried) -> torch.Tensor:  # type: ignore[override]  # the end of the pipeline
        return project(self, inputs)


class Block(nn.Module):
    """A layer with a non-linearity, frozen or not."""

    def __init__(self, width: int, out: int, frozen: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out).requires_grad_(not frozen)

    def forward(self, inputs: Carried) -> Carried:
        hidden, branch = inputs
        return self.linear(hidden).tanh(), branch


class Sometimes(nn.Module):
    """Takes part only if a row wants it to; otherwise hands over the very tensors that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 9, bias=False)

    def forward(self, inputs: Carried) -> Carried:
        hidden, branch = inputs
        if branch.any():
            hidden = hidden + branch[:, None].to(hidden.dtype) * self.linear(hidden)
        return hidden, branch


class Odds(nn.Module):
    """A scalar, an empty, and a never used parameter beside a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.never = nn.Parameter(torch.randn(5))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, inputs: Carried) -> Carried:
        hidden, branch = inputs
        return self.linear(hidden) * self.temperature + self.empty.sum(), branch


def squash(inputs: Carried) -> Carried:
    """A layer without parameters, of which a stage may hold no other."""
    return inputs[0].sin(), inputs[1]


Layer = nn.Module | Callable[[Any], Any]


def make_layers(tied: bool, seed: int = 0) -> list[Layer]:
    """All layers with the same weights for the same seed; `tied`: the last has the first's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[Layer] = [
            Embed(),
            Block(WIDTH, 9),
            Block(9, 9),
            Sometimes(),
            Block(9, 9, frozen=True),
            Block(9, 31),
            squash,
            Block(31, 9),
            Odds(),
            Head(),
        ]
    if tied:
        layers[-1].load_state_dict(layers[0].state_dict())  # type: ignore[union-attr]  # both are modules
    return layers


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over rows, fp32."""
    return F.cross_entropy(logits.float(), labels)


def parameter_groups(named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without; a stage may have none of one."""
    return [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]


def micro_batch(step: int, replica: int, micro: int, replicas: int, dynamic: bool) -> Micro:
    """What data-parallel rank `replica` sees in micro-batch `micro` of `step`: different for each.

    The branch is taken, in turns, by the last rank, nobody, every second row of everybody.
    """
    generator = torch.Generator().manual_seed(1_000 * step + 100 * replica + micro)
    rows = int(torch.randint(1, 6, (), generator=generator)) if dynamic else ROWS
    tokens, labels = (torch.randint(VOCABULARY, (rows,), generator=generator) for _ in range(2))
    turn = (step + micro) % 3
    branch = torch.full((rows,), turn == 0 and replica == replicas - 1)
    branch[::2] |= turn == 2
    return Micro((tokens, branch), labels)
