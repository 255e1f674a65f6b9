"""Optimizers and, as they come, native operators."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`__compatible_ops__`: which native operators this machine can build (startup: looked at on demand)."""
    if name == "__compatible_ops__":
        from deepspeed.ops.op_builder import ALL_OPS  # startup: asks for a compiler

        return {op: builder.is_compatible() for op, builder in ALL_OPS.items()}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
