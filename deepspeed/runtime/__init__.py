"""The training runtime."""

from deepspeed._lazy import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {},
    (
        "engine",
        "config",
        "lr_schedules",
        "dataloader",
        "utils",
        "base_optimizer",
        "bf16_optimizer",
        "zero",
        "fp16",
    ),
)
