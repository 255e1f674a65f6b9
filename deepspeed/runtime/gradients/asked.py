"""A word to scripts that look for a reduced gradient in `param.grad`: `AskedGradient`.

From a backward that reduces to the step, gradients of ZeRO lie in the shards of their owners, and
`param.grad` is None. What a script does with it then has no effect: `clip_grad_norm_` of torch, for
one, finds nothing and returns 0. So one parameter, which whoever goes through all of them asks too,
has a class in that time that warns.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import nn

from deepspeed.utils.logging import warn_once

_GRAD: Any = torch.Tensor.grad


def _asked(param: torch.Tensor) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = _GRAD.__get__(param)
    asks = sys._getframe(1).f_globals.get("__name__", "")
    if grad is None and not asks.startswith("deepspeed."):
        warn_once(
            "param.grad is None between a backward that has reduced it and engine.step(): the "
            "gradient lies reduced in shards, so reading, editing or clipping it there "
            "(torch.nn.utils.clip_grad_norm_) has no effect. Use the key gradient_clipping to "
            "clip, deepspeed.utils.safe_get_full_grad and safe_set_full_grad to read and change it"
        )
    return grad


def _set(param: torch.Tensor, value: torch.Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(param, value)


@cache
def _asking(cls: type) -> type:
    """Derive the class that warns from a parameter's own."""
    made: type = type(cls)(cls.__name__, (cls,), {"grad": property(_asked, _set)})
    return made


class AskedGradient:
    """Lets a parameter warn, while `watch` holds, when a script asks for its gradient."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param
        self._before: type | None = None

    def watch(self) -> None:
        if self._before is None:
            self._before = type(self._param)
            self._param.__class__ = _asking(self._before)

    def stop(self) -> None:
        # Stage 3 changes the class of what it gathers, and leaves nothing to go back from.
        if self._before is not None and type(self._param) is _asking(self._before):
            self._param.__class__ = self._before
        self._before = None
