"""Checkpoint format: names, files, and the tools that work on saved folders."""

from deepspeed._lazy import lazy_attributes

_UNIVERSAL = "deepspeed.checkpoint.universal_checkpoint"
_ZERO = "deepspeed.checkpoint.zero_checkpoint"
_UTILS = "deepspeed.checkpoint.utils"

__getattr__ = lazy_attributes(
    __name__,
    {
        "DeepSpeedCheckpoint": "deepspeed.checkpoint.deepspeed_checkpoint",
        "SubparamShape": _UNIVERSAL,
        "ZeROCheckpoint": _ZERO,
        "enable_universal_checkpoint": _UNIVERSAL,
        "get_layer_ckpt_name_for_rank": _UTILS,
        "get_model_3d_descriptor": _ZERO,
        "get_model_ckpt_name_for_rank": _UTILS,
        "get_zero_ckpt_name_for_rank": _UTILS,
        "model_3d_desc": _ZERO,
        "verify_checkpoint": "deepspeed.checkpoint.verification",
    },
    tables=("deepspeed.checkpoint.constants:__dict__",),
)
