"""Building a model directly on a device and in a dtype, without a first copy elsewhere."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Functions that make a tensor out of nothing: these alone take the dtype, and the device when they
# name none.
_FACTORIES = frozenset(
    {
        torch.empty,
        torch.zeros,
        torch.ones,
        torch.full,
        torch.rand,
        torch.randn,
        torch.empty_strided,
        torch.eye,
        torch.linspace,
        torch.logspace,
        torch.randint,
        torch.randperm,
        torch.arange,
        torch.tensor,
    }
)
# Of these, the ones that make floating-point numbers whatever their arguments are.
_ALWAYS_FLOATING = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.eye}
)


class OnDevice(TorchFunctionMode):
    """Context manager under which factory functions make tensors on ``device`` and floating-point
    ones in ``dtype``.

    An explicit ``device=`` or ``dtype=`` of a call wins. With ``device="meta"`` modules get shapes
    without memory.

    Example::

        with OnDevice(dtype=torch.bfloat16, device="meta"):
            model = Model()
    """

    def __init__(
        self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.device = device
        self.enabled = enabled

    def __enter__(self) -> "OnDevice":
        if self.enabled:
            super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            super().__exit__(*error)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func not in _FACTORIES:
            return func(*args, **kwargs)
        if kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.device}
        if kwargs.get("dtype") is not None:
            return func(*args, **kwargs)
        if func in _ALWAYS_FLOATING:
            return func(*args, **{**kwargs, "dtype": self.dtype})
        made = func(*args, **kwargs)
        return made.to(self.dtype) if made.is_floating_point() else made
