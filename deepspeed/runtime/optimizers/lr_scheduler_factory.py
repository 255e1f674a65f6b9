"""Builds the learning-rate schedule from what the client gave or the configuration names."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_models.arguments import read_arguments


def build_lr_scheduler(
    config: DeepSpeedConfig, client: Any, optimizer: torch.optim.Optimizer | None
) -> Any:
    """Return the client's schedule (an object, or what a callable makes of the optimizer), or else
    that of the configuration's `scheduler` block, or None.
    """
    if client is not None:
        is_factory = callable(client) and not hasattr(client, "step")
        return client(optimizer) if is_factory else client
    block = config.tree.scheduler
    if block is None or block.type is None or optimizer is None:
        return None
    is_known = block.type in lr_schedules.VALID_LR_SCHEDULES
    cls = getattr(lr_schedules, block.type, None) if is_known else None
    cls = cls or getattr(torch.optim.lr_scheduler, block.type, None)
    if cls is None:
        raise DeepSpeedConfigError(
            f"scheduler.type: {block.type!r} is unknown; use "
            f"{', '.join(lr_schedules.VALID_LR_SCHEDULES)} or a class of torch.optim.lr_scheduler"
        )
    arguments = read_arguments(cls, block.params, "scheduler.params")
    try:
        return cls(optimizer, **arguments)
    except (TypeError, ValueError) as error:
        raise DeepSpeedConfigError(
            f"scheduler.type {block.type!r} with scheduler.params {arguments}: {error}"
        ) from error
