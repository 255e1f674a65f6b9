"""What autograd saves of gathered parameters, and asks of those that have gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.runtime.zero.gathering.backward_order import BackwardOrder, Place
from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit
from deepspeed.runtime.zero.gathering.memory_pool import MemoryPool, PoolBuffer
from deepspeed.runtime.zero.parameters.zero_parameter import (
    ShardedParameter,
    is_zero_param,
    placeholder,
    record_of,
)


class SavedPlace(NamedTuple):
    """A tensor that autograd saved, as a place in a unit's memory; and when it was."""

    when: Place | None
    unit: GatherUnit
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedTensors:
    """Gives autograd, of a gathered parameter or a view of one, only a place in the memory of its
    unit: that may be another unit's until backward asks. `on_place` hears that a module has saved
    one.
    """

    def __init__(
        self, memory: MemoryPool, order: BackwardOrder, on_place: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._order = order
        self._on_place = on_place
        self._hooks: Any = None

    def buffer_of(self, tensor: torch.Tensor) -> PoolBuffer | None:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside vmap
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.layout is not torch.strided:
            return None
        if is_zero_param(tensor) and not record_of(tensor).readers:
            unit = record_of(tensor).unit
            if unit is not None and unit.shows_shard:  # memory of views of it stays
                return unit.buffer
        buffer = self._memory.by_pointer.get(tensor.untyped_storage().data_ptr())
        return None if buffer is None or buffer.owner is None else buffer

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def start(self) -> None:
        if torch.is_grad_enabled():
            self._hooks = self.hooks()
            self._hooks.__enter__()

    def end(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def _pack(self, tensor: torch.Tensor) -> SavedPlace | tuple[torch.Tensor, int]:
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

    def _unpack(self, saved: SavedPlace | tuple[torch.Tensor, int]) -> torch.Tensor:
        if not isinstance(saved, SavedPlace):
            tensor, version = saved
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a {tuple(tensor.shape)} {tensor.dtype} tensor is at "
                    f"version {tensor._version}, expected version {version}"
                )
            return tensor
        if saved.when is not None:
            self._order.come_to(saved.when)
        self._order.coordinator.use_in_backward(saved.unit, from_memory=True)
        return saved.unit.buffer.tensor.as_strided(saved.size, saved.stride, saved.offset)


class GradientShapes:
    """Shapes of sharded parameters while their gradients come: autograd asks then, when the unit
    may be gone (an embedding reads nothing in backward).
    """

    def __init__(self) -> None:
        self._shaped: list[nn.Parameter] = []

    def handles(self, units: Iterable[GatherUnit]) -> list[Any]:
        def shape_of(param: nn.Parameter) -> Callable[[torch.Tensor], None]:
            def on_gradient(grad: torch.Tensor) -> None:
                self.give(param)

            return on_gradient

        return [
            param.register_hook(shape_of(param))
            for unit in units
            for param in unit.params
            if param.requires_grad
        ]

    def give(self, param: nn.Parameter) -> None:
        """Let a parameter have its logical shape until backward ends; its zeros take no memory."""
        if type(param) is ShardedParameter:
            self._shaped.append(param)
            record = record_of(param)
            zero = torch.zeros((), dtype=record.shard.dtype, device=record.device)
            with torch._C.DisableTorchFunctionSubclass():
                param.data = zero.expand(record.shape)

    def drop(self) -> None:
        for param in self._shaped:
            if type(param) is ShardedParameter:
                with torch._C.DisableTorchFunctionSubclass():
                    param.data = placeholder(param.dtype, record_of(param).device)
        self._shaped = []
