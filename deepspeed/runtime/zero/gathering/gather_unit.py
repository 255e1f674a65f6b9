"""`GatherUnit`: parameters that are gathered together, by one collective.

Their shards lie behind one another in one buffer. A gather has two halves, so that the first can be
issued ahead of time:

    start    load stream     own shard, from host memory -> own row   (offload_param only; where
                             shards lie in files, of what `shard_files` has read)
             gather stream   shards of all ranks -> rows `[N, s]`     (one all-gather)
    finish   current stream  rows -> whole parameters                 (one grouped copy)

A unit of one rank copies nothing: its whole parameters are views of the shard.

With `SecondaryShards` the gather stream keeps some rows, from which later gathers fill them.

[Note: edges of a gather]
1. shard updated -> gathered: the gather stream (or the load stream) waits for the event after the
   last update;
2. rows read by an earlier copy-out, or filled by a gather that nobody came for -> rows filled: the
   pool's events;
3. gathered -> copied out: the current stream waits for the event behind the all-gather;
4. whole memory last read -> written by a later copy-out: the pool's events, of every stream that
   `fetch` was called on;
5. copied out -> read: a stream that calls `fetch` later waits for the event behind the copy;
6. shard loaded -> gathered: the gather stream waits for the event behind the load;
7. shard read by a gather or loaded -> written: who writes to shards on the host waits
   (`before_write`), or lets the device's stream wait that the update is issued on. A gather that
   nobody came for may still be reading; the update's norm need not come behind it, which is over
   other ranks where shards have several copies. Nor need it come behind what another stream has
   read of a shard that is what is whole.

Who needs a unit, and when it goes, is the coordinator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import Event, Stream, get_accelerator
from deepspeed.comm.shard_ops import PendingShards, gather_from_owners
from deepspeed.comm.watch import lone_waits
from deepspeed.comm.watch.observation import announce
from deepspeed.runtime.sharding.cut_rows import WholeViews
from deepspeed.runtime.sharding.flattening import joined, lies_on_host
from deepspeed.runtime.sharding.fragments import ParameterCutTable
from deepspeed.runtime.sharding.value_samples import ValueSample
from deepspeed.runtime.zero.gathering.memory_pool import GatherResources, PoolBuffer, poison
from deepspeed.runtime.zero.gathering.shard_files import is_moved
from deepspeed.runtime.zero.parameters.zero_parameter import (
    ShardRecord,
    ZeroParamStatus,
    hide,
    note_value,
    record_of,
    show,
    was_written,
    whole_value,
)

# Messages of gathers, one tag for each unit: ranks that part wait for each other instead of taking
# one unit's shards for another's.
_FIRST_TAG = 1 << 16


def _refuse_lost(names: Sequence[str]) -> None:
    if names:
        raise RuntimeError(
            f"{', '.join(names[:4])} changed while whole (ZeRO stage 3) outside of any block, and "
            "the change is lost: change parameters inside `with "
            "deepspeed.zero.GatheredParameters(param, modifier_rank=0)`, which may stand in a "
            "forward too"
        )


def _filled(buffer: PoolBuffer, table: ParameterCutTable) -> torch.Tensor:
    """What of a buffer, which holds whole parameters too, are rows."""
    return buffer.tensor[: table.rows_numel(buffer.tensor.element_size())]


class _Gather(NamedTuple):
    """A gather under way; `done` is behind it on the gather stream, if there is one."""

    rows: PoolBuffer
    pending: PendingShards
    done: Event | None


def _sample_of(buffer: PoolBuffer, params: Sequence[torch.Tensor]) -> ValueSample:
    # Not the buffer, which has the sample: its memory would stay until garbage is collected.
    memory = buffer.tensor
    start = memory.storage_offset()
    parts = [(int(param.storage_offset() - start), param.numel()) for param in params]
    return ValueSample(lambda: memory, parts)


class GatherUnit:
    """Parameters of one dtype, device and group, and their gathers.

    Args:
        persists: Whole between steps, in memory of its own.
        takes_shards: The parameters' shards lie in the unit's buffer from now on.
        is_fused: Several modules share it; see [Note: units of several modules].

    Attributes:
        coordinator: Who knows who needs it; None for what persists, or is read by hand.
        shard: This rank's shards, `[shard_numel]`.
        holds: How many running forwards need it.
        is_kept_for_backward: The running backward needs it.
        num_read_apart: How many of its parameters somebody has whole in memory of its own.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[nn.Parameter],
        resources: GatherResources,
        persists: bool = False,
        takes_shards: bool = True,
        is_fused: bool = False,
    ) -> None:
        self.name = name
        self.params = list(params)
        self.is_fused = is_fused
        self.persists = persists
        self.index = -1
        self.coordinator: Any = None
        self.records: list[ShardRecord] = [record_of(param) for param in params]
        self.table = ParameterCutTable.cut(
            [record.numel for record in self.records], dist.get_world_size(group=self.group)
        )
        near = None if persists else resources.settings.secondary_group
        self.shard = joined([record.shard for record in self.records], takes_shards)
        rows_numel = self.table.rows_numel(self.shard.element_size())
        self._secondary = None if near is None else SecondaryShards(near, rows_numel)
        # What is not is copied before the host goes on.
        self._is_locked = get_accelerator().is_pinned(self.shard)
        self.holds = 0
        self.is_kept_for_backward = False
        self.num_read_apart = 0
        self.resources = resources
        self._under_way: _Gather | None = None
        self._memory: PoolBuffer | None = None
        self._own_memory: PoolBuffer | None = None  # of what persists, or the shard
        self._readers: set[Stream] = set()
        self._update = 0  # how many there were when its gather began
        resources.mark_updated()
        if takes_shards:
            self.use_shard(self.shard)

    def use_shard(self, shard: torch.Tensor) -> None:
        self.shard = shard
        self._is_locked = get_accelerator().is_pinned(shard)
        self.resources.mark_updated()
        for record, start, cut in zip(
            self.records, self.table.cut_starts, self.table.cuts, strict=False
        ):
            record.shard = shard[start : start + cut]

    @property
    def group(self) -> dist.Group:
        return self.records[0].group

    @property
    def device(self) -> torch.device:
        return self.records[0].device

    @property
    def numel(self) -> int:
        return self.table.numel

    @cached_property
    def _whole_numel(self) -> int:
        return WholeViews.numel_of(self.table, self.shard.dtype)

    @property
    def label(self) -> str:
        return f"the gather of {self.name or 'parameters of the model itself'}"

    # State

    @property
    def shows_shard(self) -> bool:
        """Whether it is whole, and the shard itself is what is."""
        return self.is_whole and not self.persists and self._memory is self._own_memory

    def _may_show_shard(self) -> bool:
        if self.table.num_shards > 1 or self.persists or self.resources.is_poisoned:
            return False
        shard, is_own = self.shard, self.records[0].unit is self
        starts = (shard.storage_offset() + start for start in self.table.cut_starts[:-1])
        # Kernels would find the rest badly aligned.
        is_aligned = all(start * shard.element_size() % 16 == 0 for start in starts)
        is_here = shard.device == self.device and not lies_on_host(shard)
        return is_own and is_aligned and is_here and not is_moved(shard)

    @property
    def buffer(self) -> PoolBuffer:
        assert self._memory is not None, f"unit {self.name} is not whole"
        return self._memory

    @property
    def is_whole(self) -> bool:
        return self._memory is not None

    @property
    def is_on_its_way(self) -> bool:
        return self._under_way is not None

    @property
    def is_covered(self) -> bool:
        """Whether all of its parameters are whole elsewhere."""
        return self.num_read_apart == len(self.params)

    @property
    def whole_bytes(self) -> int:
        return self._whole_numel * self.shard.element_size()

    @property
    def whole_params(self) -> list[torch.Tensor]:
        if self.shows_shard:
            return [record.shard.view(record.shape) for record in self.records]
        whole: WholeViews = self.buffer.views[self]
        return whole.params

    def hand_out(self) -> list[torch.Tensor]:
        """Return the whole parameters and let go of their memory: the unit would keep itself alive
        by it, until the interpreter looks for circles.
        """
        whole = self.whole_params
        self._memory = None
        return whole

    # Gathering

    @torch.inference_mode(False)  # memory and views are used for training later
    @torch.no_grad()
    def start(self) -> None:
        """Begin the gather, on the gather stream if there is one. Idempotent."""
        if self.is_whole or self.is_on_its_way:
            return
        shared = self.resources
        if shared.are_away:
            raise RuntimeError(
                f"{self.label} while offload_states keeps lp_params off the device: call "
                "reload_states() first"
            )
        if self._may_show_shard():
            return
        group, own, shard, self._update = self._source()
        announce(self.label, group)
        with shared.loading():
            rows = shared.pool.take(
                self._whole_numel, self.shard.dtype, self.device, (self, "rows")
            )
            filled = _filled(rows, self.table)
            shared.fill(filled[own], shard, self._is_locked)
        try:
            with shared.gather.issue():
                pending, done = self._issue(filled, group)
        except BaseException:
            # Not to be used again: what was issued before it failed may still write there.
            shared.pool.drop(rows)
            raise
        self._under_way = _Gather(rows, pending, done)
        for record in self.records:
            if record.status is ZeroParamStatus.NOT_AVAILABLE:
                record.status = ZeroParamStatus.INFLIGHT

    def _issue(self, rows: torch.Tensor, group: dist.Group) -> tuple[PendingShards, Event | None]:
        shared, tag = self.resources, _FIRST_TAG + self.index
        in_turn = shared.settings.by_broadcast
        pending = gather_from_owners(rows, group, in_turn, async_op=True, tag=tag)
        if shared.gather.stream is None:
            return pending, None
        # The gather stream waits, not the host; what comes later on it comes after.
        pending.wait()
        self._keep(rows)
        shared.last_gather = shared.gather.stream.record_event()
        return pending, shared.last_gather

    def _source(self) -> tuple[dist.Group, slice, torch.Tensor, int]:
        """Say over which ranks to gather, what of the rows is here and where, and its update."""
        near, num_updates = self._secondary, self.resources.num_updates
        if near is not None and near.shard is not None:
            return near.group, near.own, near.shard, near.update
        if near is not None:
            near.expect(num_updates)
        row = self.table.row(dist.get_rank(group=self.group), self.shard.element_size())
        return self.group, row, self.shard, num_updates

    def _keep(self, rows: torch.Tensor) -> None:
        if self._secondary is not None:
            self._secondary.keep(rows)

    def forget_secondary(self) -> None:
        """Gather from all ranks next: a copy of the shards is older than they may be."""
        if self._secondary is None:
            return
        self._secondary.forget()
        if self.resources.is_poisoned:
            # On the stream that reads copies and makes them.
            with self.resources.gather.issue():
                self._secondary.poison()

    def before_write(self) -> None:
        self.forget_secondary()
        self.resources.before_write()

    def fetch(self) -> None:
        """Have the parameters whole for what is issued from now on on the current stream."""
        if self._memory is None:
            self.start()
            self._memory = self._finish() if self.is_on_its_way else self._show_shard()
        if self._update != self.resources.num_updates:
            raise RuntimeError(
                f"unit {self.name} was gathered before update {self.resources.num_updates} of the "
                f"shards, after update {self._update}: nothing may be gathered over a step"
            )
        if self.resources.gather.has_streams:
            stream = get_accelerator().current_stream()
            if stream not in self._readers:
                stream.wait_event(self._memory.filled)
                self._readers.add(stream)
            if self.shows_shard:
                self.resources.shard_readers.add(stream)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _finish(self) -> PoolBuffer:
        shared = self.resources
        assert self._under_way is not None, f"unit {self.name}: finished before it was started"
        rows, pending, done = self._under_way
        current = get_accelerator().current_stream() if shared.gather.has_streams else None
        if current is not None and done is not None:
            current.wait_event(done)
            lone_waits.watch.issued(lambda: self.label, done)
        else:
            with lone_waits.watch.waiting(lambda: self.label):
                self._wait(rows, pending)
            self._keep(_filled(rows, self.table))
        memory = self._take_memory()
        views = memory.views.get(self)
        if views is None:
            shapes = [record.shape for record in self.records]
            views = memory.views[self] = WholeViews(self.table, shapes, memory.tensor)
        views.copy_out(_filled(rows, self.table))
        shared.pool.give_back(rows, () if current is None else (current,))
        self._under_way = None
        if current is not None:
            memory.filled = current.record_event()
            self._readers = {current}
        self._show(views.params)
        return memory

    def _show(self, whole_params: Sequence[torch.Tensor]) -> None:
        for param, record, whole in zip(self.params, self.records, whole_params, strict=True):
            if not record.readers:
                show(param, whole)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _show_shard(self) -> PoolBuffer:
        memory = self._own_memory = PoolBuffer(self.shard.detach())
        memory.owner, memory.filled = self, self.resources.shards_updated
        self._update = self.resources.num_updates
        self._show([record.shard.view(record.shape) for record in self.records])
        return memory

    def _take_memory(self) -> PoolBuffer:
        if not self.persists:
            return self.resources.pool.take(self._whole_numel, self.shard.dtype, self.device, self)
        if self._own_memory is None:
            own = torch.empty(self._whole_numel, dtype=self.shard.dtype, device=self.device)
            self._own_memory = PoolBuffer(own)
        return self._own_memory

    def refresh(self) -> None:
        """Gather anew what persists, into the memory where it is."""
        self._memory = None
        self.fetch()
        if self.buffer.sample is None:
            self.buffer.sample = _sample_of(self.buffer, self.whole_params)
        else:
            self.buffer.sample.note_all()

    def release(self) -> None:
        """Give the memory back when nobody needs the parameters whole. Idempotent; nothing for what
        persists. Raises RuntimeError if something has written to them.
        """
        self._abandon()
        if self._memory is None or self.persists:
            return
        written = []
        for param, record in zip(self.params, self.records, strict=True):
            if not record.readers:
                if was_written(param):
                    written.append(record.label)
                hide(param)
        self.forget()
        _refuse_lost(written)

    def refuse_lost_writes(self) -> None:
        """Raise RuntimeError if something has written to what persists, and is to be replaced."""
        if not self.is_whole:
            return
        shown = enumerate(zip(self.params, self.records, strict=True))
        # Moving the model to another device and back gives them other memory.
        written = [at for at, (param, one) in shown if one.seen[0] != param._version]
        if self.buffer.sample is not None:
            written += self.buffer.sample.changed()
        _refuse_lost([self.records[at].label for at in dict.fromkeys(written)])

    @property
    def is_read(self) -> bool:
        """Whether a script has some of its parameters whole."""
        return any(record.readers or record.num_lent for record in self.records)

    def put_away(self) -> None:
        """Keep nothing on the device that was made of the shards, which leave it, say."""
        if self._secondary is not None:
            self._secondary.drop()
        if self.persists:
            self.forget()
            if self._own_memory is not None and self.resources.is_poisoned:
                poison(self._own_memory.tensor)
            self._own_memory = None
            for param in self.params:
                hide(param)

    def forget(self) -> None:
        if self._memory is not None and self._memory is not self._own_memory:
            self.resources.pool.give_back(self._memory, self._readers)
        elif not self.persists:
            self._own_memory = None
        self._memory = None
        self._readers = set()

    def _abandon(self) -> None:
        if self._under_way is None:
            return
        # The host waits where there are no streams; on others who fills the rows next waits.
        rows, pending, _ = self._under_way
        self._wait(rows, pending)
        stream = self.resources.gather.stream
        self.resources.pool.give_back(rows, () if stream is None else (stream,))
        self._has_no_gather()

    def _has_no_gather(self) -> None:
        self._under_way = None
        for record in self.records:
            if record.status is ZeroParamStatus.INFLIGHT:
                record.status = ZeroParamStatus.NOT_AVAILABLE

    def _wait(self, rows: PoolBuffer, pending: PendingShards) -> None:
        try:
            pending.wait()
        except BaseException:
            self.resources.pool.drop(rows)  # others may still write there
            self._has_no_gather()
            raise

    def _view_of(self, param: nn.Parameter) -> torch.Tensor:
        shown = zip(self.params, self.whole_params, strict=True)
        return next(whole for other, whole in shown if other is param)

    @torch.no_grad()
    def follow(self, param: nn.Parameter) -> None:
        """Copy what a script has changed of `param`, in memory of its own, to that of the unit."""
        if self.is_whole and record_of(param).readers:
            self._view_of(param).copy_(whole_value(param))

    @torch.no_grad()
    def restore(self, param: nn.Parameter, values: torch.Tensor) -> None:
        self._view_of(param).copy_(values)
        self.show_again(param)

    def show_again(self, param: nn.Parameter) -> None:
        """Show `param` in the unit's memory, if that is whole: who had it elsewhere lets it go."""
        if self.is_whole:
            show(param, self._view_of(param))


def note_written(param: nn.Parameter) -> None:
    """Remember what a whole parameter shows now: it was written to, and its shards say so, or it is
    to be forgotten.
    """
    note_value(param)
    unit: GatherUnit | None = record_of(param).unit
    if unit is not None and unit.is_whole and unit.buffer.sample is not None:
        own = next(index for index, other in enumerate(unit.params) if other is param)
        unit.buffer.sample.note((own,))


class SecondaryShards:
    """A unit's shards a second time, cut among the ranks of a node (`zero_hpz_partition_size`).

    Of the rows `[N, s]` of a gather, the shards of all N ranks, each of the h ranks of a node keeps
    N / h, which are neighbours (`own`). So together they have all, and the unit's next gather need
    not leave the node; what it fills are the same rows.

    [Note: how long a copy is right]
    The first gather of a pass makes it, of the shards after so many updates (`update`). It is
    forgotten when shards change (an update, loading, a script's edit) and when the next outermost
    forward begins: what a rank writes to its own shard between two passes (`safe_set_local_*`) is
    then seen as without a copy, though no other rank hears of it. Whether there is a copy decides
    over which ranks the next gather goes, so whatever makes one or forgets it happens on all ranks
    alike.
    """

    def __init__(self, group: dist.Group, rows_numel: int) -> None:
        self.group = group
        numel = rows_numel // dist.get_world_size(group=group)
        start = dist.get_rank(group=group) * numel
        self.own = slice(start, start + numel)
        self.update = -1
        self._is_wanted = False
        self._is_right = False
        self._memory: torch.Tensor | None = None

    @property
    def shard(self) -> torch.Tensor | None:
        """The copy, 1-D, if there is one that is right."""
        return self._memory if self._is_right else None

    def expect(self, update: int) -> None:
        self._is_wanted, self.update = True, update

    @torch.no_grad()
    def keep(self, rows: torch.Tensor) -> None:
        """Copy gathered rows, by the current stream, unless shards were written since `expect`."""
        if not self._is_wanted:
            return
        if self._memory is None:
            self._memory = torch.empty_like(rows[self.own])
        self._memory.copy_(rows[self.own])
        self._is_wanted, self._is_right = False, True

    def forget(self) -> None:
        self._is_wanted = self._is_right = False

    def poison(self) -> None:
        if self._memory is not None:
            poison(self._memory)

    def drop(self) -> None:
        """Forget it and its memory, which is that of the stream that gathers."""
        self.forget()
        self._memory = None
