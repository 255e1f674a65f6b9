"""State of a ZeRO optimizer that leaves the device between steps and comes back
(`offload_states`, `reload_states`), so that something else has the memory meanwhile.

[Note: memory moves, tensors stay]
Whoever holds a tensor goes on holding it: the optimizer its masters, a unit its shards, the model
its parameters. What changes is the memory under them. Tensors that share a piece of device memory
are found together, the piece is copied once, and each becomes a view of the copy in the same place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from deepspeed.accelerator import Event, get_accelerator
from deepspeed.runtime.gradients.local_accumulator import LocalAccumulator
from deepspeed.runtime.optimizers.master_weights import MasterWeights
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

if TYPE_CHECKING:
    from deepspeed.ops.state_files import StateFiles
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

# What a forward or a backward cannot do without; a step needs everything.
NEEDED = {
    "forward": {OffloadStateTypeEnum.lp_params},
    "backward": {
        OffloadStateTypeEnum.lp_params,
        OffloadStateTypeEnum.lp_grads,
        OffloadStateTypeEnum.contiguous_grad_buffer,
    },
}


class _Piece(NamedTuple):
    """A piece of memory that has left the device."""

    tensors: list[torch.Tensor]  # everybody who lies in it
    host: torch.Tensor  # what it holds, 1-D
    device: torch.device  # where it was


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last+1 element of the memory that a tensor lies in."""
    start = int(tensor.storage_offset())
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return start, start + 1 + sum((size - 1) * stride for size, stride in steps)


def _by_memory(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors that lie in the same piece of device memory, together."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return  # there is no other memory
    found: dict[tuple[int, torch.dtype], dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and accelerator.on_accelerator(tensor):
            key = (tensor.untyped_storage().data_ptr(), tensor.dtype)
            found.setdefault(key, {})[id(tensor)] = tensor
    for together in found.values():
        yield list(together.values())


@torch.no_grad()
def _lay(tensors: Iterable[torch.Tensor], memory: torch.Tensor, first: int = 0) -> None:
    for tensor in tensors:
        at = int(tensor.storage_offset()) - first
        tensor.data = memory.as_strided(tensor.size(), tensor.stride(), at)


class HostPieces:
    """Pieces of memory on the host, by kind of state; locked ones, slow to lock, are used again."""

    def __init__(self) -> None:
        self.kinds: dict[OffloadStateTypeEnum, list[_Piece]] = {}
        self._spare: list[tuple[torch.Tensor, Event | None]] = []

    @torch.no_grad()
    def take(
        self,
        kind: OffloadStateTypeEnum,
        tensors: Iterable[torch.Tensor],
        pin: bool,
        files: StateFiles | None,
    ) -> None:
        """Move the memory of `tensors` to the host, or to files, behind what is issued on the
        current stream.
        """
        pieces = self.kinds.setdefault(kind, [])
        for together in _by_memory(tensors):
            spans = [_span(tensor) for tensor in together]
            start, end = min(first for first, _ in spans), max(last for _, last in spans)
            whole = together[0].detach().as_strided((end - start,), (1,), start)
            if files is None:
                host = self._to_host(whole, pin)
            else:
                host = files.zeros(whole.numel(), whole.dtype, shares=True).copy_(whole)
            pieces.append(_Piece(together, host, whole.device))
            _lay(together, host, start)

    def _to_host(self, whole: torch.Tensor, pin: bool) -> torch.Tensor:
        if not pin:
            return get_accelerator().to_host(whole)
        host = self._page_locked(whole)
        host.copy_(whole, non_blocking=True)
        return host

    def _page_locked(self, like: torch.Tensor) -> torch.Tensor:
        for position, (memory, event) in enumerate(self._spare):
            if memory.dtype == like.dtype and memory.numel() == like.numel():
                del self._spare[position]
                if event is not None:
                    event.synchronize()
                return memory
        return get_accelerator().host_empty(like.numel(), like.dtype, pin=True)

    @torch.no_grad()
    def give_back(self) -> None:
        accelerator = get_accelerator()
        copied = []
        for piece in (piece for pieces in self.kinds.values() for piece in pieces):
            whole = torch.empty(piece.host.shape, dtype=piece.host.dtype, device=piece.device)
            locked = accelerator.is_pinned(piece.host)
            whole.copy_(piece.host, non_blocking=locked)
            _lay(piece.tensors, whole)
            copied += [piece.host] if locked else []
        if copied:
            event = accelerator.Event()
            event.record(accelerator.current_stream())
            self._spare += [(memory, event) for memory in copied]
        self.kinds = {}


def let_leave(offload: DeepSpeedZeRoOffload) -> None:
    """Let nothing be gathered until `have_back`; refuse while parameters are whole."""
    offload.refuse_holders("offload_states()")
    offload.before_update()
    for unit in (*offload.units, *offload.persistent_units):
        unit.put_away()
    offload.resources.let_go()
    offload.resources.are_away = True


def have_back(offload: DeepSpeedZeRoOffload) -> None:
    """Shards were written by what has been issued on the current stream. All ranks call it."""
    offload.resources.are_away = False
    offload.resources.mark_updated()
    offload.gather_persistent()


class Reducing(Protocol):
    """What is asked of a reduction here."""

    accumulator: LocalAccumulator | None

    @property
    def has_reduced_gradients(self) -> bool: ...
    def finish_gradients(self) -> None: ...
    def let_buffers_go(self) -> None: ...


class Movable(ABC):
    """A holder of state that may leave the device; see module. What is on the host anyway
    (`offload_optimizer`, `offload_param`) stays there.
    """

    kinds: tuple[OffloadStateTypeEnum, ...] = tuple(OffloadStateTypeEnum)

    def __init__(self, offload: DeepSpeedZeRoOffload | None = None) -> None:
        self._away = HostPieces()
        self.files: StateFiles | None = None  # for what leaves to "nvme"
        self._offload = offload  # gathers the weights of stage 3

    @property
    def states_away(self) -> list[OffloadStateTypeEnum]:
        return list(self._away.kinds)

    def require_states(self, what: str) -> None:
        """Raise if something that `what` needs is away: "forward", "backward", or all else."""
        away = self._away.kinds.keys() & NEEDED.get(what, set(OffloadStateTypeEnum))
        if away:
            raise RuntimeError(
                f"{what} while offload_states keeps {', '.join(sorted(away))} off the device: call "
                "reload_states() first"
            )

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move state to the host, and give the device's memory back. All ranks call it alike,
        between steps, and `reload_states` before what needs it.

        Args:
            include: Which kinds; None: all. What is away already stays so. Masters that are the
                model's own parameters (fp32) go with `lp_params`.
            device: "cpu", or "nvme": to `files`, which the engine has set.
            pin_memory: To page-locked memory, which is kept for the next time.
            non_blocking: Return when the copies are issued: what is on the host may be read after
                the device has been synchronized, and its memory is given back to this process
                only.

        Raises:
            ValueError: Another device.
            RuntimeError: Parameters are whole in a running forward or by `GatheredParameters`.
        """
        to_files = device == OffloadDeviceEnum.nvme and self.files is not None
        if device != OffloadDeviceEnum.cpu and not to_files:
            raise ValueError(
                f"offload_states(device={device!r}) is not supported; use 'cpu', or call the "
                "engine's for 'nvme'"
            )
        wanted = self.kinds if include is None else [kind for kind in self.kinds if kind in include]
        kinds = [kind for kind in wanted if kind not in self._away.kinds]
        self._leave(kinds)
        for kind in kinds:
            files = self.files if to_files else None
            self._away.take(kind, self.state_tensors(kind), pin_memory, files)
        if not non_blocking:
            get_accelerator().synchronize()
            get_accelerator().empty_cache()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what `offload_states` has moved, bit for bit. All ranks call it. With
        `non_blocking` all that is issued later is behind the copies.
        """
        kinds = self.states_away
        if kinds:
            self._away.give_back()
            if self._offload is not None and OffloadStateTypeEnum.lp_params in kinds:
                have_back(self._offload)
        if kinds and not non_blocking:
            get_accelerator().synchronize()

    def _leave(self, kinds: Container[OffloadStateTypeEnum]) -> None:
        """Let go of what need not be kept of these kinds, and have nothing use the rest."""
        if self._offload is not None and OffloadStateTypeEnum.lp_params in kinds:
            let_leave(self._offload)

    def _weights(self) -> Iterator[torch.Tensor]:
        """All tensors that lie in the memory of the model's weights."""
        for unit in (
            (*self._offload.units, *self._offload.persistent_units) if self._offload else ()
        ):
            yield unit.shard
            yield from (record.shard for record in unit.records)

    @abstractmethod
    def state_tensors(self, kind: OffloadStateTypeEnum) -> list[torch.Tensor]:
        """All tensors that lie in the memory of a kind of state, and live from step to step."""


class MovableWeights(Movable):
    """The weights of an engine without an optimizer, which are all that it has."""

    kinds = (OffloadStateTypeEnum.lp_params,)

    def state_tensors(self, kind: OffloadStateTypeEnum) -> list[torch.Tensor]:
        return list(self._weights()) if kind in self.kinds else []


class MovableStates(Movable):
    """The state of a ZeRO optimizer."""

    def __init__(
        self,
        masters: MasterWeights,
        reduction: Reducing,
        offload: DeepSpeedZeRoOffload | None = None,
    ) -> None:
        super().__init__(offload)
        self._masters = masters
        self._reduction = reduction

    def _leave(self, kinds: Container[OffloadStateTypeEnum]) -> None:
        self._masters.writes.take_in()
        self._reduction.finish_gradients()
        if OffloadStateTypeEnum.contiguous_grad_buffer in kinds:
            self._reduction.let_buffers_go()
        if OffloadStateTypeEnum.lp_grads in kinds and not self._reduction.has_reduced_gradients:
            for group in self._masters.groups:
                group.drop_grad()
        if OffloadStateTypeEnum.lp_params in kinds:
            self._masters.publishing.await_parameters()
        super()._leave(kinds)

    def state_tensors(self, kind: OffloadStateTypeEnum) -> list[torch.Tensor]:
        groups = self._masters.groups
        if kind is OffloadStateTypeEnum.optim_states:
            states = self._masters.state.values()
            values = (value for state in states for value in state.values())
            # Optimizers read counters on the host or the device, as they made them.
            return [v for v in values if isinstance(v, torch.Tensor) and v.dim()]
        if kind is OffloadStateTypeEnum.lp_grads:
            sums = self._reduction.accumulator
            local = [] if sums is None else [*sums.flats, *(v for vs in sums.views for v in vs)]
            return [*(group.grad for group in groups if group.has_grad), *local]
        if kind is OffloadStateTypeEnum.contiguous_grad_buffer:
            return []  # nothing is kept in it
        wanted = kind is OffloadStateTypeEnum.lp_params
        chosen = (group for group in groups if group.aliased is wanted)
        masters = [tensor for group in chosen for tensor in (group.master, *group.masters)]
        return [*masters, *self._weights()] if wanted else masters

    def _weights(self) -> Iterator[torch.Tensor]:
        for group in self._masters.groups:
            yield group.flat
            yield from group.params if self._offload is None else ()
        yield from super()._weights()
        for pair in self._masters.publishing.copied:
            yield from pair
