"""Writes to parameters of stage 3 that nobody would keep, refused at the line that makes them.

A parameter that is whole outside of any block shows a copy of the shards, which the next gather
fills anew. So what is written there is lost, whether it goes to the parameter or to its `.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import torch

from deepspeed.runtime.module_hooks.parameter_reads import flat_values

# Torch's functions that write have names that end in one underscore, but for these that write too,
# and those that do not.
_WRITES = frozenset(
    "__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ "
    "__ior__ __ixor__ __ilshift__ __irshift__ __setitem__".split()
)
_NO_WRITES = frozenset(("requires_grad_", "share_memory_", "detach_", "rename_"))


def is_write(name: str) -> bool:
    """Whether torch's function of this name writes to what it is given first."""
    return name in _WRITES or (name.rstrip("_") + "_" == name and name not in _NO_WRITES)


def written_by(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what a function that writes, called with these, writes to: one tensor, or several."""
    # torch.nn.init passes by keyword.
    yield from flat_values([next(iter((*args, *kwargs.values())), None)])


def in_place_methods() -> Iterator[str]:
    """Yield the names of all methods by which scripts write to tensors."""
    for name in dir(torch.Tensor):
        if is_write(name) and (name in _WRITES or not name.startswith("_")):
            yield name


class WholeValue(torch.Tensor):
    """`.data` of a whole parameter outside of any block, and views of it: to be read. Writing to
    them is an error that names the parameter. What is computed with them is an ordinary tensor, and
    so is what is copied or saved.
    """

    _refuse: Callable[[str], str]

    @classmethod
    def of(cls, value: torch.Tensor, refuse: Callable[[str], str]) -> WholeValue:
        """Guard `value`, in its memory; `refuse` makes an error's text of a function's name."""
        with torch._C.DisableTorchFunctionSubclass():
            guarded: WholeValue = value.as_subclass(cls)
        guarded._refuse = refuse
        return guarded

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Raise for writes to what is guarded; views of it are guarded too."""
        name = getattr(func, "__name__", "")
        if is_write(name):
            for target in written_by(args, kwargs or {}):
                if isinstance(target, WholeValue):
                    raise RuntimeError(target._refuse(name))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        source = args[0] if args else None
        if not isinstance(source, WholeValue):
            return result
        if isinstance(result, (list, tuple)):  # of `split` and its kin
            return type(result)(source._guarded(part) for part in result)
        return source._guarded(result)

    def _guarded(self, result: Any) -> Any:
        """Guard what has been computed with this one, if it is in the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            is_part = isinstance(result, torch.Tensor) and result._is_view() and result is not self
        return self.of(result, self._refuse) if is_part else result

    def set_(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Raise: torch does not ask `__torch_function__` for this one."""
        raise TypeError(self._refuse("set_"))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)
