"""How native ops are built; importable as `deepspeed.ops.op_builder` too.

Owns: the registry of ops. The base class stands in `builder.py`, each op in a file of its own.
"""

from .async_io import AsyncIOBuilder
from .builder import OpBuilder, OpBuildError
from .cpu_optimizers import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder

_BUILDERS = (AsyncIOBuilder(), CPUAdagradBuilder(), CPUAdamBuilder(), CPULionBuilder())
ALL_OPS: dict[str, OpBuilder] = {builder.NAME: builder for builder in _BUILDERS}
"""Every op this release knows, by name."""

__all__ = [
    "ALL_OPS",
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "OpBuildError",
    "OpBuilder",
]
