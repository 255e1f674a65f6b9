"""Upstream's path of the ``comms_logger`` section's model and of what parses the section."""

from deepspeed._lazy import lazy_attributes
from deepspeed.comm.constants import *  # noqa: F403  # upstream's path of these names

__getattr__ = lazy_attributes(
    __name__,
    dict.fromkeys(
        ("CommsLoggerConfig", "DeepSpeedCommsConfig"), "deepspeed.runtime.config_models.features"
    ),
)
