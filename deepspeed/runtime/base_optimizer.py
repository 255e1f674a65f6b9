"""Upstream's path of the optimizers' base classes.

The order of a step is ``optimizers.step_sequence``'s, sharded state ``zero.zero_optimizer``'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed._absent import reason
from deepspeed._lazy import lazy_attributes

# Sharded optimizers derive from DeepSpeedOptimizer too, so their base can only be reached late.
__getattr__ = lazy_attributes(__name__, {"ZeROOptimizer": "deepspeed.runtime.zero.zero_optimizer"})


class DeepSpeedOptimizer:
    """Base class of the optimizers that `deepspeed.initialize` returns: a marker, and what to say
    of upstream's methods that are not there.
    """

    # Type checkers must go on finding what is misspelled.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise, with what to use instead if the name is upstream's."""
            cls = type(self)
            raise AttributeError(
                reason(f"{cls.__module__}.{cls.__qualname__}", name)
                or f"{cls.__name__!r} object has no attribute {name!r}"
            )
