"""A whole parameter of a universal checkpoint, and the slice of it that a tensor-parallel rank
holds.

A file of a universal checkpoint is a dictionary with the whole tensor and how it is cut;
`tensor_slices` puts such dictionaries together, here they are cut. Pure, but for the two names of
upstream's that let a client load one parameter by hand.
"""

from __future__ import annotations

import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.file_names import parse_state_file, state_file
from deepspeed.checkpoint.files import CheckpointError, read_file
from deepspeed.utils.tensor_fragment import safe_set_full_fp32_param, safe_set_full_optimizer_state


@dataclass
class SubparamShape:
    """Parameters that are several stacked in one tensor, each of them cut by the tensor-parallel
    ranks (fused q, k and v).

    Attributes:
        patterns: Regular expressions that match the beginning of their names.
        shape: Of the whole parameter. At `partition_dim`: the sizes of the stacked ones, or how
            many of equal size there are. -1 elsewhere for any.
        partition_dim: The dimension in which they are stacked and cut.
    """

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int

    def sizes(self, name: str, whole: int) -> list[int]:
        """Sizes of the stacked parameters in a parameter of `whole` elements in `partition_dim`.

        Raises:
            CheckpointError: They are not that many.
        """
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


def enable_universal_checkpoint(param_list: Sequence[nn.Parameter]) -> None:
    """Give each parameter the method `load_hp_checkpoint_state`."""
    for param in param_list:
        param.load_hp_checkpoint_state = types.MethodType(load_hp_checkpoint_state, param)  # type: ignore[attr-defined]


def load_hp_checkpoint_state(
    self: nn.Parameter,
    folder: str,
    tp_rank: int,
    tp_world_size: int,
    ep_rank: int = 0,
    ep_size: int = 1,
) -> Any:
    """Load a parameter, its master weight and its optimizer state from its folder.
    `load_checkpoint` does so for all of them.

    Args:
        self: The parameter, of an engine that keeps master weights and has taken a step (there is
            no state before).
        folder: `<checkpoint>/zero/<name>`.
        tp_rank: This rank's number among those that hold slices of the parameter.
        tp_world_size: How many there are.
        ep_rank: No effect: experts have folders of their own here.
        ep_size: As `ep_rank`.

    Returns:
        The step count; None if the folder has none.

    Raises:
        CheckpointError: A file is missing or damaged, or does not fit the parameter.
        KeyError: The optimizer has no such state.
    """
    if (ep_rank, ep_size) != (0, 1):
        raise ValueError(
            f"ep_rank {ep_rank}, ep_size {ep_size}: each expert has a folder of its own; give "
            "that, and 0 and 1"
        )
    step = None
    for slot in slots_in(folder):
        content = read_file(os.path.join(folder, state_file(slot)))
        if not isinstance(content, Mapping):
            step = content
            continue
        own = own_slice(os.path.basename(folder), content, self.shape, tp_rank, tp_world_size)
        if slot == keys.FP32_WEIGHT_KEY:
            safe_set_full_fp32_param(self, own)
        else:
            safe_set_full_optimizer_state(self, own, slot)
    return step


def slots_in(folder: str) -> list[str]:
    """The kinds of state in a parameter's folder.

    Raises:
        CheckpointError: There is no such folder.
    """
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"{folder} does not exist: the universal checkpoint has no such parameter"
        )
    return sorted(filter(None, map(parse_state_file, os.listdir(folder))))


def own_slice(
    name: str, entry: Mapping[str, Any], shape: Sequence[int], rank: int, size: int
) -> torch.Tensor:
    """The part of a parameter that one of `size` tensor-parallel ranks holds; a view of it where
    that is possible.

    Args:
        name: The parameter, for errors.
        entry: The whole tensor and how it is cut, as in a file of a universal checkpoint.
        shape: Of the part.
        rank: Whose.
        size: Number of ranks.

    Raises:
        CheckpointError: The part has another shape.
    """
    whole: torch.Tensor = entry[keys.PARAM]
    if keys.SUB_PARAM_SHAPE in entry:
        sub = entry[keys.SUB_PARAM_SHAPE]
        dim = sub.partition_dim
        own = _of_each(name, whole, sub.sizes(name, whole.shape[dim]), dim, rank, size)
    elif whole.shape == torch.Size(shape):
        return whole  # every rank holds all of it
    elif keys.PARAM_N_SUB_PARAMS in entry:
        dim = entry[keys.CAT_DIM]
        count = entry[keys.PARAM_N_SUB_PARAMS]
        own = _of_each(name, whole, [whole.shape[dim] // count] * count, dim, rank, size)
    elif keys.CAT_DIM in entry:
        dim = entry[keys.CAT_DIM]
        if entry.get(keys.VOCAB_TENSOR):
            whole = _padded(whole, shape, size)
        own = _of_each(name, whole, [whole.shape[dim]], dim, rank, size)
    else:
        own = whole
    if own.shape != torch.Size(shape):
        raise CheckpointError(
            f"{name} has shape {tuple(whole.shape)} in the checkpoint; cut for {size} "
            f"tensor-parallel ranks that is {tuple(own.shape)}, this model's is {tuple(shape)}. It "
            f"is of another model, or {keys.UNIVERSAL_CHECKPOINT_INFO} of the run that saved it "
            f"does not say how {name} is cut"
        )
    return own


def _of_each(
    name: str, whole: torch.Tensor, sizes: Sequence[int], dim: int, rank: int, size: int
) -> torch.Tensor:
    """One rank's part of each of the tensors stacked in `whole`."""
    uneven = [number for number in sizes if number % size]
    if uneven:
        raise CheckpointError(
            f"{name} has {uneven[0]} elements to cut in dimension {dim}, which {size} ranks cannot "
            "share evenly"
        )
    if dim >= whole.dim():
        raise CheckpointError(
            f"{name} has shape {tuple(whole.shape)}, so it cannot be cut in dimension {dim}"
        )
    own = [part.chunk(size, dim)[rank] for part in whole.split(list(sizes), dim)]
    return own[0] if len(own) == 1 else torch.cat(own, dim)


def _padded(whole: torch.Tensor, shape: Sequence[int], size: int) -> torch.Tensor:
    """A vocabulary with rows of zeros after its own, as many as `size` ranks have room for."""
    missing = shape[0] * size - whole.shape[0]
    return whole if missing <= 0 else torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
