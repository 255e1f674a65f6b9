"""Checkpoint format: names, files, and the tools that work on saved folders."""

from deepspeed._lazy import lazy_attributes

__getattr__ = lazy_attributes(__name__, {"verify_checkpoint": "deepspeed.checkpoint.verification"})
