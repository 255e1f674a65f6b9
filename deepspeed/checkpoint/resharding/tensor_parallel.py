"""Tensor-parallel slices of a parameter: put together to the whole, and the whole sliced again.

How a parameter is sliced only the client knows: `universal_checkpoint_info` lists regular
expressions, each matching the beginning of names; others are sliced in dimension 0. Slices are of
one size, except where pieces (heads, say) are dealt out unevenly: the first ranks have one more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.files import CheckpointError

_LISTS = (
    keys.TP_REPLICATED_PARAMETER_PATTERNS,
    keys.PARAMETER_TO_AVERAGE_PATTERNS,
    keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    keys.VOCABULARY_PARAMETER_PATTERNS,
)


class Share(NamedTuple):
    """What one rank has of pieces that are dealt out: `own` of `pieces`, from `first`."""

    first: int
    own: int
    pieces: int

    @staticmethod
    def of_rank(pieces: int, rank: int, size: int) -> Share:
        each, more = divmod(pieces, size)
        return Share(rank * each + min(rank, more), each + (rank < more), pieces)

    def of(self, number: int) -> int:
        return number * self.own // self.pieces


@dataclass
class SubparamShape:
    """Parameters that are several stacked in one tensor, each of them sliced by the tensor-parallel
    ranks (fused q, k and v).

    Attributes:
        patterns: Regular expressions that match the beginning of their names.
        shape: Of the whole parameter. At `partition_dim`: the sizes of the stacked ones, or how
            many of equal size there are. -1 elsewhere for any.
        partition_dim: The dimension in which they are stacked and sliced.
    """

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int

    def sizes(self, name: str, whole: int) -> list[int]:
        """Sizes of the stacked parameters in a parameter of `whole` elements in `partition_dim`."""
        declared = self.shape[self.partition_dim]
        if isinstance(declared, int):
            sizes = [whole // declared] * declared if declared > 0 else [whole]
        else:
            sizes = list(declared)
        if sum(sizes) != whole:
            raise CheckpointError(
                f"{name} has {whole} elements in dimension {self.partition_dim}; "
                f"{keys.PARAMETER_WITH_SUB_PARAMS} says {declared}"
            )
        return sizes


# The class that files name, by the path under which upstream has it.
SubparamShape.__module__ = "deepspeed.checkpoint.universal_checkpoint"


class SlicePatterns:
    """How the parameters of a model are sliced."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        version = info.get(
            keys.UNIVERSAL_CHECKPOINT_VERSION_KEY, keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE
        )
        if version > keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE:
            raise CheckpointError(
                f"{keys.UNIVERSAL_CHECKPOINT_INFO} has version {version}, known is "
                f"{keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE}"
            )
        self._lists = {key: [re.compile(text) for text in info.get(key) or ()] for key in _LISTS}
        self._vocabulary = info.get(keys.ORIGINAL_VOCAB_SIZE)
        if self._lists[keys.VOCABULARY_PARAMETER_PATTERNS] and self._vocabulary is None:
            raise CheckpointError(
                f"{keys.UNIVERSAL_CHECKPOINT_INFO} has {keys.VOCABULARY_PARAMETER_PATTERNS} but no "
                f"{keys.ORIGINAL_VOCAB_SIZE}, so rows of padding cannot be told from words"
            )
        self._stacked = [
            shape if isinstance(shape, SubparamShape) else SubparamShape(**shape)
            for shape in info.get(keys.PARAMETER_WITH_SUB_PARAMS) or ()
        ]
        self._dealt = [
            ([re.compile(pattern) for pattern in dealt["patterns"]], int(dealt[keys.PIECES]))
            for dealt in info.get(keys.PARAMETER_WITH_PIECES) or ()
        ]

    def unmatched(self, names: Sequence[str]) -> list[str]:
        patterns = [pattern for listed in self._lists.values() for pattern in listed]
        patterns += [re.compile(pattern) for shape in self._stacked for pattern in shape.patterns]
        patterns += [pattern for listed, _ in self._dealt for pattern in listed]
        return [regex.pattern for regex in patterns if not any(regex.match(name) for name in names)]

    def merged(self, name: str, slices: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The content of a universal checkpoint's file."""
        if self._is(keys.TP_REPLICATED_PARAMETER_PATTERNS, name):
            differing = [rank for rank, own in enumerate(slices) if not torch.equal(own, slices[0])]
            if differing:
                raise CheckpointError(
                    f"{name} is in {keys.TP_REPLICATED_PARAMETER_PATTERNS}, but tensor-parallel "
                    f"ranks 0 and {differing[0]} differ"
                )
            return {keys.PARAM: slices[0]}
        if self._is(keys.PARAMETER_TO_AVERAGE_PATTERNS, name):
            return {
                keys.PARAM: slices[0]
                if len(slices) == 1
                else sum(slices[1:], start=slices[0]) / len(slices)
            }
        if self._is(keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0, name):
            halves = [part.chunk(2) for part in slices]
            whole = _joined(name, [half[index] for index in range(2) for half in halves], 0)
            return {keys.CAT_DIM: 0, keys.PARAM_N_SUB_PARAMS: 2, keys.PARAM: whole}
        pieces = self._pieces(name)
        dealt = {} if pieces is None else {keys.PIECES: pieces}
        shape = self._stack(name)
        if shape is not None:
            whole = _restacked(name, slices, shape, pieces or len(slices))
            return {keys.SUB_PARAM_SHAPE: shape, **dealt, keys.PARAM: whole}
        dim = self._dim(name)
        whole = _joined(name, slices, dim) if slices[0].dim() else slices[0]
        if not self._is(keys.VOCABULARY_PARAMETER_PATTERNS, name):
            return {keys.CAT_DIM: dim, **dealt, keys.PARAM: whole}
        # Rows of padding depend on the number of ranks; the words do not.
        return {keys.CAT_DIM: dim, keys.VOCAB_TENSOR: True, keys.PARAM: whole[: self._vocabulary]}

    def shapes(self, name: str, own: torch.Size, rank: int, size: int) -> list[torch.Size]:
        """Return those of a parameter's slices; one of `size` ranks has one of shape `own`."""
        pieces = self._pieces(name)
        if pieces is None:
            return [own] * size
        shape = self._stack(name)
        dim = self._dim(name) if shape is None else shape.partition_dim
        shares = [Share.of_rank(pieces, other, size) for other in range(size)]
        of_piece = own[dim] // shares[rank].own
        return [torch.Size((*own[:dim], share.own * of_piece, *own[dim + 1 :])) for share in shares]

    def _is(self, key: str, name: str) -> bool:
        return any(pattern.match(name) for pattern in self._lists[key])

    def _stack(self, name: str) -> SubparamShape | None:
        named = (
            one for one in self._stacked if any(re.match(pattern, name) for pattern in one.patterns)
        )
        return next(named, None)

    def _dim(self, name: str) -> int:
        return int(self._is(keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS, name))

    def _pieces(self, name: str) -> int | None:
        named = (
            pieces for patterns, pieces in self._dealt if any(one.match(name) for one in patterns)
        )
        return next(named, None)


def _restacked(
    name: str, slices: Sequence[torch.Tensor], shape: SubparamShape, pieces: int
) -> torch.Tensor:
    dim = shape.partition_dim
    sizes = shape.sizes(name, sum(part.shape[dim] for part in slices))
    if any(size % pieces for size in sizes):
        raise CheckpointError(
            f"{name} stacks parameters of sizes {sizes}, of which {len(slices)} ranks cannot share "
            f"{pieces} pieces"
        )
    shares = [Share.of_rank(pieces, rank, len(slices)) for rank in range(len(slices))]
    parts = [
        part.split([share.of(size) for size in sizes], dim)
        for part, share in zip(slices, shares, strict=True)
    ]
    return _joined(name, [part[index] for index in range(len(sizes)) for part in parts], dim)


def _joined(name: str, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    try:
        return torch.cat(list(parts), dim)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise CheckpointError(
            f"{name}: slices of shapes {shapes} cannot be concatenated in dimension {dim}: {error}"
        ) from error


def slice_of_rank(
    name: str, entry: Mapping[str, Any], shape: Sequence[int], rank: int, size: int
) -> torch.Tensor:
    """The part of a parameter that one of `size` ranks holds; a view where that is possible."""
    whole: torch.Tensor = entry[keys.PARAM]
    share = Share.of_rank(entry.get(keys.PIECES, size), rank, size)
    if keys.SUB_PARAM_SHAPE in entry:
        sub = entry[keys.SUB_PARAM_SHAPE]
        dim = sub.partition_dim
        own = own_slice(name, whole, sub.sizes(name, whole.shape[dim]), dim, share)
    elif whole.shape == torch.Size(shape):
        return whole  # every rank holds all of it
    elif keys.PARAM_N_SUB_PARAMS in entry:
        dim = entry[keys.CAT_DIM]
        count = entry[keys.PARAM_N_SUB_PARAMS]
        own = own_slice(name, whole, [whole.shape[dim] // count] * count, dim, share)
    elif keys.CAT_DIM in entry:
        dim = entry[keys.CAT_DIM]
        if entry.get(keys.VOCAB_TENSOR):
            whole = _padded(whole, shape, size)
        own = own_slice(name, whole, [whole.shape[dim]], dim, share)
    else:
        own = whole
    if own.shape != torch.Size(shape):
        raise CheckpointError(
            f"{name} has shape {tuple(whole.shape)} in the checkpoint; sliced for {size} "
            f"tensor-parallel ranks that is {tuple(own.shape)}, this model's is {tuple(shape)}. It "
            f"is of another model, or {keys.UNIVERSAL_CHECKPOINT_INFO} of the run that saved it "
            f"does not say how {name} is sliced"
        )
    return own


def own_slice(
    name: str, whole: torch.Tensor, sizes: Sequence[int], dim: int, share: Share
) -> torch.Tensor:
    """One rank's part of each of the tensors stacked in `whole`; a view if there is one."""
    uneven = [number for number in sizes if number % share.pieces]
    if uneven:
        raise CheckpointError(
            f"{name} has {uneven[0]} elements to slice in dimension {dim}, which {share.pieces} "
            "ranks or pieces cannot share evenly"
        )
    if dim >= whole.dim():
        raise CheckpointError(
            f"{name} has shape {tuple(whole.shape)}, so it cannot be sliced in dimension {dim}"
        )
    own = [
        part.narrow(dim, share.first * (part.shape[dim] // share.pieces), share.of(part.shape[dim]))
        for part in whole.split(list(sizes), dim)
    ]
    return own[0] if len(own) == 1 else torch.cat(own, dim)


def _padded(whole: torch.Tensor, shape: Sequence[int], size: int) -> torch.Tensor:
    """A vocabulary with rows of zeros after its own, as many as `size` ranks have room for."""
    missing = shape[0] * size - whole.shape[0]
    return whole if missing <= 0 else torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
