"""Flat argument lists under upstream's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.saved_inputs import (
    get_partition_size,
    is_activation_to_checkpoint,
    part_of,
    whole_of,
)


def extract_tensors(
    all_objects: Sequence[Any],
) -> tuple[Sequence[torch.Tensor], Sequence[Any], Sequence[bool]]:
    """Take the tensors of a tuple or list apart from the rest; `merge_tensors` puts them together.

    Returns:
        Tensors, other objects, and for each object whether it is a tensor, each of the given type.
    """
    flags = [isinstance(item, torch.Tensor) for item in all_objects]
    tensors = [item for item, is_tensor in zip(all_objects, flags, strict=True) if is_tensor]
    others = [item for item, is_tensor in zip(all_objects, flags, strict=True) if not is_tensor]
    if isinstance(all_objects, tuple):
        return tuple(tensors), tuple(others), tuple(flags)
    return tensors, others, flags


def merge_tensors(
    tensor_objects: Sequence[torch.Tensor],
    non_tensor_objects: Sequence[Any],
    tensor_flags: Sequence[bool],
) -> tuple[Any, ...]:
    """Put together what `extract_tensors` took apart."""
    tensors, others = iter(tensor_objects), iter(non_tensor_objects)
    return tuple(next(tensors) if is_tensor else next(others) for is_tensor in tensor_flags)


def detach_variable(
    inputs: tuple[Any, ...], device: torch.device | str | None = None
) -> tuple[Any, ...]:
    """Cut each tensor of a tuple off from its graph, on `device` if given, requiring a gradient if
    it did; other objects stay.
    """
    if not isinstance(inputs, tuple):
        raise RuntimeError(
            "detach_variable: expected a tuple of tensors and other objects, got "
            f"{type(inputs).__name__}"
        )
    return tuple(_detached(x, device) if isinstance(x, torch.Tensor) else x for x in inputs)


def _detached(tensor: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    moved = tensor if device is None else tensor.to(device)
    return moved.detach().requires_grad_(tensor.requires_grad)


def partition_activations(
    args: Sequence[Any], cpu_checkpoint: bool, contiguous_checkpoint: bool
) -> list[Any]:
    """Take this rank's part ([partition size], padded) of each activation of `args`, into host
    memory or out of one buffer per dtype if asked; others stay.
    """
    activations = [item for item in args if is_activation_to_checkpoint(item)]
    sizes = [get_partition_size(item) for item in activations]
    if contiguous_checkpoint:
        parts = iter(_blocks(activations, sizes))
    else:
        sized = zip(activations, sizes, strict=True)
        parts = iter([torch.empty(n, dtype=a.dtype, device=a.device) for a, n in sized])
    saved: list[Any] = []
    for item in args:
        if not is_activation_to_checkpoint(item):
            saved.append(item)
            continue
        part = part_of(item.detach().reshape(-1), next(parts))
        saved.append(part.to("cpu") if cpu_checkpoint else part)
    return saved


def _blocks(activations: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    blocks: dict[int, torch.Tensor] = {}
    for kind in {(item.dtype, item.device) for item in activations}:
        chosen = [i for i, item in enumerate(activations) if (item.dtype, item.device) == kind]
        buffer = torch.empty(sum(sizes[i] for i in chosen), dtype=kind[0], device=kind[1])
        blocks.update(zip(chosen, buffer.split([sizes[i] for i in chosen]), strict=True))
    return [blocks[i] for i in range(len(activations))]


def get_partitioned_activations_for_backward(
    args: Sequence[Any], inputs: Sequence[Any], contiguous_checkpoint: bool
) -> list[Any]:
    """List what to save of `args`, given their parts `inputs`: two entries each, the part and its
    whole shape; other objects with None.
    """
    saved: list[Any] = []
    for item, part in zip(args, inputs, strict=True):
        saved += (
            [part, torch.tensor(item.shape)] if is_activation_to_checkpoint(item) else [item, None]
        )
    return saved


def gather_partitioned_activations(
    tensors: Sequence[Any], device: torch.device | str | None = None
) -> tuple[Any, ...]:
    """Gather inputs from pairs of a part and its whole shape, or of an object and None, on `device`
    (None is the accelerator). Collective over the tensor-parallel group.
    """
    target = torch.device(get_accelerator().current_device_name() if device is None else device)
    whole = []
    for item, shape in zip(tensors[::2], tensors[1::2], strict=True):
        if shape is None or not isinstance(item, torch.Tensor):
            whole.append(item)
            continue
        size = torch.Size(shape.tolist())
        flat = whole_of(item.detach().to(target), size.numel())
        whole.append(flat.view(size).requires_grad_(item.requires_grad))
    return tuple(whole)


def get_cpu_activations_for_backward(args: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """List the copies on the host of `args`, requiring gradients as these do."""
    return [
        copy.detach().requires_grad_(item.requires_grad)
        if is_activation_to_checkpoint(item)
        else item
        for item, copy in zip(args, inputs, strict=True)
    ]


def get_offloaded_activations_for_backward(args: Sequence[Any], engine: Any) -> list[Any]:
    """Replace each activation by what `engine.offload_input(activation)` returns."""
    return [engine.offload_input(x) if is_activation_to_checkpoint(x) else x for x in args]


def restore_offloaded_activations(tensors: Sequence[Any], engine: Any) -> tuple[Any, ...]:
    """Replace each tensor by what `engine.restore_input(tensor)` returns."""
    return tuple(
        engine.restore_input(item) if isinstance(item, torch.Tensor) else item for item in tensors
    )
