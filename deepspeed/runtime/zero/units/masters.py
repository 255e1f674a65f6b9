"""Masters of stage 3: of every parameter a cut, rounded into this rank's shards.

[Note: shards of units and of groups]
The model-precision shard of an optimizer group is one buffer, that of a gather unit too. Where a
unit's parameters follow one another in one group the unit's shard is a view of the group's, and an
update is there at once. Otherwise (frozen parameters beside trainable ones, groups with and without
weight decay) it is a copy, which follows each update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.state_files import place_in_file
from deepspeed.runtime.gradients.reduction import GradientContext
from deepspeed.runtime.optimizers.group_layout import GroupLayout
from deepspeed.runtime.optimizers.master_weights import Publishing
from deepspeed.runtime.optimizers.settings import ShardSettings, StepSettings
from deepspeed.runtime.optimizers.step_outcome import GradientScaling
from deepspeed.runtime.sharding.flattening import lies_on_host
from deepspeed.runtime.sharding.fragments import ParameterCutTable
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.sharding.publisher import NUM_STAGED, Gather, Publisher
from deepspeed.runtime.streams import StagingBuffers
from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit, note_written
from deepspeed.runtime.zero.gathering.memory_pool import GatherResources
from deepspeed.runtime.zero.gathering.shard_files import ShardWrites, is_moved
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.parameters.zero_parameter import (
    ZeroParamStatus,
    record_of,
    whole_value,
)
from deepspeed.runtime.zero.stage_1_and_2 import ZeroMasters
from deepspeed.runtime.zero.units.partial_offload import DevicePart, num_kept

Copies = list[tuple[torch.Tensor, torch.Tensor]]


class CutLayout(GroupLayout):
    """Every parameter is cut by itself, in files as in memory."""

    def _kept_on_device(self, params: Sequence[Sequence[nn.Parameter]]) -> list[int]:
        offload = self.settings.offload
        if offload is None or offload.ratio == 1.0:
            return super()._kept_on_device(params)
        numels = [[record_of(param).numel for param in theirs] for theirs in params]
        return num_kept(numels, offload.ratio)

    def _tables(
        self, params: Sequence[nn.Parameter], num_shards: int, alignment: int
    ) -> tuple[ParameterCutTable, ParameterCutTable]:
        table = ParameterCutTable.cut([record_of(param).numel for param in params], num_shards)
        return table, table

    def _maker(self, params: Sequence[nn.Parameter]) -> Callable[..., ShardedGroup]:
        return partial(ShardedGroup, params, shards=[record_of(param).shard for param in params])


class ShardWriter(Publisher):
    """Rounds updated masters into this rank's shard of a group, and gathers nothing."""

    def __init__(self, group: ShardedGroup, resources: GatherResources) -> None:
        super().__init__(group, group.table.padded_numel, by_broadcast=True)
        self._writes: ShardWrites | None = None
        reads = resources.settings.reads
        if reads is not None and place_in_file(group.flat) is not None:
            # A piece is memory until it is written.
            self._writes = ShardWrites(reads.make_handle, resources.keep_disk_error)
            self._on_host = False
            self._staging = StagingBuffers(NUM_STAGED, pin=reads.pinned)

    def _plan(self, bucket_size: int) -> Iterator[Gather]:
        sections = self._group.table.sections
        if sections:
            yield Gather(sections[0], 0, self._group.table.shard_numel)

    def _sections(self) -> Iterator[tuple[int, int]]:
        """Cut for the host: on their way there, rounded ones take memory of the device."""
        return self.pieces() if lies_on_host(self._group.flat) else super()._sections()

    def _send(self, source: torch.Tensor, start: int) -> None:
        """Send to shards on the host too, from masters there or on the device."""
        own = self._group.own(start, start + source.numel())
        if self._writes is not None and is_moved(own):
            self._write(own, source, self._writes)
        elif not lies_on_host(own):
            super()._send(source, start)
        elif lies_on_host(source):
            own.copy_(source)
        else:
            # Rounded first: fewer bytes cross.
            self._copy(own, source.to(own.dtype), asynchronous=get_accelerator().is_pinned(own))

    def _write(self, own: torch.Tensor, source: torch.Tensor, writes: ShardWrites) -> None:
        if self._staged is not None:
            self._sent = writes.begin(source, own)
            return
        piece = self._staging.take(own.numel(), own.dtype)
        # Rounded first, as above.
        piece[: own.numel()].copy_(source.to(own.dtype))
        self._sent = writes.begin(piece[: own.numel()], own)
        self._staging.give_back(piece, self._sent)

    def finish(self) -> None:
        super().finish()
        if self._writes is not None:
            self._writes.finish()

    def _gather(self, gather: Gather) -> None:
        """Who needs the parameters gathers them."""


class ShardPublishing(Publishing):
    """Rounds masters into shards. Only what persists is gathered now."""

    def __init__(
        self,
        groups: Sequence[ShardedGroup],
        settings: ShardSettings,
        num_groups: int,
        parameter_offload: DeepSpeedZeRoOffload,
    ) -> None:
        super().__init__(groups, settings)
        self._num_groups = num_groups
        self._parameter_offload = parameter_offload

    def _publisher(self, group: ShardedGroup) -> Publisher:
        return ShardWriter(group, self._parameter_offload.resources)

    def publish(self, delivered: bool = False) -> None:
        self._parameter_offload.before_update()
        if self._settings.offload is not None:
            self._parameter_offload.resources.before_write()
        for publisher in self.publishers()[self._num_groups :] if delivered else ():
            publisher.publish()
        super().publish(delivered)
        self._copy_to_units()
        self._parameter_offload.after_update()

    @torch.no_grad()
    def _copy_to_units(self) -> None:
        if self.copied:
            torch._foreach_copy_([to for to, _ in self.copied], [own for _, own in self.copied])


class CutMasters(ZeroMasters):
    """Masters of stage 3; with `offload_optimizer.ratio` the `device_part` stays on the device."""

    publishing: ShardPublishing

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        context: GradientContext,
        steps: StepSettings,
        layout: CutLayout,
        parameter_offload: DeepSpeedZeRoOffload,
    ) -> None:
        super().__init__(init_optimizer, context, steps, layout)
        self.parameter_offload = parameter_offload
        count = len(init_optimizer.param_groups)
        kept = self.groups[count:]
        names = [self.names(count + number) for number in range(len(kept))]
        self.device_part = DevicePart(init_optimizer, kept, names) if kept else None
        if self.device_part is not None:
            self.partial.join(self.device_part.partial)
        self.publishing = ShardPublishing(self.groups, self.settings, count, parameter_offload)
        for unit in (*parameter_offload.units, *parameter_offload.persistent_units):
            self.publishing.copied += self._place_shard(unit)
        parameter_offload.fit_reads()

    def _place_shard(self, unit: GatherUnit) -> Copies:
        """Let a unit's shard be a view of a group's; otherwise return the pieces (to, from) by
        which it follows. See [Note: shards of units and of groups].
        """
        places = [self.places.get(param) for param in unit.params]
        first = places[0]
        if first is not None and all(
            place == (first.group, first.param_index + step) for step, place in enumerate(places)
        ):
            group = self.groups[first.group]
            table: Any = group.table
            start = table.cut_starts[first.param_index]
            unit.use_shard(group.flat[start : start + unit.table.shard_numel])
            return []
        return [
            (record.shard, self._cut(place.group, place.param_index))
            for record, place in zip(unit.records, places, strict=True)
            if place is not None
        ]

    def _cut(self, group: int, param_index: int) -> torch.Tensor:
        return self.groups[group].cut_of(param_index, self.groups[group].flat)

    # Update

    def scaled_global_norm(self) -> torch.Tensor:
        self.parameter_offload.raise_disk_error()  # before the state of this step is touched
        return super().scaled_global_norm()

    @torch.no_grad()
    def update(self, scaling: GradientScaling) -> None:
        """Step, unless old values are kept. Optimizers on the host write to shards there."""
        self.parameter_offload.refuse_holders()
        resources = self.parameter_offload.resources
        # Masters may be what gathers read.
        resources.before_write() if self.cpu_offload else resources.before_update()
        if self.device_part is not None:
            # First: the device is busy with it while the host updates its own part.
            self.device_part.step(scaling)
        try:
            super().update(scaling)
        except OSError:  # on all ranks, of files of state
            resources.disk_error = None
            raise
        self.parameter_offload.raise_disk_error()

    def refresh_fp32_params(self) -> None:
        """Take over also from the shards of units, which were loaded or edited."""
        with torch.no_grad():
            for shard, own in self.publishing.copied:
                own.copy_(shard)
        super().refresh_fp32_params()

    @torch.no_grad()
    def set_param(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Set it in the shard, and in what is whole."""
        record = record_of(param)
        is_whole = record.status is ZeroParamStatus.AVAILABLE
        if is_whole:
            whole_value(param).copy_(value)
        record.write(value)
        if is_whole:
            note_written(param)
        self._follow_shard(param)
        self.parameter_offload.shard_changed(param)

    def _follow_shard(self, param: nn.Parameter) -> torch.Tensor:
        """The group's shard <- that of the unit, which was edited; returns the group's cut."""
        cut = self._cut(*self.places[param])
        cut.copy_(record_of(param).shard)
        return cut

    @torch.no_grad()
    def on_edit(self, param: nn.Parameter) -> None:
        """Let the master follow a shard that a script has changed."""
        place = self.places.get(param)
        if place is not None:
            group = self.groups[place.group]
            group.cut_of(place.param_index, group.master).copy_(self._follow_shard(param))
        # After the master, which in fp32 is the memory that gathers read.
        self.parameter_offload.shard_changed(param)

    @torch.no_grad()
    def set_own_masters(self, own: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Set masters from this rank's elements of parameters, 1-D without padding, which the
        shards have rounded already. What is not trained here is left alone.
        """
        for param, value in own.items():
            place = self.places.get(param)
            if place is not None:
                group = self.groups[place.group]
                group.cut_of(place.param_index, group.master)[: value.numel()].copy_(value)

    # State

    @property
    def state(self) -> Any:
        state = self.optimizer.state
        return {**state, **self.device_part.optimizer.state} if self.device_part else state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    def numbered_params(self) -> list[list[nn.Parameter]]:
        """List what stays on the device first."""
        if self.device_part is None:
            return super().numbered_params()
        count = len(self.optimizer.param_groups)
        pairs = zip(self.groups[:count], self.groups[count:], strict=True)
        return [[*device.params, *host.params] for host, device in pairs]

    def shard_numels(self) -> list[int]:
        numels = [0] * len(self.optimizer.param_groups)
        for index, group in enumerate(self.groups):
            numels[self._param_group_of(index)] += group.table.shard_numel
        return numels

    def partition_counts(self) -> int | list[int]:
        """Over how many ranks parameters are cut; of each group if experts are over fewer."""
        counts = [group.num_shards for group in self.groups[: len(self.optimizer.param_groups)]]
        return counts if set(counts) - {self.num_shards} else self.num_shards
