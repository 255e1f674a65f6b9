"""The contract suite's small model and data: every kind of parameter that can be got wrong."""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from unit.models import tokens

VOCABULARY = 13
ROWS = 3  # samples in a micro-batch of one rank
# back.weight and wide.weight, which are neighbours in their group, fill a bucket of this size to
# the last element.
EXACT_BUCKET = 7 * 31 + 31 * 9
BUCKETS = {"tiny": 16, "exact": EXACT_BUCKET, "huge": 500_000_000}


class Batch(NamedTuple):
    """Samples of one or several micro-batches, one after another."""

    tokens: torch.Tensor  # [rows]
    labels: torch.Tensor  # [rows]
    branch: torch.Tensor  # [rows], 1 where the branch with `sometimes` is taken


class Branch(nn.Linear):
    """Adds its product where a row wants it, and uses its weight only if one does."""

    def forward(self, hidden: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # it has a second input
        """[rows, width], [rows] -> [rows, width]."""
        if bool(branch.any()):
            hidden = hidden + branch[:, None].to(hidden.dtype) * super().forward(hidden)
        return hidden


class ContractModel(nn.Module):
    """Tied, frozen, twice used, rarely or never used, oversized, empty and scalar; odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 7)  # tied: also the output projection
        self.lift = nn.Linear(7, 9)
        self.twice = nn.Linear(9, 9)
        self.frozen = nn.Linear(9, 9)
        self.sometimes = Branch(9, 9, bias=False)
        self.wide = nn.Linear(9, 31)
        self.back = nn.Linear(31, 7)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.never = nn.Parameter(torch.randn(5))
        self.empty = nn.Parameter(torch.empty(0))
        self.empty_unused = nn.Parameter(torch.empty(3, 0))
        self.frozen.requires_grad_(False)

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, branch: torch.Tensor
    ) -> torch.Tensor:
        """Mean loss over rows; `sometimes` takes part only if a row wants it to."""
        hidden = self.rise(self.embed(tokens))
        hidden = self.again(hidden.tanh()).tanh()
        hidden = self.detour(self.sometimes(self.frozen(hidden), branch))
        logits = F.linear(hidden, self.embed.weight) * self.temperature + self.empty.sum()
        return F.cross_entropy(logits.float(), labels)

    def rise(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, 7] -> [rows, 9]."""
        return self.twice(self.lift(x).tanh())

    def again(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, 9] -> [rows, 9]."""
        return self.twice(x)

    def detour(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, 9] -> [rows, 7]."""
        return self.back(self.wide(x).tanh())


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


class ModelOfBlocks(ContractModel):
    """The same with blocks, of the first of which a part is used once more outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList([Pair(self.lift, self.twice), Pair(self.wide, self.back)])
        del self.lift, self.twice, self.wide, self.back

    @staticmethod
    def plain_name(name: str) -> str:
        """What a parameter is called in `ContractModel`."""
        for found, plain in _PLAIN_NAMES.items():
            name = name.replace(found, plain)
        return name

    def rise(self, x: torch.Tensor) -> torch.Tensor:
        return self.pairs[0](x)

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self.pairs[0].second(x)

    def detour(self, x: torch.Tensor) -> torch.Tensor:
        return self.pairs[1](x)


_PLAIN_NAMES = {
    "pairs.0.first": "lift",
    "pairs.0.second": "twice",
    "pairs.1.first": "wide",
    "pairs.1.second": "back",
}


def make_model(seed: int = 0, kind: type[ContractModel] = ContractModel) -> ContractModel:
    """The same weights for the same seed, whatever the caller's generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind()


def parameter_groups(model: ContractModel) -> list[dict[str, object]]:
    """Matrices with weight decay, the rest without; frozen ones too, as scripts do."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def takes_branch(step: int, rank: int, micro: int, world: int) -> bool:
    """In turns: only the last rank, nobody, everybody."""
    return (rank == world - 1, False, True)[(step + micro) % 3]


def micro_batch(step: int, rank: int, micro: int, world: int) -> Batch:
    """What `rank` sees in micro-batch `micro` of `step`: different for each."""
    branch = torch.full((ROWS,), float(takes_branch(step, rank, micro, world)))
    return Batch(*tokens(1_000 * step + 100 * rank + micro, VOCABULARY, 2, ROWS), branch)


def global_batch(step: int, world: int, accumulation: int) -> list[Batch]:
    """All micro-batches of all ranks of a step."""
    indices = itertools.product(range(world), range(accumulation))
    return [micro_batch(step, rank, micro, world) for rank, micro in indices]


def concatenated(batches: list[Batch]) -> Batch:
    """One batch of all rows."""
    return Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
