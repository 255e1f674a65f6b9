"""A linear layer as a grid of small ones, each with parameters of its own: at stage 3 a tile is
gathered at a time, so the largest gather is a tile and not the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from deepspeed.runtime.zero.gathering.gathered_parameters import GatheredParameters


def split_tensor_along_last_dim(
    tensor: torch.Tensor, partitions: Sequence[int], contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Cut `tensor`, `[..., sum(partitions)]`, into views, or copies (`contiguous_split_chunks`)."""
    parts = torch.split(tensor, list(partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def _sizes(total: int, parts: int, what: str) -> list[int]:
    if not 1 <= parts <= total:
        raise RuntimeError(f"TiledLinear: {parts} {what} of {total} features; give 1 to {total}")
    size, rest = divmod(total, parts)
    return [size + (index < rest) for index in range(parts)]


class TiledLinear(nn.Module):
    """`y = x W^T + b` with W cut into `out_splits` x `in_splits` linear layers.

    Args:
        in_splits: Tiles along the input; their results are summed.
        out_splits: Tiles along the output; their results stand behind one another.
        input_is_already_split: `forward` is given a list of `in_splits` parts.
        combine_out_splits: `forward` returns one tensor; False: a list of `out_splits`.
        linear_cls: Class of the tiles, with the signature of `torch.nn.Linear`; gets `kwargs` too.
        init_linear: A layer of the whole size whose weights are taken over.

    Attributes:
        linears: `out_splits` lists of `in_splits` tiles each; the last of each list has the bias.
        in_parts, out_parts: Boundaries of the tiles, starting with 0.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.use_bias = bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self._in_sizes = _sizes(in_features, in_splits, "in_splits")
        self._out_sizes = _sizes(out_features, out_splits, "out_splits")
        self.in_parts = [0, *accumulate(self._in_sizes)]
        self.out_parts = [0, *accumulate(self._out_sizes)]
        self.linears = nn.ModuleList(
            nn.ModuleList(
                # One bias per row of tiles: their results are summed.
                linear_cls(into, out, bias=bias and column == in_splits - 1, **kwargs)
                for column, into in enumerate(self._in_sizes)
            )
            for out in self._out_sizes
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: object) -> Any:
        """Map `[..., in_features]`, or its parts, to `[..., out_features]`, or its parts."""
        parts = self._inputs(input_)
        outputs = [self._row(row, parts) for row in self._rows()]
        return self._combined(outputs) if self.combine_out_splits else outputs

    def _rows(self) -> list[list[nn.Module]]:
        return [list(row) for row in self.linears]  # type: ignore[call-overload]  # a list of lists of modules

    def _inputs(self, input_: Any) -> Sequence[torch.Tensor]:
        if not self.input_is_already_split:
            return split_tensor_along_last_dim(input_, self._in_sizes)
        if len(input_) != self.in_splits:
            raise RuntimeError(f"TiledLinear: got {len(input_)} inputs, in_splits={self.in_splits}")
        return tuple(input_)

    def _row(self, row: Sequence[nn.Module], parts: Sequence[torch.Tensor]) -> Any:
        total = row[0](parts[0])
        for linear, part in zip(row[1:], parts[1:], strict=True):
            total = self._added(total, linear(part))
        return total

    @staticmethod
    def _added(total: Any, more: Any) -> Any:
        return total + more

    @staticmethod
    def _combined(outputs: Sequence[Any]) -> Any:
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take over weight and bias of a layer of the whole size; RuntimeError if it does not fit.
        Either may be sharded; then all ranks call it.
        """
        weight: Any = other.weight
        bias: Any = other.bias
        with GatheredParameters([param for param in (weight, bias) if param is not None]):
            if weight.shape != (self.out_features, self.in_features):
                raise RuntimeError(
                    f"TiledLinear.copy_params_from: {tuple(weight.shape)} is not "
                    f"{(self.out_features, self.in_features)}"
                )
            if (bias is not None) != self.use_bias:
                raise RuntimeError("TiledLinear.copy_params_from: one of both has no bias")
            for row, start, size in zip(
                self._rows(), self.out_parts, self._out_sizes, strict=False
            ):
                self._copy_row(row, weight[start : start + size], bias, start)

    def _copy_row(self, row: Sequence[Any], weight: Any, bias: Any, start: int) -> None:
        for linear, part in zip(row, weight.split(self._in_sizes, dim=1), strict=True):
            with GatheredParameters(list(linear.parameters()), modifier_rank=0):
                linear.weight.data.copy_(part)
                if linear.bias is not None and bias is not None:
                    linear.bias.data.copy_(bias[start : start + len(part)])


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` of layers that return `(output, bias)` and leave adding the bias to the caller
    (Megatron's): the outputs and the biases are put together each.
    """

    @staticmethod
    def _added(total: Any, more: Any) -> Any:
        output, bias = total
        next_output, next_bias = more
        if bias is not None and next_bias is not None:
            next_bias = bias + next_bias
        return output + next_output, next_bias if next_bias is not None else bias

    @staticmethod
    def _combined(outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs]
        whole = None if any(bias is None for bias in biases) else torch.cat(biases)
        return torch.cat([output for output, _ in outputs], dim=-1), whole
