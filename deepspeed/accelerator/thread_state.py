"""What torch knows of a thread, for another one that runs something in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

# torch 2.6 does not tell which hooks of saved tensors another thread would have to be given.
KNOWS_SAVED_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
Result = TypeVar("Result")


def as_in_the_caller(function: Callable[[], Result], device: str = "cpu") -> Callable[[], Result]:
    """`function` for another thread, with what torch hands on from the caller's: modes, hooks of
    saved tensors, autocast on the host and the device of this type, whether gradients are on.
    """
    saved = (
        torch._C._autograd._top_saved_tensors_default_hooks(False) if KNOWS_SAVED_HOOKS else None
    )
    contexts: list[AbstractContextManager[Any]] = [
        *[_pushed(overrides, mode) for mode in overrides._get_current_function_mode_stack()],
        *[_pushed(dispatch, mode) for mode in dispatch._get_current_dispatch_mode_stack()],
        *([] if saved is None else [torch.autograd.graph.saved_tensors_hooks(*saved[:2])]),
        *[
            torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(("cpu", device))
        ],
    ]
    grads_on = torch.is_grad_enabled()

    def run() -> Result:
        with ExitStack() as stack, torch.set_grad_enabled(grads_on):
            for context in contexts:
                stack.enter_context(context)
            return function()

    return run


@contextmanager
def _pushed(modes: Any, mode: object) -> Iterator[None]:
    """Within it, a mode is on the stack of `modes`, the module."""
    modes._push_mode(mode)
    try:
        yield
    finally:
        modes._pop_mode()
