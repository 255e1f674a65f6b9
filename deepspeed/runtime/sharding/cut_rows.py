"""Copies between whole parameters and the rows `[N, s]` in which their cuts lie: grouped, so that
their number does not grow with the ranks. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from deepspeed.accelerator import runs_ahead
from deepspeed.runtime.sharding.fragments import ParameterCutTable

# Whole parameters start at multiples of this, as kernels like it.
ALIGNMENT_BYTES = 128


class _Filling(NamedTuple):
    """Where one parameter goes: its full rows, what is left of it, and what stays zero."""

    param: int
    rows: torch.Tensor | None
    rest: torch.Tensor | None
    num_in_rows: int


class RowFiller:
    """Copies whole tensors into rows, of `shard_numel` elements or more each, padding zeroed."""

    def __init__(self, table: ParameterCutTable, rows: torch.Tensor) -> None:
        self._fillings: list[_Filling] = []
        self._padding: list[torch.Tensor] = []
        self._columns: list[torch.Tensor] = []
        self._matrix = matrix = rows.view(table.num_shards, -1)
        for param, (numel, cut) in enumerate(zip(table.numels, table.cuts, strict=True)):
            columns = matrix[:, table.cut_starts[param] : table.cut_starts[param] + cut]
            self._columns.append(columns)
            full, rest = divmod(numel, cut) if cut else (0, 0)
            self._fillings.append(
                _Filling(
                    param,
                    columns[:full] if full else None,
                    columns[full, :rest] if rest else None,
                    full * cut,
                )
            )
            if rest:
                self._padding.append(columns[full, rest:])
            if full + bool(rest) < table.num_shards and cut:
                self._padding.append(columns[full + bool(rest) :])
        self._padding.append(matrix[:, table.shard_numel :])
        self._tail = rows.new_zeros(self._padding[-1].numel())

    @torch.no_grad()
    def fill(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Fill the rows with `tensors`, one per parameter; None counts as zeros. On a device that
        is one kernel, if there are all of them, there, in the dtype of the rows.
        """
        if runs_ahead(self._matrix) and all(self._is_ready(tensor) for tensor in tensors):
            joined = [tensor.reshape(-1) for tensor in tensors if tensor is not None]
            tail = [self._tail] if self._tail.numel() else []
            torch._chunk_cat([*joined, *tail], 0, len(self._matrix), out=self._matrix)
            return
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        zeros = list(self._padding)
        for filling, tensor in zip(self._fillings, tensors, strict=True):
            if tensor is None:
                zeros.append(self._columns[filling.param])
                continue
            flat = tensor.reshape(-1)
            if filling.rows is not None:
                targets.append(filling.rows)
                sources.append(flat[: filling.num_in_rows].view(filling.rows.shape))
            if filling.rest is not None:
                targets.append(filling.rest)
                sources.append(flat[filling.num_in_rows :])
        if targets:
            torch._foreach_copy_(targets, sources)
        zeros = [piece for piece in zeros if piece.numel()]
        if zeros:
            torch._foreach_zero_(zeros)

    def _is_ready(self, tensor: torch.Tensor | None) -> bool:
        if tensor is None or not tensor.numel() or tensor.dtype != self._matrix.dtype:
            return False
        return runs_ahead(tensor)  # a model may still be on the host when its parameters are cut


class WholeViews:
    """Whole parameters, in their shapes, in memory of at least `numel_of(table)` elements."""

    def __init__(
        self, table: ParameterCutTable, shapes: Sequence[torch.Size], memory: torch.Tensor
    ) -> None:
        self._cuts = list(table.cuts)
        self._num_shards = table.num_shards
        self.params: list[torch.Tensor] = []
        self._columns: list[torch.Tensor] = []
        start = 0
        for numel, cut, shape in zip(table.numels, table.cuts, shapes, strict=True):
            padded = cut * table.num_shards
            self.params.append(memory[start : start + numel].view(shape))
            self._columns.append(memory[start : start + padded].view(table.num_shards, cut))
            start += _aligned(padded, memory.element_size())
        self._add_tail(table, memory[start:])

    def _add_tail(self, table: ParameterCutTable, memory: torch.Tensor) -> None:
        """Let what is between rows be copied out too, as a copy of all columns is one kernel."""
        tail = table.row_numel(memory.element_size()) - table.shard_numel
        if tail:
            self._cuts.append(tail)
            self._columns.append(memory[: tail * table.num_shards].view(-1, tail))

    @staticmethod
    def numel_of(table: ParameterCutTable, dtype: torch.dtype) -> int:
        tail = table.row_numel(dtype.itemsize) - table.shard_numel
        cuts = (*table.cuts, tail)
        return sum(_aligned(cut * table.num_shards, dtype.itemsize) for cut in cuts)

    @torch.no_grad()
    def copy_out(self, rows: torch.Tensor) -> None:
        """Fill the parameters from `rows`, `[num_shards * row_numel]`."""
        matrix = rows.view(self._num_shards, -1)
        torch.split_with_sizes_copy(matrix, self._cuts, dim=1, out=self._columns)


def _aligned(numel: int, itemsize: int) -> int:
    unit = max(1, ALIGNMENT_BYTES // itemsize)
    return -(-numel // unit) * unit
