"""Whole parameters put together from the slices of tensor-parallel ranks, by what the client says
of their names.

`universal_checkpoint_info` in a checkpoint lists regular expressions, each matching the beginning
of names; a parameter that none matches is concatenated in dimension 0. Pure. The way back, from a
whole parameter to a slice, is `universal_checkpoint`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

_LISTS = (
    keys.TP_REPLICATED_PARAMETER_PATTERNS,
    keys.PARAMETER_TO_AVERAGE_PATTERNS,
    keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    keys.VOCABULARY_PARAMETER_PATTERNS,
)


class SlicePatterns:
    """How the parameters of a model are sliced.

    Args:
        info: `universal_checkpoint_info`.

    Raises:
        CheckpointError: It is of a later version, or incomplete.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        version = info.get(
            keys.UNIVERSAL_CHECKPOINT_VERSION_KEY, keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE
        )
        if version > keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE:
            raise CheckpointError(
                f"{keys.UNIVERSAL_CHECKPOINT_INFO} has version {version}, known is "
                f"{keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE}"
            )
        self._lists = {
            key: [re.compile(pattern) for pattern in info.get(key) or ()] for key in _LISTS
        }
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

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """The patterns that match none of `names`."""
        patterns = [pattern for listed in self._lists.values() for pattern in listed]
        patterns += [re.compile(pattern) for shape in self._stacked for pattern in shape.patterns]
        return [
            pattern.pattern
            for pattern in patterns
            if not any(pattern.match(name) for name in names)
        ]

    def merged(self, name: str, slices: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The content of a universal checkpoint's file.

        Args:
            name: The parameter.
            slices: What each tensor-parallel rank has, in the parameter's shape.

        Raises:
            CheckpointError: Slices that should be equal differ, or do not fit together.
        """
        if self._is(keys.TP_REPLICATED_PARAMETER_PATTERNS, name):
            differing = [
                rank for rank, part in enumerate(slices) if not torch.equal(part, slices[0])
            ]
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
        for shape in self._stacked:
            if any(re.match(pattern, name) for pattern in shape.patterns):
                return {keys.SUB_PARAM_SHAPE: shape, keys.PARAM: _restacked(name, slices, shape)}
        dim = 1 if self._is(keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS, name) else 0
        whole = _joined(name, slices, dim) if slices[0].dim() else slices[0]
        if not self._is(keys.VOCABULARY_PARAMETER_PATTERNS, name):
            return {keys.CAT_DIM: dim, keys.PARAM: whole}
        # Rows of padding depend on the number of ranks; the words do not.
        return {keys.CAT_DIM: dim, keys.VOCAB_TENSOR: True, keys.PARAM: whole[: self._vocabulary]}

    def _is(self, key: str, name: str) -> bool:
        return any(pattern.match(name) for pattern in self._lists[key])


def _restacked(name: str, slices: Sequence[torch.Tensor], shape: SubparamShape) -> torch.Tensor:
    dim = shape.partition_dim
    sizes = shape.sizes(name, sum(part.shape[dim] for part in slices))
    own = [size // len(slices) for size in sizes]
    if any(size % len(slices) for size in sizes):
        raise CheckpointError(
            f"{name} stacks parameters of sizes {sizes}, which {len(slices)} ranks cannot share "
            "evenly"
        )
    parts = [part.split(own, dim) for part in slices]
    return _joined(name, [part[index] for index in range(len(own)) for part in parts], dim)


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
