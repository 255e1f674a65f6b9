"""`load_state_dict` of modules of stage 3 outside of any block, which would find no elements to
write to: refused by name, before anything of the module is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed.runtime.module_hooks.parameter_reads import ModuleHook
from deepspeed.runtime.zero.parameters.zero_parameter import (
    ShardedParameter,
    is_zero_param,
    record_of,
)


def guard_loads(module: nn.Module) -> RemovableHandle:
    """Guard the parameters that are this module's own: some clients gather those, and then load the
    module with the state of the whole model.
    """
    return module.register_load_state_dict_pre_hook(ModuleHook(_refuse_lost_load))


def _refuse_lost_load(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
    lost = [
        record_of(param).label
        for name, param in module.named_parameters(recurse=False)
        if prefix + name in state and _would_lose(param)
    ]
    if lost:
        raise RuntimeError(
            f"load_state_dict: {', '.join(lost[:4])} is a parameter of ZeRO stage 3 that no block "
            "holds whole, so what is loaded would be lost. Load a checkpoint by "
            "engine.load_checkpoint, or call load_state_dict on rank 0 inside `with "
            "deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0)`"
        )


def _would_lose(param: nn.Parameter) -> bool:
    if not is_zero_param(param):
        return False
    return isinstance(param, ShardedParameter) or record_of(param).loses_writes
