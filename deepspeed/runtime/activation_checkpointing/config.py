"""The ``activation_checkpointing`` block: upstream's path of its model and constants."""

from deepspeed._lazy import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {"DeepSpeedActivationCheckpointingConfig": "deepspeed.runtime.config_models.features"},
    tables=("deepspeed.runtime.config_models.getters:ACTIVATION_CHECKPOINTING",),
)
