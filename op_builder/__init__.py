"""How native ops are built; importable as `deepspeed.ops.op_builder` too.

Owns: the registry of ops. The base class stands in `builder.py`, each op in a file of its own;
`other_ops.py` has upstream's names of what is not compiled here.
"""

from .async_io import AsyncIOBuilder
from .builder import OpBuilder, OpBuildError
from .cpu_optimizers import (
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    CPUSquaresBuilder,
)
from .other_ops import BUILDERS, OTHER_OPS

_BUILDERS = (
    AsyncIOBuilder(),
    CPUAdagradBuilder(),
    CPUAdamBuilder(),
    CPULionBuilder(),
    CPUSquaresBuilder(),
)
ALL_OPS: dict[str, OpBuilder] = {builder.NAME: builder for builder in _BUILDERS}
"""Every op this release compiles, by name."""

__all__ = [
    "ALL_OPS",
    "OTHER_OPS",
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "CPUSquaresBuilder",
    "OpBuildError",
    "OpBuilder",
    "compatible_ops",
]


def compatible_ops() -> dict[str, bool]:
    """Say of every op, by name, whether this machine can use it."""
    return {name: op.is_compatible() for name, op in {**ALL_OPS, **OTHER_OPS}.items()}


def __getattr__(name: str) -> type[OpBuilder]:
    """Builders of upstream's names."""
    if name in BUILDERS:
        return BUILDERS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
