"""Inference: not in this release; importing it says why."""

from deepspeed._absent import reason

raise ImportError(reason("deepspeed", "inference"))
