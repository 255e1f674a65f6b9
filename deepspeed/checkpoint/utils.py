"""Copies of nested tensors for saving, and upstream's names of files."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.file_names import layer_file, model_file, optimizer_file


def clone_tensors_for_torch_save(item: object, device: torch.device | str = "cpu") -> Any:
    """A copy of nested lists, tuples and dicts; each tensor has its own storage on `device`.

    Parameters are views of flat buffers; `torch.save` would write the whole buffer for each of
    them. Tensors that share their memory stay one tensor, so tied weights are saved once.
    """
    return map_tensors(item, lambda tensor: tensor.detach().clone().to(device))


def separate(item: object) -> Any:
    """`clone_tensors_for_torch_save`, but dense tensors in host memory are not copied.

    The result shares their memory, and is for writing before any of them changes.
    """
    return map_tensors(item, _separate)


def map_tensors(
    item: object,
    change: Callable[[torch.Tensor], torch.Tensor],
    leaf: Callable[[Any], Any] | None = None,
) -> Any:
    """Nested lists, tuples and dicts with every tensor changed, and every other `leaf` if asked."""
    return _map(item, change, leaf, {})


# They cannot change, so they need no copy; random states hold more than a thousand of them.
_ATOMS = frozenset((int, float, bool, str, bytes, type(None), torch.Size))


def _map(
    item: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    leaf: Callable[[Any], Any] | None,
    seen: dict[Any, Any],
) -> Any:
    if type(item) in _ATOMS:
        return item
    if isinstance(item, torch.Tensor):
        # Two state-dict entries of one parameter are different views with one address.
        key = (item.data_ptr(), item.shape, item.stride(), item.dtype) if item.numel() else id(item)
        if key not in seen:
            seen[key] = change(item)
        return seen[key]
    if type(item) in (dict, OrderedDict):
        return type(item)((key, _map(value, change, leaf, seen)) for key, value in item.items())
    if type(item) in (list, tuple):
        return type(item)(_map(value, change, leaf, seen) for value in item)
    return item if leaf is None else leaf(item)


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a storage that holds nothing else: `torch.save` writes storages."""
    start = tensor.storage_offset() * tensor.element_size()
    return on_storage(
        tensor.untyped_storage()[start : start + tensor.numel() * tensor.element_size()], tensor
    )


def on_storage(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor like `like` that is all of `storage` and keeps its source alive."""
    return torch.empty(0, dtype=like.dtype).set_(storage).view(like.shape)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is elements in memory and nothing else."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _separate(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor.cpu()
    if not is_plain(tensor) or not tensor.is_contiguous():
        return tensor.clone()
    has_own_storage = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if has_own_storage else with_own_storage(tensor)


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Path of the model-states file of a model-parallel rank, given as its two digits."""
    return os.path.join(base_folder, model_file(int(mp_rank_str)))


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Path of the (not bf16) optimizer-states file of a rank."""
    return os.path.join(base_folder, optimizer_file(dp_rank, mp_rank, bf16=False))


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: str) -> str:
    """Path of a pipeline layer's file."""
    return os.path.join(base_folder, layer_file(layer_id, f"model_{tp_rank}"))


_ALIGNMENT = 64
# Tensors of fewer bytes share blocks; others have one each, which wastes nothing.
_SMALL_BYTES, _SHARED_BYTES = 1 << 16, 1 << 20


class HostCopy:
    """Copies tensors, each with storage of its own, into page-locked memory: `reset` keeps what has
    been used for the next, block by block.
    """

    def __init__(self) -> None:
        self._used: list[torch.Tensor] = []
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._shared = torch.empty(0, dtype=torch.uint8)  # what is left of the last shared one

    def reset(self) -> None:
        """Forget all copies; their memory is used again."""
        self._free.clear()
        for block in self._used:
            self._free[block.numel()].append(block)
        self._used, self._shared = [], self._shared[:0]

    def __call__(self, content: object) -> Any:
        """A copy of nested dicts, lists and tuples that no change of the original reaches."""
        copied = map_tensors(content, self._copy, copy.deepcopy)
        # Copies from a device run beside the host, on the current stream.
        get_accelerator().current_stream().synchronize()
        return copied

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if not is_plain(tensor) or tensor.numel() == 0:
            return tensor.clone().cpu()
        return on_storage(self._take(tensor.nbytes), tensor).copy_(tensor, non_blocking=True)

    def _take(self, count: int) -> torch.UntypedStorage:
        if count >= _SMALL_BYTES:
            return self._block(count).untyped_storage()
        if count > self._shared.numel():
            self._shared = self._block(_SHARED_BYTES)
        taken = with_own_storage(self._shared[:count])
        self._shared = self._shared[-(-count // _ALIGNMENT) * _ALIGNMENT :]
        return taken.untyped_storage()

    def _block(self, count: int) -> torch.Tensor:
        free = self._free[count]
        block = free.pop() if free else get_accelerator().host_empty(count, torch.uint8, pin=True)
        self._used.append(block)
        return block
