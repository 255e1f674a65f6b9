"""Which memory an aten operator reads, writes and views, from its schema; what that doesn't say is
in a table here. Shared by the simulated device and by tracing on real streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import product
from math import prod
from typing import Any

import torch

# More pieces than this become fewer, larger ones: exact for columns and halves, bounded for strides
# through a whole matrix.
MAX_INTERVALS = 64

# Aliases of their input although the schema promises fresh memory.
_UNDECLARED_VIEWS = {
    "aten::_unsafe_view",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes",
    "aten::unsafe_chunk",
}

# Arguments that are written although the schema doesn't say so.
_BATCH_NORM_STATISTICS = ("running_mean", "running_var")
_UNDECLARED_WRITES: dict[str, tuple[str, ...]] = {
    "aten::native_batch_norm": _BATCH_NORM_STATISTICS,
    "aten::cudnn_batch_norm": _BATCH_NORM_STATISTICS,
    "aten::miopen_batch_norm": _BATCH_NORM_STATISTICS,
}


@cache
def is_view(func: Any) -> bool:
    """Whether the operator touches no memory: results alias arguments, or only sizes change."""
    if func._schema.name in _UNDECLARED_VIEWS or torch.Tag.inplace_view in func.tags:
        return True
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


@cache
def written_names(func: Any) -> tuple[str, ...]:
    """The operator's arguments that it writes."""
    aliases = ((argument.name, argument.alias_info) for argument in func._schema.arguments)
    declared = tuple(name for name, alias in aliases if alias is not None and alias.is_write)
    return declared + _UNDECLARED_WRITES.get(func._schema.name, ())


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """The tensors of nested lists, tuples and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


@cache
def _argument_names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


def arguments(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that were given, by name."""
    given = dict(zip(_argument_names(func), args, strict=False))
    given.update(kwargs)
    return given


def writes(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors among the arguments that the operator writes, and perhaps reads."""
    names = written_names(func)
    given = arguments(func, args, kwargs) if names else {}
    return [tensor for name in names for tensor in tensors_in(given.get(name))]


def reads(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors among the arguments that the operator only reads."""
    names = written_names(func)
    given = arguments(func, args, kwargs)
    return list(tensors_in([value for name, value in given.items() if name not in names]))


def byte_intervals(tensor: torch.Tensor, limit: int = MAX_INTERVALS) -> list[tuple[int, int]]:
    """The bytes of its storage that a strided tensor covers, as disjoint ascending half-open
    intervals: at most about `limit`, some of which then cover gaps.
    """
    width, first = tensor.element_size(), int(tensor.storage_offset())
    relative = _element_intervals(tensor.shape, tensor.stride(), limit)
    return [((first + low) * width, (first + high) * width) for low, high in relative]


@lru_cache(maxsize=4096)
def _element_intervals(
    shape: tuple[int, ...], strides: tuple[int, ...], limit: int
) -> list[tuple[int, int]]:
    """Compute `byte_intervals` in elements from the first one."""
    if 0 in shape:
        return []
    run = 1
    outer: list[tuple[int, int]] = []
    moving = [(s, n) for s, n in zip(strides, shape, strict=True) if n > 1 and s > 0]
    for stride, size in sorted(moving):
        if stride <= run and not outer:
            run += stride * (size - 1)
        else:
            outer.append((stride, size))
    while outer and prod(size for _, size in outer) > limit:
        stride, size = outer.pop(0)
        run += stride * (size - 1)
    steps = [range(0, stride * size, stride) for stride, size in outer]
    starts = sorted(map(sum, product(*steps)))
    merged: list[tuple[int, int]] = []
    for start in starts:
        low, high = start, start + run
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged
