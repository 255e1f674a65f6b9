"""ZeRO stages."""

from deepspeed._lazy import lazy_attributes

__getattr__ = lazy_attributes(__name__, {}, ("config", "offload_config", "stage_1_and_2"))
