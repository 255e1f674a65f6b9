"""Helpers for saving tensors."""

from __future__ import annotations

import os
from typing import Any

import torch

from deepspeed.checkpoint.constants import model_file, optimizer_file


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested lists, tuples and dicts in which every tensor has storage of its own on `device`.

    Parameters are views of flat buffers; `torch.save` would write the whole buffer for each of them. Tensors that share their
    memory stay one tensor, so tied weights are saved once.
    """
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, seen: dict[Any, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        # Two state-dict entries of one parameter are different views with one address.
        key = (item.data_ptr(), item.shape, item.stride(), item.dtype) if item.numel() else id(item)
        if key not in seen:
            seen[key] = item.detach().clone().to(device)
        return seen[key]
    if isinstance(item, dict):
        return type(item)((key, _clone(value, device, seen)) for key, value in item.items())
    if isinstance(item, (list, tuple)) and not hasattr(item, "_fields"):
        return type(item)(_clone(value, device, seen) for value in item)
    return item


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Path of the model-states file of a model-parallel rank, given as its two digits."""
    return os.path.join(base_folder, model_file(int(mp_rank_str)))


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Path of the (not bf16) optimizer-states file of a rank."""
    return os.path.join(base_folder, optimizer_file(dp_rank, mp_rank, bf16=False))


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: str) -> str:
    """Path of a pipeline layer's file."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank}-model_states.pt")
