"""The caching allocator of the simulated device.

[Note: adversarial reuse]
Memory that Python lets go of returns at once to the stream it was allocated for, and the next
allocation there gets it, most recently freed first. Work that another stream has still queued on it
then reads or writes somebody else's tensor, as on a device. Work of the same stream is safe, as on
a device: its queue runs in order. Fresh memory is poisoned: with NaN, or with a number that no
index can be.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed.accelerator.operators import byte_intervals
from deepspeed.accelerator.sim.peak import PeakRecord
from deepspeed.accelerator.sim.queues import Scheduler, Stream, Work
from deepspeed.accelerator.stream_trace import Access

# Not the program's call, which `host_waits` takes for the host's memory.
_from_numpy = torch.from_numpy

ALIGNMENT = 64
GRANULE = 512
# Of one block; a buffer of many parameters has many views.
MAX_SHADOWS = 256
# As on CUDA, small tensors do not take large blocks.
SMALL = 1 << 20

# All ones is NaN in every floating-point format; the byte of integers makes each of them a number
# far from any index.
_POISON_FLOAT, _POISON_INT, _POISON_BOOL = 0xFF, 0xA5, 0x01


def poison_byte(dtype: torch.dtype) -> int:
    """The byte that fresh memory of this dtype is filled with."""
    if dtype.is_floating_point or dtype.is_complex:
        return _POISON_FLOAT
    return _POISON_BOOL if dtype == torch.bool else _POISON_INT


def in_granules(nbytes: int) -> int:
    """Round up to a multiple of what memory is handed out in."""
    return -(-nbytes // GRANULE) * GRANULE


# Of dtypes that numpy has; memory for others is handed out as bytes.
_NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
}


def _array(
    memory: Any, nbytes: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
) -> Any:
    known = _NUMPY_DTYPES.get(dtype)
    if known is None:
        return memory[:nbytes]
    return np.ndarray(size, known, memory, 0, [step * dtype.itemsize for step in stride])


def _alias(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    # A tensor made for a kernel is none that inference mode protects.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        alias = torch.empty(0, dtype=tensor.dtype).set_(
            storage, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        if tensor.is_conj():
            alias = alias.conj()
        return torch._neg_view(alias) if tensor.is_neg() else alias


class Block:
    """Memory that is never given back while anything queued may use it.

    `storage` keeps it, and no user ever holds that. `uses` has per stream the position after the
    last work issued on it. `shadows` are tensors on it that kernels got: the same are asked for in
    each step.
    """

    def __init__(self, capacity: int) -> None:
        raw = np.empty(capacity + ALIGNMENT, dtype=np.uint8)
        first = -raw.ctypes.data % ALIGNMENT
        self.memory = raw[first : first + capacity]
        self.storage = _from_numpy(self.memory).untyped_storage()
        self.address = self.storage.data_ptr()
        self.capacity = capacity
        self.uses: dict[Stream, int] = {}
        self.shadows: dict[Any, torch.Tensor] = {}

    @property
    def is_idle(self) -> bool:
        return all(stream.done >= position for stream, position in self.uses.items())


class Life:
    """One allocation: from the moment that memory is handed out until `owner`, Python's last
    reference, is gone. `recorded` are other streams that `record_stream` named.
    """

    def __init__(self, serial: int, block: Block, nbytes: int, stream: Stream) -> None:
        self.serial = serial
        self.block = block
        self.nbytes = in_granules(nbytes)
        self.stream = stream
        self.recorded: set[Stream] = set()
        self.owner: weakref.ref[Any] | None = None


class _Owned(NamedTuple):
    storage: StorageWeakRef
    nbytes: int
    is_locked: bool
    is_kept: bool  # when it is freed


class HostMemory:
    """What the host reads and writes past all streams: what is made here, and what operators make
    of it. `pin` is as torch's allocator of page-locked memory, which rounds up to a power of two,
    never splits a block, and keeps those that are freed.
    """

    def __init__(self, settle: Callable[[torch.Tensor], None]) -> None:
        self._settle = settle  # runs what is queued on a tensor's memory
        self._owned: dict[int, _Owned] = {}
        self._kept: Counter[int] = Counter()  # how many blocks of a size are free

    @property
    def is_used(self) -> bool:
        return bool(self._owned)

    @property
    def nbytes(self) -> int:
        self._sweep()
        kept = sum(size * count for size, count in self._kept.items())
        return kept + sum(one.nbytes for one in self._owned.values())

    def _sweep(self) -> None:
        for cdata, one in list(self._owned.items()):
            if one.storage.expired():
                del self._owned[cdata]
                self._kept[one.nbytes] += one.is_kept

    def empty(self, numel: int, dtype: torch.dtype, pin: bool = False) -> torch.Tensor:
        """Poisoned memory, as much as is asked for."""
        with _disable_current_modes():
            memory = torch.full((numel * dtype.itemsize,), poison_byte(dtype), dtype=torch.uint8)
        return self.own(memory.view(dtype), is_locked=pin)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """No stream is waited for: on a real device what is pinned was never device memory. What is
        queued on this very memory, which only the simulation takes for the device's, is run first.
        """
        self._settle(tensor)
        with _disable_current_modes():
            return self.own(tensor.detach().clone())

    def pin(self, tensor: torch.Tensor, make_copy: bool = True) -> torch.Tensor:
        """A copy in page-locked memory; without `make_copy` poisoned memory, and nothing runs."""
        empty = self.empty(0 if make_copy else tensor.numel(), tensor.dtype)
        pinned = self.copy(tensor) if make_copy else empty.view(tensor.shape)
        nbytes = 1 << max(0, pinned.nbytes - 1).bit_length()
        self._sweep()
        self._kept[nbytes] -= self._kept[nbytes] > 0
        return self.own(pinned, is_locked=True, block=nbytes)

    def own(
        self,
        tensor: torch.Tensor,
        is_locked: bool = False,
        block: int = 0,
        is_mapped: bool = False,
    ) -> torch.Tensor:
        """Take it for the host's; what `is_mapped` is a file's, and takes no memory that counts."""
        storage = tensor.untyped_storage()
        nbytes = 0 if is_mapped else block or storage.nbytes()
        known = StorageWeakRef(storage), nbytes, is_locked, block > 0
        self._owned[storage._cdata] = _Owned(*known)
        return tensor

    def owns(self, tensor: torch.Tensor, unlocked: bool = False) -> bool:
        """Whether a tensor lies here, in memory that is not page-locked if that is asked."""
        # A weak reference keeps torch from giving another storage the same identity.
        found = self._owned.get(tensor.untyped_storage()._cdata) if self._owned else None
        return found is not None and not (unlocked and found.is_locked)


class Allocator:
    """Hands memory out and takes it back."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lives: dict[int, Life] = {}
        self._free: dict[tuple[Stream, bool], list[Block]] = {}
        self._held_back: list[tuple[Life, list[tuple[Stream, int]]]] = []
        self._serial = 0
        self._foreign: dict[int, tuple[StorageWeakRef, int]] = {}
        self._records: list[PeakRecord] = []
        self.host = HostMemory(self._settle)
        self.allocated = self.max_allocated = 0
        self.reserved = self.max_reserved = 0

    # Handing out

    def allocate(
        self, nbytes: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """A tensor in poisoned memory for the current stream."""
        stream = self._scheduler.current
        block = self._take(nbytes, stream)
        self._serial += 1
        life = Life(self._serial, block, nbytes, stream)
        owner = _array(block.memory, nbytes, dtype, size, stride)
        life.owner = weakref.ref(owner, self._freer(life))
        self._lives[block.address] = life
        self.allocated += life.nbytes
        self.max_allocated = max(self.max_allocated, self.allocated)
        for record in self._records:
            record.took(life.serial, life.nbytes, block.address)
        self._poison(block, nbytes, poison_byte(dtype), stream)
        if self._scheduler.tracer is not None:
            self._scheduler.tracer.allocated(life.serial, nbytes, stream)
        tensor = _from_numpy(owner)
        if tensor.dtype is dtype:
            return tensor
        return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage(), 0, size, stride)

    def _take(self, nbytes: int, stream: Stream) -> Block:
        if self._held_back:
            self._release_held_back()
        pool = self._free.get((stream, nbytes <= SMALL), [])
        for position in range(len(pool) - 1, -1, -1):
            if pool[position].capacity >= nbytes:
                return pool.pop(position)
        block = Block(in_granules(nbytes))
        self.reserved += block.capacity
        self.max_reserved = max(self.max_reserved, self.reserved)
        return block

    def _poison(self, block: Block, nbytes: int, byte: int, stream: Stream) -> None:
        target = block.memory[:nbytes]
        if block.is_idle:
            block.uses.clear()
            target.fill(byte)
            return
        # Queued work of this stream still needs the old contents and runs before; that of others
        # has no such right.
        position = self._scheduler.put(stream, Work("allocation", lambda: target.fill(byte)))
        block.uses[stream] = position

    # Taking back

    def _freer(self, life: Life) -> Callable[[Any], None]:
        def freed(owner: object) -> None:
            self._lives.pop(life.block.address, None)
            self.allocated -= life.nbytes
            for record in self._records:
                record.gave(life.serial)
            if self._scheduler.tracer is not None:
                self._scheduler.tracer.freed(life.serial)
            if life.recorded:
                self._held_back.append((life, [(user, user.issued) for user in life.recorded]))
            else:
                self._return(life)

        return freed

    def _return(self, life: Life) -> None:
        self._free.setdefault((life.stream, life.block.capacity <= SMALL), []).append(life.block)

    def _release_held_back(self) -> None:
        waiting = []
        for life, positions in self._held_back:
            if all(stream.done >= position for stream, position in positions):
                self._return(life)
            else:
                waiting.append((life, positions))
        self._held_back = waiting

    def empty_cache(self) -> None:
        """Forget all free memory; work queued on it keeps it until it has run."""
        self._release_held_back()
        self.reserved -= sum(block.capacity for pool in self._free.values() for block in pool)
        self._free.clear()

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep memory of `tensor`, once freed, until the work that `stream` has then is done."""
        life = self._lives.get(tensor.untyped_storage().data_ptr())
        if life is not None and stream is not life.stream:
            life.recorded.add(stream)
            self._scheduler.trace(lambda tracer: tracer.stream_recorded(life.serial, stream))

    @contextmanager
    def recording(self) -> Iterator[PeakRecord]:
        held = [(one.serial, one.nbytes, one.block.address) for one in self._lives.values()]
        record = PeakRecord(held)
        self._records.append(record)
        try:
            yield record
        finally:
            self._records.remove(record)

    # Looking

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The memory under a tensor; None if the host made it."""
        life = self._lives.get(tensor.untyped_storage().data_ptr())
        return None if life is None else life.block

    def _settle(self, tensor: torch.Tensor) -> None:
        """Run what is queued on the memory under a tensor."""
        block = self.block_of(tensor)
        for stream, position in dict(block.uses if block is not None else {}).items():
            self._scheduler.drain(stream, position)

    def shadow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as a kernel sees it: an address that keeps no tensor of the user alive.
        Memory that the host made is kept alive: it isn't the device's to reuse.
        """
        block = self.block_of(tensor)
        if block is None:
            return _alias(tensor, tensor.untyped_storage())
        offset, conjugated, negated = tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
        key = (tensor.dtype, offset, tensor.shape, tensor.stride(), conjugated, negated)
        shadow = block.shadows.get(key)
        if shadow is None:
            if len(block.shadows) >= MAX_SHADOWS:
                block.shadows.clear()
            shadow = block.shadows[key] = _alias(tensor, block.storage)
        return shadow

    def accesses(self, tensor: torch.Tensor, writes: bool) -> list[Access]:
        if tensor.layout != torch.strided or tensor.numel() == 0:
            return []
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        life = self._lives.get(address)
        serial = self._foreign_serial(storage) if life is None else life.serial
        places = byte_intervals(tensor)
        return [Access(serial, start, end, writes, address + start) for start, end in places]

    def _foreign_serial(self, storage: torch.UntypedStorage) -> int:
        # A weak reference keeps torch from giving another storage the same identity.
        known = self._foreign.get(storage._cdata)
        if known is None or known[0].expired():
            self._serial += 1
            known = (StorageWeakRef(storage), self._serial)
            self._foreign[storage._cdata] = known
        return known[1]
