"""The device seam: everything the rest of the package knows about a device goes through
`get_accelerator()`.
"""

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.real_accelerator import (
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)
from deepspeed.accelerator.streams import Event, Stream

__all__ = [
    "DeepSpeedAccelerator",
    "Event",
    "Stream",
    "get_accelerator",
    "is_current_accelerator_supported",
    "set_accelerator",
]
