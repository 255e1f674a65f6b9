"""What autograd saves while a forward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from deepspeed.runtime.zero.gathering.backward_order import BackwardOrder, Place
from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit
from deepspeed.runtime.zero.gathering.memory_pool import MemoryPool, PoolBuffer


class SavedPlace(NamedTuple):
    """A tensor that autograd saved, as a place in the memory of a unit; and when it was."""

    when: Place | None
    unit: GatherUnit
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedTensors:
    """Of a gathered parameter, or a view of one, autograd gets no tensor but a place in the memory
    of its unit: the memory may be another unit's until backward asks for it.

    Args:
        memory: Where parameters are while they are whole.
        order: Where the forward is, and how far backward.
        on_place: Called when the running module has saved such a place.
    """

    def __init__(
        self, memory: MemoryPool, order: BackwardOrder, on_place: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._order = order
        self._on_place = on_place
        self._hooks: Any = None

    def buffer_of(self, tensor: torch.Tensor) -> PoolBuffer | None:
        """The gathered memory that a tensor lies in."""
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside vmap
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.layout is not torch.strided:
            return None
        buffer = self._memory.by_pointer.get(tensor.untyped_storage().data_ptr())
        return None if buffer is None or buffer.owner is None else buffer

    def start(self) -> None:
        """An outermost forward begins."""
        if torch.is_grad_enabled():
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def end(self) -> None:
        """It is over."""
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def _pack(self, tensor: torch.Tensor) -> Any:
        buffer = self.buffer_of(tensor)
        if buffer is None:
            # Without its node, which would keep itself alive by it; the version is checked in
            # `_unpack`, because autograd does not check what is packed.
            saved = tensor.detach() if tensor.grad_fn is not None else tensor
            return saved, tensor._version
        if tensor.dtype != buffer.tensor.dtype:
            return tensor.clone(), 0
        self._on_place()
        when, offset = self._order.here, int(tensor.storage_offset())
        return SavedPlace(when, buffer.owner, tensor.size(), tensor.stride(), offset)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if type(saved) is not SavedPlace:
            tensor, version = saved
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a {tuple(tensor.shape)} {tensor.dtype} tensor is at "
                    f"version {tensor._version}, expected version {version}"
                )
            whole: torch.Tensor = tensor
            return whole
        if saved.when is not None:
            self._order.come_to(saved.when)
        self._order.coordinator.use_in_backward(saved.unit, from_memory=True)
        return saved.unit.memory.as_strided(saved.size, saved.stride, saved.offset)
