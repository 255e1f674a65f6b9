"""Recomputed activations: `checkpointing` is the front door, which users reach as
`deepspeed.checkpointing`.
"""

from deepspeed._lazy import lazy_attributes

__getattr__ = lazy_attributes(__name__, {}, ("checkpointing", "config"))
