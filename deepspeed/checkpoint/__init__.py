"""Checkpoint format: names, files, and the tools that work on saved folders. No runtime is needed.

Folders:

    file_names, constants   names of files, and of what is in them
    manifest, verification  what a folder has to hold, and whether it does; which may be removed
    files                   reading files, publishing whole folders
    experts                 which experts files are of

Files:

    file_writer             writing one in pieces, with its checksum
    torch_files, dcp_files  the formats

Tools, and what they stand on:

    cli, ds_to_universal  the commands `ds_checkpoint` and `ds_to_universal`
    resharding            what one run's ranks saved, for another's

Upstream's views are `deepspeed_checkpoint`, `zero_checkpoint`, `universal_checkpoint`, `utils`.
"""

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
