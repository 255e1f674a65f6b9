"""Optimizers by name (adam, adagrad, lamb, lion, muon), `host_optimizer` for state on the host,
`early_update` for what of it is updated ahead of the step, `state_files` for state in files,
`parameter_runs` for steps that leave out parts of a flat parameter, `whole_parameters` for
optimizers that need more than a shard, `flattening`, `squares` for norms,
`op_builder` for native operators and `native` for those that are there, `aio` for files.
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
