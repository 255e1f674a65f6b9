"""Small functions that upstream has beside its own helpers and that scripts import:
`deepspeed.runtime.utils` is their path. Nothing of this package calls them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.shard_ops import gather_shapes
from deepspeed.runtime.sharding.model_ranks import norm_selection
from deepspeed.runtime.utils import move_to_device, partition_uniform, see_memory_usage
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank

# Norms


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Compute the 2-norm of a whole from the 2-norms of its parts."""
    return float(sum(norm**2 for norm in norm_list)) ** 0.5


def get_global_norm_of_tensors(
    input_tensors: Sequence[torch.Tensor],
    norm_type: float = 2,
    mpu: Any = None,
    use_graph: bool = False,
    moe_ep_group: Any = None,
) -> torch.Tensor:
    """Measure all elements, 0-d fp32, over the model-parallel and the expert ranks too.

    Args:
        input_tensors: What to measure.
        norm_type: 2, or infinity for the largest absolute value.
        mpu: Knows the model-parallel group; None: there is none.
        use_graph: Not supported.
        moe_ep_group: Ranks that hold other experts; None: there are none.
    """
    if norm_type not in (2, float("inf")) or use_graph:
        raise ValueError(
            f"get_global_norm_of_tensors(norm_type={norm_type}, use_graph={use_graph}): give 2 or "
            "infinity, and no graph"
        )
    parts = [torch.linalg.vector_norm(t, norm_type, dtype=torch.float32) for t in input_tensors]
    norm = torch.linalg.vector_norm(torch.stack(parts), norm_type) if parts else torch.zeros(())
    squares = norm.square() if norm_type == 2 else norm
    reduction = dist.ReduceOp.SUM if norm_type == 2 else dist.ReduceOp.MAX
    model_group = None if mpu is None else mpu.get_model_parallel_group()
    for group in (model_group, moe_ep_group):
        if group is not None:
            dist.all_reduce(squares, op=reduction, group=group)
    return squares.sqrt() if norm_type == 2 else squares


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: Any = None,
    mpu: Any = None,
    eps: float = 1e-6,
    use_graph: bool = False,
) -> Any:
    """Scale tensors in place so that their norm is at most `max_norm`; returns what it was."""
    if global_norm is None:
        global_norm = get_global_norm_of_tensors(input_tensors, mpu=mpu, use_graph=use_graph)
    factor = max_norm / (float(global_norm) + eps)
    if factor < 1:
        for tensor in input_tensors:
            tensor.detach().mul_(factor)
    return global_norm


def _norm_of_parameters(
    parameters: Any, values: Callable[[Any], Any], norm: float, mpu: Any
) -> float:
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if mpu is not None:  # what other ranks have too counts on the first
        params = list(filter(norm_selection(bwc_tensor_model_parallel_rank(mpu)), params))
    chosen = [values(param) for param in params if values(param) is not None]
    return float(get_global_norm_of_tensors(chosen, norm, mpu))


def get_flattened_grad_norm(
    parameters: Any, norm_type: float = 2, mpu: Any = None, grad_norm_mask: Any = None
) -> float:
    """Measure `param.grad` of all parameters, over the model-parallel ranks too; `grad_norm_mask`
    belongs to upstream's flat buffers and is refused.
    """
    if grad_norm_mask is not None:
        raise ValueError("get_flattened_grad_norm(grad_norm_mask=...): leave it out")
    return _norm_of_parameters(parameters, lambda param: param.grad, norm_type, mpu)


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Measure the parameters themselves, over the model-parallel ranks too."""
    return _norm_of_parameters(parameters, lambda param: param.detach(), norm_type, mpu)


class CheckOverflow:
    """Looks for gradients that are not finite in a list of lists of parameters, on this rank and
    those of `mpu`'s model-parallel group (None: all).
    """

    def __init__(
        self,
        param_groups: Any = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.mpu = mpu
        self.params = [param for group in param_groups or () for param in group]

    def check(self, param_groups: Any = None) -> bool:
        """Tell whether any gradient, of `param_groups` or those given to the constructor, is not
        finite on some rank. Collective.
        """
        given = [self.params] if param_groups is None else param_groups
        return self.has_overflow([param for group in given for param in group])

    def has_overflow_serial(self, params: Iterable[torch.Tensor]) -> bool:
        """Tell the same of this rank alone."""
        return any(
            bool(self._has_inf_or_nan(param.grad, index))
            for index, param in enumerate(params)
            if param.grad is not None
        )

    def has_overflow(
        self, params: Iterable[torch.Tensor], has_moe_params: bool | None = None
    ) -> bool:
        return self._on_any_rank(self.has_overflow_serial(params))

    def _on_any_rank(self, own: bool) -> bool:
        flag = torch.tensor(float(own), device=get_accelerator().current_device_name())
        if dist.is_initialized():
            group = None if self.mpu is None else self.mpu.get_model_parallel_group()
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    def check_using_norm(self, norm_group: Iterable[float], reduce_overflow: bool = True) -> bool:
        """Tell whether a norm is not finite, or -1, as upstream writes that; with `reduce_overflow`
        on any rank, and collective.
        """
        own = any(norm == -1 or not math.isfinite(norm) for norm in norm_group)
        return self._on_any_rank(own) if reduce_overflow else own

    @staticmethod
    def _has_inf_or_nan(x: torch.Tensor, i: int) -> torch.Tensor:
        return ~torch.isfinite(x.float()).all()


# Tensors


class PartitionedTensor:
    """A tensor, equal on all ranks of a group, of which each keeps an equal part."""

    def __init__(self, tensor: torch.Tensor, group: Any, partition_meta: Any = None) -> None:
        if partition_meta is not None:
            raise ValueError("PartitionedTensor(partition_meta=...): use from_meta")
        self.group = group
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orig_size = list(tensor.shape)
        self.orig_device = tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        first, last = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[first:last].clone()

    @classmethod
    def from_meta(
        cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: Any = "cpu"
    ) -> PartitionedTensor:
        """Make what `to_meta` and `data` describe, in a group of as many ranks."""
        numbers = [int(number) for number in meta.tolist()]
        dims, rest = numbers[0], numbers[1:]
        made = cls.__new__(cls)
        made.group = group
        made.orig_size, (made.num_parts, made.rank) = rest[:dims], rest[dims : dims + 2]
        made.partition = rest[dims + 2 :]
        made.orig_device = torch.device(device)
        made.local_data = local_part.detach()
        if made.num_parts != dist.get_world_size(group):
            raise ValueError(
                f"PartitionedTensor.from_meta: {made.num_parts} parts, but the group has "
                f"{dist.get_world_size(group)} ranks"
            )
        return made

    def to_meta(self) -> torch.Tensor:
        """int64: number of dimensions, sizes, number of parts, this rank, the parts' boundaries."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.int64, device=self.local_data.device)

    def full(self, device: Any = None) -> torch.Tensor:
        """Gather the whole. All ranks of the group call it."""
        bounds = zip(self.partition, self.partition[1:], strict=False)
        shapes = [torch.Size((end - start,)) for start, end in bounds]
        flat = torch.cat(gather_shapes(self.local_data, shapes, self.group))
        return flat.view(self.orig_size).to(device or self.orig_device)

    def data(self) -> torch.Tensor:
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.size()

    def full_size(self) -> list[int]:
        return self.orig_size


def align_dense_tensors(tensor_list: Sequence[torch.Tensor], alignment: int) -> list[torch.Tensor]:
    """Add a tensor of zeros if the sum of the elements is no multiple of `alignment`."""
    missing = -sum(tensor.numel() for tensor in tensor_list) % alignment
    return [*tensor_list, tensor_list[0].new_zeros(missing)] if missing else list(tensor_list)


def mask_nan_or_inf_with_val_inplace(
    input: torch.Tensor, device: Any = None, val: float = -1.0
) -> None:
    """Overwrite what is not finite with `val`, on the device where `input` is."""
    input.masked_fill_(~torch.isfinite(input), val)


def get_tensor_bytes(item: Any) -> int:
    """Count the bytes of all tensors in nested lists, tuples and dicts."""
    if isinstance(item, torch.Tensor):
        return item.numel() * item.element_size()
    inner = item.values() if isinstance(item, dict) else item
    nested = isinstance(item, (dict, list, tuple))
    return sum(get_tensor_bytes(value) for value in inner) if nested else 0


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Tell whether two lists or dicts have equal tensors and equal values at the same places."""
    if isinstance(inputs1, torch.Tensor) and isinstance(inputs2, torch.Tensor):
        return torch.equal(inputs1, inputs2.to(inputs1.device))
    if isinstance(inputs1, dict) and isinstance(inputs2, dict):
        return inputs1.keys() == inputs2.keys() and all(
            compare_tensors_in_structures(value, inputs2[key]) for key, value in inputs1.items()
        )
    if isinstance(inputs1, (list, tuple)) and isinstance(inputs2, (list, tuple)):
        return len(inputs1) == len(inputs2) and all(
            compare_tensors_in_structures(one, other)
            for one, other in zip(inputs1, inputs2, strict=True)
        )
    return bool(inputs1 == inputs2)


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """Copy nested lists, tuples and dicts; what the criterion chooses to `device`, detached."""
    moved = move_to_device(item, device, criterion_func)

    def own(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    return torch.utils._pytree.tree_map(own, moved)


def maybe_loss_for_backward(value: Any) -> bool:
    """Tell whether it may be a loss: a tensor of one element that something made."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.grad_fn is not None


# Parameters


def filter_empty_parameters(params: Any) -> Any:
    """Take parameters of no elements out of a list of parameters, or of optimizer groups."""
    listed = list(params)
    if listed and isinstance(listed[0], dict):
        return [{**group, "params": filter_empty_parameters(group["params"])} for group in listed]
    return [param for param in listed if param.numel()]


class DummyOptim:
    """Looks like an optimizer of one group, and does nothing; for code that asks for groups."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


# Reports


def get_ma_status() -> int:
    """Tell how many bytes tensors have allocated on the device; 0 on ranks other than the first."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return 0
    return int(get_accelerator().memory_allocated())


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Print the memory in use, as `see_memory_usage` on the first rank; others are refused."""
    if print_rank not in (-1, 0):
        raise ValueError(f"memory_status(print_rank={print_rank}): the first rank prints; give 0")
    see_memory_usage(msg, force=True)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Write `base(args, name=value)`."""
    told = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{base}({', '.join(told)})"


# Python


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return what all items are equal to; a RuntimeError if they differ, or there is none."""
    unique = set(items)
    if len(unique) != 1:
        raise RuntimeError(f"expected one unique item, got {sorted(map(repr, unique))}")
    return unique.pop()


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Make the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def get_checkpoint_folder_size(save_dir: str, tag: str, local_rank: int | None = None) -> int:
    """Count the bytes of a checkpoint's files, as this process sees them; any `local_rank`."""
    return sum(path.stat().st_size for path in Path(save_dir, tag).rglob("*") if path.is_file())


class noop_context:  # noqa: N801  # upstream's name
    """A `with` block that does nothing."""

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, *error: object) -> None:
        """Nothing."""


def noop_decorator(func: Any) -> Any:
    """Return `func` itself."""
    return func
