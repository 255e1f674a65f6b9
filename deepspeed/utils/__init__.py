"""Utilities that scripts and client libraries import."""

import sys
from types import ModuleType

from deepspeed._lazy import lazy_attributes
from deepspeed.utils.logging import log_dist, logger

_FRAGMENTS = "deepspeed.utils.tensor_fragment"
_NAMES = {
    **dict.fromkeys(
        (
            "fragment_address",
            "safe_get_full_fp32_param",
            "safe_get_full_fp32_params",
            "safe_get_full_grad",
            "safe_get_full_grads",
            "safe_get_full_optimizer_state",
            "safe_get_full_optimizer_states",
            "safe_get_local_fp32_param",
            "safe_get_local_grad",
            "safe_get_local_optimizer_state",
            "safe_set_full_fp32_param",
            "safe_set_full_grad",
            "safe_set_full_optimizer_state",
            "safe_set_local_fp32_param",
            "safe_set_local_grad",
            "safe_set_local_optimizer_state",
            "safe_update_full_grad_vectorized",
            "tensor_fragment",
        ),
        _FRAGMENTS,
    ),
    **dict.fromkeys(("log_dist_once", "set_log_level_from_string"), "deepspeed.utils.logging"),
    **dict.fromkeys(
        (
            "get_z3_leaf_modules",
            "set_z3_leaf_module",
            "set_z3_leaf_modules",
            "set_z3_leaf_modules_by_name",
            "set_z3_leaf_modules_by_suffix",
            "unset_z3_leaf_modules",
            "z3_leaf_module",
            "z3_leaf_parameter",
        ),
        "deepspeed.utils.z3_leaf_module",
    ),
    "RepeatingLoader": "deepspeed.runtime.dataloader",
    "OnDevice": "deepspeed.utils.init_on_device",
    "instrument_w_nvtx": "deepspeed.utils.nvtx",
    "get_accelerator": "deepspeed.accelerator",
    "load_sharded_safetensors": "deepspeed.runtime.checkpointing.safetensors_loading",
    **dict.fromkeys(
        (
            "get_data_parallel_group",
            "get_data_parallel_rank",
            "get_data_parallel_world_size",
            "get_model_parallel_group",
            "get_model_parallel_rank",
            "get_model_parallel_world_size",
            "get_tensor_model_parallel_group",
            "get_tensor_model_parallel_rank",
            "get_tensor_model_parallel_src_rank",
            "get_tensor_model_parallel_world_size",
            "set_tensor_model_parallel_rank",
            "set_tensor_model_parallel_world_size",
            "initialize",
        ),
        "deepspeed.utils.groups",
    ),
    "DeprecatedException": "deepspeed.utils.exceptions",
    "bwc_pipeline_parallel_world_size": "deepspeed.utils.bwc",
    "bwc_tensor_model_parallel_world_size": "deepspeed.utils.bwc",
    "get_caller_func": "deepspeed.utils.comms_logging",
    "get_numactl_cmd": "deepspeed.utils.numa",
}

__all__ = ["groups", "log_dist", "logger", *_NAMES]

__getattr__ = lazy_attributes(
    __name__,
    _NAMES,
    ("comms_logging", "groups", "logging", "nvtx", "timer", "torch", "zero_to_fp32"),
)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        """Importing a submodule sets it here; the name it shares with another stays that one's."""
        if name not in _NAMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
