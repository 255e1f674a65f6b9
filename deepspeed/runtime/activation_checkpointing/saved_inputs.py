"""Where saved inputs of checkpointed functions lie: whole, in parts over tensor-parallel ranks, in
host memory, in files, in long buffers.

autograd asks through saved-tensor hooks: what `pack` returns lives exactly as long as autograd
needs the input, also over several backwards of one graph, and whether or not recomputation is
reentrant. A tensor that several functions take is saved once.

[Note: order of copies]
A copy to the host runs on a side stream, behind the stream that made the tensor. `SideStream`
keeps the tensor until the copy after the next is about to be issued; that stream then waits for the
copy, so that a host that runs ahead holds two inputs and not all of them.

Copies back run on another side stream. Those of a function that is being recomputed begin with the
recomputation of the function that was called after it, into memory of the stream of backward, and
that stream waits for them only when it reads them. So one function's inputs are on the device ahead
of their use; `SideStream` keeps them, for a graph that is dropped meanwhile. A block of a long
buffer remembers the event of its last use, on whatever stream that was; its next user waits for it.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import settings
from deepspeed.runtime.activation_checkpointing.saved_files import Block, InputFiles
from deepspeed.runtime.activation_checkpointing.settings import Settings
from deepspeed.runtime.streams import MAX_KEPT, SideStream

# Smaller inputs stay on the device: to issue a copy takes longer than the copy.
MOVED_NUMEL = 1 << 14  # elements


def is_activation_to_checkpoint(item: object) -> bool:
    """Tell whether `item` is a floating-point tensor with an element for each rank."""
    if not isinstance(item, torch.Tensor) or isinstance(item, nn.Parameter):
        return False
    is_dense = item.is_floating_point() and item.layout is torch.strided
    return is_dense and item.numel() >= settings.current().group_size


def get_partition_size(item: torch.Tensor) -> int:
    """Count the elements of each rank's part; the last ranks' parts may be padded."""
    return -(-item.numel() // settings.current().group_size)


def get_partition_start(item: torch.Tensor) -> int:
    """Find the first element of this rank's part."""
    return get_partition_size(item) * settings.current().group_rank


def part_of(flat: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Copy this rank's part of `flat` ([numel]) to `into` ([partition size]), zero-padded."""
    start, end = get_partition_start(flat), get_partition_start(flat) + into.numel()
    part = flat[start:end]
    into[: part.numel()].copy_(part)
    into[part.numel() :].zero_()
    return into


def whole_of(part: torch.Tensor, numel: int) -> torch.Tensor:
    """Gather all ranks' parts, [numel]. Collective over the tensor-parallel group."""
    chosen = settings.current()
    whole = torch.empty(part.numel() * chosen.group_size, dtype=part.dtype, device=part.device)
    dist.all_gather_into_tensor(whole, part, group=chosen.group)
    return whole[:numel]


def _identity(tensor: torch.Tensor) -> Hashable:
    """Tell tensors apart, and states of one; the memory's name is not given anew while this is."""
    place = StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset()
    return place, tensor.shape, tensor.stride(), tensor.dtype, tensor._version


def _order_in_memory(tensor: torch.Tensor) -> list[int]:
    """List the dimensions from the widest stride to the narrowest. Restored in this order, a tensor
    has the strides it had: another memory format could choose a kernel that rounds otherwise.
    """
    strides = tensor.stride()
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


class LongBuffers:
    """Blocks of equal size in buffers of `num_blocks`; one more when all are used."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free: dict[Any, list[tuple[torch.Tensor, Any]]] = defaultdict(list)

    def take(self, like: torch.Tensor, numel: int, on_host: bool) -> Block:
        """Take a block of `numel` elements of `like`'s dtype and, unless `on_host`, device."""
        free = self._free[(numel, like.dtype, like.device, on_host)]
        if not free:
            buffer = _empty(numel * self._num_blocks, like, on_host)
            free.extend((memory, None) for memory in reversed(buffer.split(numel)))
        memory, last_use = free.pop()
        if last_use is not None:
            get_accelerator().current_stream().wait_event(last_use)
        return Block(memory, free)


def _empty(numel: int, like: torch.Tensor, on_host: bool) -> torch.Tensor:
    if not on_host:
        return torch.empty(numel, dtype=like.dtype, device=like.device)
    # Page-locked: only then does a copy between host and device go on beside the program.
    return get_accelerator().pin_memory(
        torch.empty(numel, dtype=like.dtype, device="cpu"), make_copy=False
    )


@dataclass(frozen=True)
class _AsIs:
    """An input that stays where it is, with its version: it could be changed meanwhile."""

    tensor: torch.Tensor
    version: int


class _Call:
    """One call of a checkpointed function: its moved inputs, as long as autograd keeps them, and
    copies that were brought back to the device on behalf of `stream`. `before` is the call whose
    inputs backward reads next, unless they are gone.
    """

    def __init__(self, before: _Call | None) -> None:
        self.before: Callable[[], _Call | None] = (lambda: None) if before is None else ref(before)
        self.inputs: WeakSet[_Packed] = WeakSet()
        self.copies: WeakKeyDictionary[_Packed, torch.Tensor] = WeakKeyDictionary()
        self.stream: Any = None
        self.is_ahead = False  # nobody waits for the copies yet


@dataclass(eq=False)
class _Moved:
    """A tensor that was moved: `content` is the whole or this rank's part, flat in the order of
    memory; `order` says which dimension stands where in `shape`, which is ordered as in memory.
    `is_changed`: somebody wrote to the tensor while it was copied.
    """

    content: torch.Tensor
    shape: list[int]
    order: list[int]
    device: torch.device
    is_part: bool
    block: Block | None
    file: Block | None  # that `content` lies in
    is_changed: bool = False


@dataclass(frozen=True, eq=False)
class _Packed:
    """An input of a call that was moved; other calls may have it too."""

    moved: _Moved
    call: _Call


def _changed(tensor: torch.Tensor, shape: Sequence[int]) -> RuntimeError:
    return RuntimeError(
        f"an input of a checkpointed function ({tensor.dtype}, {list(shape)}) was modified in "
        "place before backward; clone it first"
    )


class InputStore:
    """Saves inputs as `settings` say; `whole`: not in parts."""

    def __init__(self, chosen: Settings, whole: bool = False) -> None:
        self.settings = chosen
        self._whole = whole
        self.accelerator = accelerator = get_accelerator()
        self._files = InputFiles(chosen.files()) if chosen.files is not None else None
        # On a host that computes by itself, saved inputs are in host memory already.
        is_host = accelerator.is_synchronized_device() and accelerator.device_name() == "cpu"
        self._to_host = chosen.cpu and (self._files is not None or not is_host)
        self._buffers = (
            LongBuffers(chosen.num_checkpoints)
            if chosen.contiguous and chosen.num_checkpoints and not whole
            else None
        )
        names = ("activation copy stream", "activation copy-back stream") if self._to_host else ()
        self._copies = [SideStream(overlap=True, name=name) for name in names]  # there, and back
        self._call = self._last = _Call(None)  # at hand, and the last that has inputs
        self._moved: WeakValueDictionary[Hashable, _Moved] = WeakValueDictionary()
        # What copies to the host read, with its version. The stream that made it doesn't wait yet:
        # whoever writes there now may be faster.
        self._read: deque[tuple[torch.Tensor, int, _Moved]] = deque()

    @property
    def _parts(self) -> bool:
        # Asked each time: the tensor-parallel group may become known after `configure`, with the
        # engine.
        is_asked = self.settings.partition_activations and not self._whole
        return is_asked and self.settings.group_size > 1

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Within it, one checkpointed function is called; calls lie in one another."""
        if not (self._parts or self._to_host or self._buffers):
            yield
            return
        outer, self._call = self._call, _Call(self._last)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._call = outer

    def reset(self) -> None:
        """Let go of buffers; blocks in use live on until they are read."""
        if self._buffers is not None and self.settings.num_checkpoints:
            self._buffers = LongBuffers(self.settings.num_checkpoints)
        if self._files is not None and self.settings.files is not None:
            self._look(0)
            self._files.finish()
            self._files = InputFiles(self.settings.files())

    def pack(self, tensor: torch.Tensor) -> _AsIs | _Packed:
        is_small = self._to_host and not self._parts and tensor.numel() < MOVED_NUMEL
        if is_small or not is_activation_to_checkpoint(tensor):
            return _AsIs(tensor, tensor._version)
        identity = _identity(tensor)
        moved = self._moved.get(identity)
        if moved is None:
            moved = self._moved[identity] = self._move(tensor)
        packed = _Packed(moved, self._call)
        self._call.inputs.add(packed)
        self._last = self._call
        return packed

    def _move(self, tensor: torch.Tensor) -> _Moved:
        order = _order_in_memory(tensor)
        shape = [tensor.shape[dim] for dim in order]
        flat = tensor.detach().permute(order).reshape(-1)
        kept = self._kept_on_host(flat) if self._to_host else (*self._kept(flat), None)
        content, block, file = kept
        moved = _Moved(content, shape, order, tensor.device, self._parts, block, file)
        if self._to_host and not self._parts:
            self._read.append((flat, flat._version, moved))
        return moved

    def _look(self, left: int) -> None:
        """See whether what copies read was changed meanwhile; `left` of the newest stay."""
        while len(self._read) > left:
            read, version, moved = self._read.popleft()
            moved.is_changed |= read._version != version

    def _kept(self, flat: torch.Tensor) -> tuple[torch.Tensor, Block | None]:
        """Copy this rank's part, or all of it, on the device."""
        numel = get_partition_size(flat) if self._parts else flat.numel()
        block = (
            self._buffers.take(flat, numel, on_host=False) if self._buffers is not None else None
        )
        content = block.memory if block is not None else _empty(numel, flat, on_host=False)
        if self._parts:
            part_of(flat, content)
        else:
            content.copy_(flat)
        if block is not None:
            block.used()
        return content, block

    def _kept_on_host(self, flat: torch.Tensor) -> tuple[torch.Tensor, Block | None, Block | None]:
        self._look(MAX_KEPT - 1)
        copies, _ = self._copies
        source, block, file = flat, None, None
        if self._parts:
            source = part_of(flat, _empty(get_partition_size(flat), flat, on_host=False))
        producer = copies.current_stream()
        copies.wait_for([producer])
        with copies.issue():
            if self._files is not None:
                memory, content, file = self._files.save(source)
            else:
                if self._buffers is not None:
                    block = self._buffers.take(source, source.numel(), on_host=True)
                content = _empty(source.numel(), source, True) if block is None else block.memory
                memory = content.copy_(source, non_blocking=True)
            if block is not None:
                block.used()
        # The input may be dropped, and its memory reused on its own stream, before the copy has
        # read it.
        copies.keep_alive([source, memory], [producer])
        return content, block, file

    def unpack(self, packed: _AsIs | _Packed) -> torch.Tensor:
        """Restore an input unless it was changed. Collective over tensor ranks if partitioned."""
        if isinstance(packed, _AsIs):
            if packed.tensor._version != packed.version:
                raise _changed(packed.tensor, packed.tensor.shape)
            return packed.tensor
        moved = packed.moved
        content = self._back(packed) if self._copies else moved.content
        inverse = sorted(range(len(moved.order)), key=moved.order.__getitem__)
        if moved.is_changed:
            raise _changed(content, [moved.shape[dim] for dim in inverse])
        whole = whole_of(content, math.prod(moved.shape)) if moved.is_part else content
        if moved.block is not None:
            # The block is given back when autograd drops it, before the recomputed graph is done
            # with the input.
            whole = whole.clone() if whole is moved.content else whole
            moved.block.used()
        return whole.view(moved.shape).permute(inverse)

    def _back(self, packed: _Packed) -> torch.Tensor:
        """The copy on the device; those of the call before are begun when the first is read."""
        (_, copies_back), call = self._copies, packed.call
        if packed not in call.copies or call.stream != copies_back.current_stream():
            self._bring_back(call)
        if call.is_ahead:
            call.is_ahead = False
            copies_back.join()  # before more is behind it
            before = call.before()
            if before is not None and not before.is_ahead:
                self._bring_back(before)
        return call.copies.pop(packed)

    def _bring_back(self, call: _Call) -> None:
        copies_there, copies_back = self._copies
        self._look(0)
        copies_there.join()
        call.stream, call.is_ahead = copies_back.current_stream(), True
        inputs = list(call.inputs)
        kept = [one.moved.content for one in inputs]
        # Memory of the reading stream, which may drop it after it has waited.
        copies = [
            torch.empty(content.shape, dtype=content.dtype, device=one.moved.device)
            for one, content in zip(inputs, kept, strict=True)
        ]
        copies_back.wait_for([call.stream])
        with copies_back.issue():
            for one, copy in zip(inputs, copies, strict=True):
                for start, end, memory in self._host_memory(one.moved):
                    copy[start:end].copy_(memory, non_blocking=True)
                call.copies[one] = copy
                if one.moved.block is not None:
                    one.moved.block.used()
        copies_back.keep_alive([*copies, *kept], [call.stream])
        before = call.before()
        if self._files is not None and before is not None:
            for one in before.inputs:
                if one.moved.file is not None:
                    self._files.begin(one.moved.file, one.moved.content)

    def _host_memory(self, moved: _Moved) -> Iterable[tuple[int, int, torch.Tensor]]:
        """Yield first, last+1 element and memory of what was moved, piece by piece."""
        if self._files is None or moved.file is None:
            return [(0, moved.content.numel(), moved.content)]
        return self._files.parts(moved.file, moved.content)


_stores: dict[bool, InputStore] = {}


def stores() -> Iterable[InputStore]:
    """Return those that are in use."""
    return _stores.values()


def store(whole: bool = False) -> InputStore:
    """Return the store of the settings in force, or one that keeps inputs `whole` whatever they
    say.
    """
    made, now = _stores.get(whole), (settings.current(), get_accelerator())
    if made is None or made.settings is not now[0] or made.accelerator is not now[1]:
        made = _stores[whole] = InputStore(now[0], whole)
    return made
