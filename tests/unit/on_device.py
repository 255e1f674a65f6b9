"""Lets tests that were written for the host run on a device: what they make lies there, and what
they mix is moved there. The package itself gets no such help.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

from deepspeed.accelerator import get_accelerator

TORCH = str(Path(torch.__file__).parent)
PACKAGE = str(Path(__file__).parents[2] / "deepspeed")
# Of these the host is part of what is meant.
_AS_THEY_ARE = ("copy_", "to", "cpu", "cuda", "pin_memory", "set_", "__set__", "__get__")


def _asked_by_the_package() -> bool:
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith((TORCH, "<")):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(PACKAGE)


class _OnDevice(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def moved(self, values: Any) -> Any:
        """`values` with all tensors that have elements on the device."""

        def move(value: Any) -> Any:
            is_hosts = type(value) is torch.Tensor and value.device.type == "cpu"
            return value.to(self._device) if is_hosts and not value.is_pinned() else value

        return tree_map(move, values)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _asked_by_the_package() or get_accelerator()._name == "sim":
            return func(*args, **kwargs)
        if func in _device_constructors():
            if kwargs.get("device") is not None or kwargs.get("pin_memory"):
                return func(*args, **kwargs)
            # Made on the host, for the numbers of its generator.
            needs_grad = kwargs.pop("requires_grad", False)
            return func(*args, **kwargs).to(self._device).requires_grad_(needs_grad)
        name = getattr(func, "__name__", "")
        if name == "numpy":
            return func(args[0].cpu(), *args[1:], **kwargs)
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if len({one.device.type for one in tensors}) > 1 and name not in _AS_THEY_ARE:
            args, kwargs = self.moved(args), self.moved(kwargs)
        return func(*args, **kwargs)


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Within it, tests of this process run on `device`."""
    mode = _OnDevice(device)

    def inputs(module: torch.nn.Module, args: Any) -> Any:
        param = next(module.parameters(), None)
        return mode.moved(args) if param is not None and param.device.type != "cpu" else None

    handle = torch.nn.modules.module.register_module_forward_pre_hook(inputs)
    compare = torch.testing.assert_close
    torch.testing.assert_close = functools.partial(compare, check_device=False)
    try:
        with mode:
            yield
    finally:
        torch.testing.assert_close = compare
        handle.remove()
