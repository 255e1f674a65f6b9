"""Optimizers and native operators.

adam, adagrad, lamb, lion, muon  optimizers by their names
host_optimizer                   those whose state lies on the host
whole_parameters                 those that need more of a parameter than its shard
flattening                       tensors as one, and back
aio                              upstream's name of what this release does not have
op_builder                       how native operators are built
"""

from __future__ import annotations

from typing import Any

from deepspeed._lazy import lazy_attributes

_load = lazy_attributes(
    __name__, {}, ("adagrad", "adam", "aio", "lamb", "lion", "muon", "op_builder")
)


def __getattr__(name: str) -> Any:
    """Load submodules, and `__compatible_ops__`: which native operators this machine can build."""
    if name == "__compatible_ops__":
        from deepspeed.ops.op_builder import compatible_ops  # startup: asks for a compiler

        return compatible_ops()
    return _load(name)
