"""Which native op there is: built on first use, or one warning that says what is done instead."""

from __future__ import annotations

import functools
from types import ModuleType

from deepspeed.ops.op_builder import ALL_OPS, OpBuildError
from deepspeed.utils.logging import logger


@functools.cache
def native_op(name: str, without: str = "its optimizer runs on torch") -> ModuleType | None:
    """Return the loaded op, built on first use; None, after one warning, where that fails."""
    try:
        return ALL_OPS[name].load_native()
    except (OpBuildError, ImportError, OSError) as error:
        text = "op %s cannot be used, %s instead, which is slower: %s"
        logger.warning(text, name, without, error)
        return None
