"""Recomputed activations: `checkpointing` is the front door, which users reach as
`deepspeed.checkpointing`.

    settings, config  what was configured, and upstream's path of the block
    saved_inputs      where inputs of checkpointed functions lie
    saved_files       those in files: written behind forward, read ahead of backward
    random_states     what recomputation must find as forward found it
    tensor_lists      flat argument lists, under upstream's names
"""

from deepspeed._lazy import lazy_attributes

__getattr__ = lazy_attributes(__name__, {}, ("checkpointing", "config"))
