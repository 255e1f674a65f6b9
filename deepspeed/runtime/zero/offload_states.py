"""Moves an optimizer's state to the host and back, under upstream's names: for torch's optimizers
that no ZeRO stage has wrapped. What a stage keeps `engine.offload_states` moves.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed._lazy import lazy_attributes
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

__getattr__ = lazy_attributes(__name__)


def offload_optimizer_states(
    optimizer: torch.optim.Optimizer,
    device: torch.device | str,
    pin_memory: bool = False,
    non_blocking: bool = False,
) -> None:
    """Move all tensors of the state to `device`, but counters; with `pin_memory` to page-locked
    memory, with `non_blocking` the caller waits for the copies.
    """
    for state in optimizer.state.values():
        for name, value in state.items():
            # Optimizers read counters on the host or the device, as they made them.
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = _moved(value, torch.device(device), pin_memory, non_blocking)


def _moved(
    value: torch.Tensor, device: torch.device, pin_memory: bool, non_blocking: bool
) -> torch.Tensor:
    if not pin_memory or device.type != "cpu" or value.device.type == "cpu":
        return value.to(device, non_blocking=non_blocking)
    host = torch.empty_like(value, device=device, pin_memory=True)
    return host.copy_(value, non_blocking=non_blocking)


def reload_optimizer_states(
    optimizer: torch.optim.Optimizer, device: torch.device | str, non_blocking: bool = False
) -> None:
    """Move all tensors of the state to `device`, but counters."""
    offload_optimizer_states(optimizer, device, non_blocking=non_blocking)


def offload_adam_states(
    optimizer: Any, device: torch.device | str, pin_memory: bool = False, non_blocking: bool = False
) -> None:
    """`offload_optimizer_states`, by its older name."""
    offload_optimizer_states(optimizer, device, pin_memory, non_blocking)


def reload_adam_states(
    optimizer: Any, device: torch.device | str, non_blocking: bool = False
) -> None:
    """`reload_optimizer_states`, by its older name."""
    reload_optimizer_states(optimizer, device, non_blocking)


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """Return the devices that a kind of an engine's state is on (ZeRO stages 1 to 3; at 3 without
    an optimizer too); none if there is nothing of it now.
    """
    tensors = model.movable_states("get_state_devices").state_tensors(OffloadStateTypeEnum(state))
    return {tensor.device for tensor in tensors if tensor.numel()}
