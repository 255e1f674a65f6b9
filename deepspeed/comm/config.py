"""The ``comms_logger`` section of the configuration, as the communication layer reads it.

The section's model stands with the other configuration models; it is only looked up from here when
somebody asks for it, because this layer lies below the configuration and must import without
pydantic.
"""

from collections.abc import Mapping
from typing import Any

from deepspeed.comm.constants import *  # noqa: F403
from deepspeed.comm.constants import COMMS_LOGGER


def __getattr__(name: str) -> Any:
    if name == "CommsLoggerConfig":
        # startup: loads pydantic.
        from deepspeed.runtime.config_models.observe import CommsLoggerConfig

        return CommsLoggerConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class DeepSpeedCommsConfig:
    """The communication options of a configuration dict.

    Attributes:
        comms_logger_enabled: whether the section is there, whatever its ``enabled`` says.
        comms_logger: the parsed section; set only when it is there.
    """

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = COMMS_LOGGER in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = __getattr__("CommsLoggerConfig")(**ds_config[COMMS_LOGGER])
