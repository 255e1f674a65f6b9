"""Small helpers of the runtime that clients import too."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed._lazy import lazy_attributes
from deepspeed.accelerator import get_accelerator, runs_ahead
from deepspeed.comm.watch.operation_log import print_rank_0
from deepspeed.runtime.gradients.norm import clip_factor, local_squared_norm, reduce_squared_norm
from deepspeed.runtime.sharding.model_ranks import (
    is_model_parallel_parameter as is_model_parallel_parameter,  # upstream's path of it
)
from deepspeed.runtime.sharding.model_ranks import norm_selection
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from deepspeed.utils.timer import device_memory

# More of upstream's names, which scripts import from here.
__getattr__ = lazy_attributes(
    __name__,
    dict.fromkeys(
        """
            CheckOverflow DummyOptim PartitionedTensor align_dense_tensors call_to_str
            clip_tensors_by_global_norm compare_tensors_in_structures copy_to_device
            ensure_directory_exists filter_empty_parameters get_checkpoint_folder_size
            get_flattened_grad_norm get_global_norm get_global_norm_of_tensors get_ma_status
            get_only_unique_item get_tensor_bytes get_weight_norm
            mask_nan_or_inf_with_val_inplace maybe_loss_for_backward memory_status noop_context
            noop_decorator
        """.split(),
        "deepspeed.runtime.script_helpers",
    )
    | dict.fromkeys(
        ("offload_adam_states", "reload_adam_states"), "deepspeed.runtime.zero.offload_states"
    ),
)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists, tuples, dicts and dataclass-like objects (not nested)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, type)):
        for item in vars(value).values():
            if isinstance(item, (torch.Tensor, list, tuple, dict)):
                yield from tensors_in(item)


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Move every tensor (or what `criterion_func` chooses) in nested containers to `device`.

    The host does not wait for copies from page-locked memory to a device: what lies there must not
    be overwritten before they are done (a data loader's batches are not).
    """
    if criterion_func(item) if criterion_func is not None else hasattr(item, "to"):
        if isinstance(item, torch.Tensor) and torch.device(device).type != "cpu":
            return item.to(device, non_blocking=True)
        return item.to(device)
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    return item


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch on all devices."""
    import numpy  # startup: only needed here

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2,
    mpu: Any = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_`, over `mpu`'s model-parallel ranks too if given.

    Returns:
        The norm before clipping, 0-d.
    """
    if mpu is None:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    if norm_type != 2:
        raise ValueError(
            f"clip_grad_norm_(norm_type={norm_type}, mpu=...): only the 2-norm is supported across "
            "ranks"
        )
    params: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    counts = norm_selection(bwc_tensor_model_parallel_rank(mpu))
    owned = [p.grad for p in params if p.grad is not None and counts(p)]
    device = params[0].device
    norm = (
        reduce_squared_norm(local_squared_norm(owned, device), mpu.get_model_parallel_group())
        .sqrt_()
        .squeeze()
    )
    known: Any = norm if runs_ahead(norm) else norm.item()
    factor = clip_factor(known, max_norm)
    for param in params:
        if param.grad is not None:
            param.grad.mul_(factor)
    return norm


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print device and host memory on rank 0, in GB (2**30 bytes); nothing without `force`, so that
    calls can stay in a script.

    MA is allocated by tensors, CA what the allocator holds; each with its largest value since the
    last call, which starts anew. The host's line is the machine's, not this process's.

    Args:
        message: What has just happened.
        force: Do print.
    """
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    import psutil  # startup: only needed here

    numbers = dict(zip(("MA", "Max_MA", "CA", "Max_CA"), device_memory(), strict=True))
    get_accelerator().reset_peak_memory_stats()
    device = "  ".join(f"{name} {value / 2**30:.2f} GB" for name, value in numbers.items())
    host = psutil.virtual_memory()
    used = f"CPU Virtual Memory: used = {host.used / 2**30:.2f} GB, percent = {host.percent}%"
    print_rank_0(f"{message}\n{device}\n{used}")


def empty_cache() -> None:
    """Return cached device memory."""
    get_accelerator().empty_cache()


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Running sums, each including its own element."""
    return list(itertools.accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Boundaries of `num_parts` consecutive parts of equal length, the first longer by a remainder.

    Returns:
        num_parts + 1 boundaries; with fewer items than parts, the last parts are empty.
    """
    size, rest = divmod(num_items, num_parts)
    return [part * size + min(part, rest) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Boundaries of `num_parts` consecutive, non-empty parts whose weights differ least.

    Found part by part: of all places for the last boundary, the one with the smallest difference
    between heaviest and lightest part so far; of equal ones the last. Checkpoints depend on this
    rule: another one would move layers between ranks.

    Args:
        weights: Weight of each item.
        num_parts: How many parts.

    Returns:
        num_parts + 1 boundaries; with fewer items than parts, one each, then empty parts.
    """
    num_items = len(weights)
    if num_items <= num_parts:
        return partition_uniform(num_items, num_parts)
    sums = [0.0, *prefix_sum_inc(weights)]
    # best[i]: (difference, heaviest, lightest, boundaries) of the first i items in as many parts as
    # the round
    best: dict[int, tuple[float, float, float, list[int]]] = {0: (0.0, -math.inf, math.inf, [0])}
    for part in range(1, num_parts + 1):
        ends = range(part, num_items - (num_parts - part) + 1)
        best = {end: _last_part(best, sums, end) for end in ends}
    return best[num_items][3]


def _last_part(
    best: dict[int, tuple[float, float, float, list[int]]], sums: list[float], end: int
) -> tuple[float, float, float, list[int]]:
    found: tuple[float, float, float, list[int]] | None = None
    for start, (_, heaviest, lightest, bounds) in best.items():
        if start >= end:
            break
        weight = sums[end] - sums[start]
        high, low = max(heaviest, weight), min(lightest, weight)
        if found is None or high - low <= found[0]:
            found = (high - low, high, low, [*bounds, end])
    if found is None:
        raise AssertionError(f"no part can end at item {end} of {len(sums) - 1}")
    return found
