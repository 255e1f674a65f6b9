"""A real tensor-parallel block in Megatron's way, small: two layers between norm and head.

Forward and backward communicate by autograd functions (Megatron's f and g, and with sequence
parallelism their relatives). `Serial` is the same model in one process.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed import comm as dist

WIDTH = 6
HIDDEN = 8
CLASSES = 5
ROWS = 4  # samples in a micro-batch of one data-parallel rank; tensor-parallel ranks share them


class Mpu:
    """Tensor-parallel ranks are neighbours: rank = data rank * size + tensor rank."""

    def __init__(self, size: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.size, self.rank, self.data_rank = size, rank % size, rank // size
        self.data_size = world // size
        starts = range(0, world, size)
        tensor = [dist.new_group(list(range(start, start + size))) for start in starts]
        data = [dist.new_group(list(range(start, world, size))) for start in range(size)]
        self._tensor, self._data = tensor[self.data_rank], data[self.rank]

    def get_tensor_model_parallel_group(self) -> Any:
        return self._tensor

    def get_tensor_model_parallel_rank(self) -> int:
        return self.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.size

    get_model_parallel_group = get_tensor_model_parallel_group
    get_model_parallel_rank = get_tensor_model_parallel_rank
    get_model_parallel_world_size = get_tensor_model_parallel_world_size

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return self.data_rank

    def get_data_parallel_world_size(self) -> int:
        return self.data_size


def summed(value: torch.Tensor, group: Any) -> torch.Tensor:
    total = value.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def own_rows(value: torch.Tensor, group: Any) -> torch.Tensor:
    return value.chunk(dist.get_world_size(group=group))[dist.get_rank(group=group)].contiguous()


def all_rows(value: torch.Tensor, group: Any) -> torch.Tensor:
    whole = value.new_empty(value.shape[0] * dist.get_world_size(group=group), *value.shape[1:])
    dist.all_gather_into_tensor(whole, value.contiguous(), group=group)
    return whole


def rows_of_sum(value: torch.Tensor, group: Any) -> torch.Tensor:
    return own_rows(summed(value, group), group)


def as_it_is(value: torch.Tensor, group: Any) -> torch.Tensor:
    return value.view_as(value)


Exchange = Callable[[torch.Tensor, Any], torch.Tensor]


class Exchanged(torch.autograd.Function):
    """What one exchange over a group makes of a tensor; another one makes its gradient."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, group: Any, there: Exchange, back: Exchange
    ) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        return there(value, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.back(grad, ctx.group), None, None, None


def copied(value: torch.Tensor, group: Any) -> Any:
    """f: every rank computes with the same input, so its gradient is the sum of theirs."""
    return Exchanged.apply(value, group, as_it_is, summed)


def reduced(value: torch.Tensor, group: Any) -> Any:
    """g: the output is the sum of the ranks' parts; its gradient is that of each part."""
    return Exchanged.apply(value, group, summed, as_it_is)


class Serial(nn.Module):
    """The whole model."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.norm = nn.LayerNorm(WIDTH)
            self.column = nn.Linear(WIDTH, HIDDEN)
            self.row = nn.Linear(HIDDEN, WIDTH)
            self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.row(F.gelu(self.column(self.norm(x))))
        return F.cross_entropy(self.head(x + hidden).float(), labels)


# Which dimension of a parameter the tensor-parallel ranks cut.
CUT = {"column.weight": 0, "column.bias": 0, "row.weight": 1}
# Which act on rows that sequence parallelism cuts.
OF_ROWS = ("norm.weight", "norm.bias", "row.bias")


def slice_of(name: str, value: torch.Tensor, mpu: Mpu) -> torch.Tensor:
    """The part of a whole parameter (or gradient) that this rank holds."""
    return value.chunk(mpu.size, CUT[name])[mpu.rank] if name in CUT else value


class Parallel(nn.Module):
    """The same, cut over ranks; with `sequence_parallel` the rows outside of the layers, too."""

    def __init__(self, mpu: Mpu, sequence_parallel: bool = False) -> None:
        super().__init__()
        whole = Serial()
        self.group = mpu.get_tensor_model_parallel_group()
        self.is_sequence_parallel = sequence_parallel
        for name, param in whole.named_parameters():
            own = nn.Parameter(slice_of(name, param.detach(), mpu).clone())
            module = getattr(whole, name.partition(".")[0])
            setattr(module, name.partition(".")[2], own)
            own.tensor_model_parallel = name in CUT
            own.sequence_parallel = sequence_parallel and name in OF_ROWS
        self.norm, self.column = whole.norm, whole.column
        self.row, self.head = whole.row, whole.head

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.is_sequence_parallel:
            rows = own_rows(x, self.group)
            # What follows differs on each rank: gradients are parts.
            all_of = Exchanged.apply(self.norm(rows), self.group, all_rows, rows_of_sum)
            part = F.linear(F.gelu(self.column(all_of)), self.row.weight)
            out = Exchanged.apply(part, self.group, rows_of_sum, all_rows) + self.row.bias
            # Here it does not.
            hidden = Exchanged.apply(rows + out, self.group, all_rows, own_rows)
        else:
            part = F.gelu(self.column(copied(self.norm(x), self.group)))
            hidden = x + reduced(F.linear(part, self.row.weight), self.group) + self.row.bias
        return F.cross_entropy(self.head(hidden).float(), labels)


def batch(step: int, data_size: int, accumulation: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs `[data ranks, accumulation, ROWS, WIDTH]` and labels of one step."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(data_size, accumulation, ROWS, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (data_size, accumulation, ROWS), generator=generator)
