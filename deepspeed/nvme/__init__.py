"""How fast files are read and written here: one measurement and the `ds_io` command (`measure`), a
sweep over settings that writes the `aio` block and the `ds_nvme_tune` command (`tune`).
"""

from deepspeed._lazy import lazy_attributes

_TUNE = dict.fromkeys(("parse_sweep_arguments", "sweep_main"), "deepspeed.nvme.tune")

__getattr__ = lazy_attributes(
    __name__, {"ds_io_main": "deepspeed.nvme.measure", **_TUNE}, ("measure", "tune")
)
