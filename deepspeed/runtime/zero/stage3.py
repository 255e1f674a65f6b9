"""ZeRO stage 3: parameters sharded too.

What is whole when is `parameter_offload`'s; here is the optimizer. It is stage 2 with another
layout: every parameter is cut by itself (`ParameterCutTable`), so a bucket is a unit, whose
gradients are copied together into rows `[N, s]` and reduced by one even reduce-scatter, of which a
rank gets its row. When the masters are updated they are rounded into this rank's shards, and nobody
gathers anything but what persists: that is done by the next forward.

[Note: shards of units and of groups]
The model-precision shard of an optimizer group is one buffer, that of a gather unit too. Where a
unit's parameters follow one another in one group the unit's shard is a view of the group's, and an
update is there at once. Otherwise (frozen parameters beside trainable ones, groups with and without
weight decay) it is a copy, which follows each update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed._lazy import lazy_attributes
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
    ZERO_STAGE,
)
from deepspeed.comm.shard_ops import PendingShards, reduce_to_owners
from deepspeed.runtime.gradients.readiness import UnitReadiness
from deepspeed.runtime.optimizers.state_layout import StateLayout
from deepspeed.runtime.optimizers.step_outcome import GradientScaling
from deepspeed.runtime.sharding.cut_rows import RowFiller
from deepspeed.runtime.sharding.fragments import ParameterCutTable
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.sharding.loading_in_place import load_in_place
from deepspeed.runtime.sharding.publisher import Publisher
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit
from deepspeed.runtime.zero.movable_weights import have_back, let_leave, weights_of
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.parameters.zero_parameter import ZeroParamStatus, record_of
from deepspeed.runtime.zero.partial_offload import DevicePart, num_kept
from deepspeed.runtime.zero.shard_writer import ShardWriter
from deepspeed.runtime.zero.sharded_state import is_dealt_alike
from deepspeed.runtime.zero.stage_1_and_2 import (
    BucketBuffer,
    DeepSpeedZeroOptimizer,
    IPGBucket,
    Reduction,
)
from deepspeed.runtime.zero.unit_buckets import buckets_of
from deepspeed.utils.tensor_fragment import owned_gradients

# Upstream's further names here, or what to use instead of them.
__getattr__ = lazy_attributes(
    __name__,
    {
        "unwrap_model_for_generation": "deepspeed.runtime.zero.partition_parameters",
        **{
            f"estimate_zero3_model_states_mem_needs{kind}": (
                "deepspeed.runtime.zero.estimates.stage3"
            )
            for kind in ("", "_all_cold", "_all_live")
        },
    },
)


class DeepSpeedZeroOptimizer_Stage3(DeepSpeedZeroOptimizer):  # upstream's name
    """See module.

    Args:
        init_optimizer: torch optimizer over the model's parameters.
        param_names: Name of each parameter, in model order.
        parameter_offload: Gathers the model's parameters.
        kwargs: See `DeepSpeedZeroOptimizer`.
    """

    readiness: UnitReadiness

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        *,
        parameter_offload: DeepSpeedZeRoOffload,
        backward_started: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> None:
        self.parameter_offload = parameter_offload
        parameter_offload.give_up = self._give_up
        parameter_offload.backward_order.on_done = self._send_unit
        self._is_in_parameter_hook = False
        self._sends_units = False
        if backward_started is not None:
            kwargs["backward_started"] = partial(self._parameter_has_gradient, backward_started)
        super().__init__(init_optimizer, param_names, partition_grads=True, **kwargs)
        kept = self.groups[len(init_optimizer.param_groups) :]
        self._device_part = DevicePart(init_optimizer, kept) if kept else None
        self._copied = [copy for unit in self._all_units() for copy in self._place_shard(unit)]
        parameter_offload.tell_edits(self._on_edit)

    def _all_units(self) -> Iterator[GatherUnit]:
        yield from self.parameter_offload.units
        yield from self.parameter_offload.persistent_units

    # Layout

    def _kept_on_device(self, params: Sequence[Sequence[nn.Parameter]]) -> list[int]:
        """See base class: with `offload_optimizer.ratio`."""
        if self.offload is None or self.offload.ratio == 1.0:
            return super()._kept_on_device(params)
        numels = [[record_of(param).numel for param in theirs] for theirs in params]
        return num_kept(numels, self.offload.ratio)

    def _tables(
        self,
        params: Sequence[nn.Parameter],
        positions: Sequence[int],
        num_shards: int,
        alignment: int,
    ) -> tuple[ParameterCutTable, ParameterCutTable]:
        """See base class: in files as in memory."""
        table = ParameterCutTable.cut([record_of(param).numel for param in params], num_shards)
        return table, table

    def _group_of(self, params: Sequence[nn.Parameter], **layout: Any) -> ShardedGroup:
        """See base class."""
        return ShardedGroup(params, shards=[record_of(param).shard for param in params], **layout)

    def _place_shard(self, unit: GatherUnit) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Let a unit's shard be a view of a group's; otherwise the pieces (to, from) by which it
        follows. See [Note: shards of units and of groups].
        """
        links = [getattr(param, "_hp_mapping", None) for param in unit.params]
        first = links[0]
        if first is not None and all(
            link is not None and link[1:] == (first.group, first.param_index + step)
            for step, link in enumerate(links)
        ):
            group = self.groups[first.group]
            start = group.table.cut_starts[first.param_index]
            unit.use_shard(group.flat[start : start + unit.table.shard_numel])
            return []
        return [
            (
                record.shard,
                self.groups[link.group].cut_of(link.param_index, self.groups[link.group].flat),
            )
            for record, link in zip(unit.records, links, strict=True)
            if link is not None
        ]

    def _make_buckets(self, held: frozenset[nn.Parameter] = frozenset()) -> None:
        """See base class: one bucket for each unit, in the order in which backward completes them;
        what persists is used everywhere, so it comes last.
        """
        units = [*reversed(self.parameter_offload.units), *self.parameter_offload.persistent_units]
        how = (self.groups, self.get_param_comm_dtype, self.reduce_bucket_size)
        found = [(unit, bucket) for unit in units for bucket in buckets_of(unit, *how)]
        found.sort(key=lambda pair: any(self._param(at) in held for at in pair[1].params))
        self.plans = [bucket for _, bucket in found]  # type: ignore[misc]  # of this stage
        self._indices: dict[GatherUnit, list[int]] = {}
        for index, (unit, _) in enumerate(found):
            if not unit.persists:
                self._indices.setdefault(unit, []).append(index)
        self.ipg_buckets = [
            IPGBucket(params=[self._param(at) for at in bucket.params], index=index)
            for index, (_, bucket) in enumerate(found)
        ]
        self._slots = [
            (index, param)
            for index, bucket in enumerate(self.ipg_buckets)
            for param in bucket.params
        ]
        self.readiness = UnitReadiness([index for index, _ in self._slots], len(found))
        self._free_buffers = []
        self._fillers: dict[tuple[BucketBuffer, int], RowFiller] = {}
        self.readiness.held = frozenset(
            slot for slot, (_, param) in enumerate(self._slots) if param in held
        )

    def _param(self, at: tuple[int, int]) -> nn.Parameter:
        return self.groups[at[0]].params[at[1]]

    # Backward

    def _parameter_has_gradient(self, started: Callable[[], None]) -> None:
        self._is_in_parameter_hook = True
        started()
        self._is_in_parameter_hook = False

    def backward_prologue(self) -> None:
        """See base class. A backward that only a parameter's gradient has shown may show later on
        other ranks, so its buckets leave at the end.
        """
        super().backward_prologue()
        self.parameter_offload.have_persistent()
        self.readiness.has_units = bool(self.parameter_offload.units)
        self._sends_units = (
            self._reducing and self.works_during_backward and not self._is_in_parameter_hook
        )

    def _send_unit(self, unit: GatherUnit) -> None:
        """Backward is done with `unit`: what has no gradient here counts as zeros."""
        if not self._sends_units:
            return
        for index in self._indices.get(unit, ()):
            if self.readiness.release(index):
                self._send_incomplete(index)

    def _make_gradient(self, param: torch.Tensor) -> torch.Tensor:
        """See base class; a parameter that is sharded has no gradient's shape of itself."""
        self.parameter_offload.give_shape(cast(nn.Parameter, param))
        with torch._C.DisableTorchFunctionSubclass():
            return super()._make_gradient(param)

    def backward_epilogue(self) -> None:
        """See base class; also what other ranks have gathered and sent in this backward."""
        super().backward_epilogue()
        self.parameter_offload.backward_order.finish()

    # Reduction

    def _fill_buffer(
        self, buffer: BucketBuffer, index: int, grads: list[torch.Tensor | None]
    ) -> torch.Tensor:
        """See base class: into rows."""
        bucket: Any = self.plans[index]
        payload = buffer.tensor[: bucket.numel]
        key = (buffer, index)
        if key not in self._fillers:
            self._fillers[key] = RowFiller(bucket.table, payload)
        self._fillers[key].fill(grads)
        return payload

    def _named_views(
        self, buffer: BucketBuffer, index: int, names: list[str]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """See base class: rows hold the gradients of all of them."""
        return [(", ".join(names), buffer.tensor)]

    def _start_reduction(self, plan: Any, payload: torch.Tensor) -> PendingShards:
        """See base class."""
        group = self.groups[plan.group]
        if self.reduce_scatter:
            return reduce_to_owners(payload, group.process_group, async_op=True)
        works = (
            []
            if group.num_shards == 1
            else [dist.all_reduce(payload, group=group.process_group, async_op=True)]
        )
        own = plan.table.row(group.shard_rank)
        return PendingShards(works, [payload[own]], keep=payload)

    def _take_in(self, reduction: Reduction, pieces: list[torch.Tensor]) -> Any:
        """See base class: the row's parts go to the groups that own them."""
        bucket: Any = self.plans[reduction.index]
        read = None
        for number, part in enumerate(bucket.parts):
            own = [piece[part.start : part.start + part.numel] for piece in pieces]
            # A bucket's parts are written for the first time independently of one another.
            key = reduction.index + number * len(self.plans)
            event = self.sink.add(
                key, self.groups[part.group], part.segments, own, reduction.factors.post
            )
            # Behind it are the copies to the host of all parts so far; of those that stay on the
            # device there is none to wait for.
            read = event if event is not None else read
        return read

    def exit_backward(self) -> None:
        """See base class; what backward needed whole goes."""
        super().exit_backward()
        self._sends_units = False
        self.parameter_offload.end_backward()

    # Update

    @torch.no_grad()
    def _update(self, scaling: GradientScaling) -> None:
        """See base class; not while somebody would keep the old values. An optimizer on the host
        writes to shards there by itself.
        """
        self.parameter_offload.refuse_holders()
        resources = self.parameter_offload.resources
        # Masters may be what gathers read.
        resources.before_write() if self.cpu_offload else resources.before_update()
        if self._device_part is not None:
            # First: the device is busy with it while the host updates its own part.
            self._device_part.step(scaling)
        super()._update(scaling)

    def _publish(self, delivered: bool) -> None:
        """See base class: into the shards."""
        self.parameter_offload.before_update()
        if self.cpu_offload:
            self.parameter_offload.resources.before_write()
        if delivered and self._device_part is not None:
            for publisher in self._publishers()[len(self.param_groups) :]:
                publisher.publish()
        super()._publish(delivered)
        self._copy_to_units()
        self.parameter_offload.after_update()

    def _publishers(self) -> list[Publisher]:
        """See base class."""
        if len(self._made_publishers) != len(self.groups):
            self._made_publishers = [ShardWriter(group) for group in self.groups]
        return self._made_publishers

    @torch.no_grad()
    def _copy_to_units(self) -> None:
        if self._copied:
            torch._foreach_copy_([to for to, _ in self._copied], [own for _, own in self._copied])

    def refresh_fp32_params(self) -> None:
        """See base class; the shards of units are what was loaded or edited."""
        with torch.no_grad():
            for shard, own in self._copied:
                own.copy_(shard)
        super().refresh_fp32_params()

    @torch.no_grad()
    def set_param(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """See base class: into the shard, and into what is whole."""
        record = record_of(param)
        if record.status is ZeroParamStatus.AVAILABLE:
            param.data.copy_(value)
        record.write(value)
        self._follow_shard(param)
        self.parameter_offload.shard_changed(param)

    def _follow_shard(self, param: nn.Parameter) -> torch.Tensor:
        """The group's shard <- that of the unit, which was edited; returns the group's cut."""
        link = param._hp_mapping  # type: ignore[attr-defined]  # set by MasterWeightOptimizer
        group = self.groups[link.group]
        cut = group.cut_of(link.param_index, group.flat)
        cut.copy_(record_of(param).shard)
        return cut

    @torch.no_grad()
    def _on_edit(self, param: nn.Parameter) -> None:
        """A script has changed a shard: the master follows."""
        if hasattr(param, "_hp_mapping"):
            link = param._hp_mapping
            group = self.groups[link.group]
            group.cut_of(link.param_index, group.master).copy_(self._follow_shard(param))
        # After the master, which in fp32 is the memory that gathers read.
        self.parameter_offload.shard_changed(param)

    # Moving state off the device

    def _leave(self, kinds: Iterable[OffloadStateTypeEnum]) -> None:
        """See base class; nothing stays gathered of parameters that leave."""
        super()._leave(kinds)
        if OffloadStateTypeEnum.contiguous_grad_buffer in kinds:
            self._fillers = {}
        if OffloadStateTypeEnum.lp_params in kinds:
            let_leave(self.parameter_offload)

    def _come_back(self, kinds: Iterable[OffloadStateTypeEnum]) -> None:
        """See base class."""
        super()._come_back(kinds)
        if OffloadStateTypeEnum.lp_params in kinds:
            have_back(self.parameter_offload)

    def _weights(self) -> Iterator[torch.Tensor]:
        """See base class: all shards, those that are not trained too."""
        yield from (group.flat for group in self.groups)
        yield from weights_of(self.parameter_offload)
        for pair in self._copied:
            yield from pair

    # State

    @property
    def state_layout(self) -> StateLayout:
        """See base class."""
        return replace(super().state_layout, has_weights=True)

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """The owned master shard of each group."""
        return self.single_partition_of_fp32_groups

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """Of each group, the gradients of this rank's cuts: as many elements as `param.ds_tensor`,
        in the dtype that they are summed in, averaged and without the loss scale. Empty but between
        the boundary's backward and the step. To change them use `safe_set_local_grad`.
        """
        grads = owned_gradients(self) if self.tracker.is_boundary else None
        return {
            number: [group.cut_of(index, grad) for index in range(len(group.params))]
            for number, (group, grad) in enumerate(zip(self.groups, grads or (), strict=False))
        }

    @property
    def state(self) -> Any:
        """See base class; with `offload_optimizer.ratio` that of both parts."""
        state = self.optimizer.state
        return {**state, **self._device_part.optimizer.state} if self._device_part else state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    def numbered_params(self) -> list[list[nn.Parameter]]:
        """See base class: what stays on the device comes first."""
        if self._device_part is None:
            return super().numbered_params()
        count = len(self.param_groups)
        return [
            [*device.params, *host.params]
            for host, device in zip(self.groups[:count], self.groups[count:], strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, in upstream's layout."""
        part = self._device_part
        base = self.optimizer.state_dict() if part is None else part.state_dict()
        return self._in_files(base, [group.master.detach() for group in self.groups])

    def _in_files(self, base: dict[str, Any], masters: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The state of every group's optimizer and its masters, as files have it."""
        if self._device_part is not None:
            base, masters = self._device_part.joined(base, masters)
        return {
            ZERO_STAGE: ZeroStageEnum.weights,
            LOSS_SCALER: self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            PARTITION_COUNT: self._partition_counts(),
            OPTIMIZER_STATE_DICT: base,
            FP32_FLAT_GROUPS: list(masters),
        }

    @torch.no_grad()
    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = True,
    ) -> None:
        """See base class; the loss scaler too, and with masters the weights, which are those
        rounded.
        """
        self.loss_scaler = state_dict[LOSS_SCALER]
        self.overflow = bool(state_dict["overflow"])
        part, masters = self._device_part, state_dict[FP32_FLAT_GROUPS]
        if load_optimizer_states and part is None:
            load_in_place(self.optimizer, state_dict[OPTIMIZER_STATE_DICT])
        elif load_optimizer_states and part is not None:
            part.load(state_dict[OPTIMIZER_STATE_DICT])
        if load_from_fp32_weights:
            parts = masters if part is None else part.master_parts(masters)
            for group, master in zip(self.groups, parts, strict=True):
                group.master.copy_(master)
            self.update_lp_params()
        else:
            self.refresh_fp32_params()

    @torch.no_grad()
    def set_own_masters(self, own: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Masters <- this rank's elements of parameters, 1-D without padding; the shards have them
        rounded already. What is not trained here is left alone.
        """
        for param, value in own.items():
            link = getattr(param, "_hp_mapping", None)
            if link is not None:
                group = self.groups[link.group]
                group.cut_of(link.param_index, group.master)[: value.numel()].copy_(value)

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """See base class. Upstream cuts large groups into several buffers, which are resharded."""
        if saved.get(ZERO_STAGE) != ZeroStageEnum.weights:
            return False
        base, buffers = saved[OPTIMIZER_STATE_DICT], saved[FP32_FLAT_GROUPS]
        return (
            saved[PARTITION_COUNT] == self._partition_counts()
            and all(len(group["params"]) == 1 for group in base["param_groups"])
            and [buffer.numel() for buffer in buffers] == self._shard_numels()
            and is_dealt_alike(self, base)
        )

    def _partition_counts(self) -> int | list[int]:
        """Over how many ranks parameters are cut; of each group if experts are over fewer."""
        counts = [group.num_shards for group in self.groups[: len(self.param_groups)]]
        return counts if set(counts) - {self.num_shards} else self.num_shards

    def _shard_numels(self) -> list[int]:
        """Elements of this rank's shard of each parameter group of the optimizer."""
        numels = [0] * len(self.param_groups)
        for index, group in enumerate(self.groups):
            numels[self._param_group_of(index)] += group.table.shard_numel
        return numels

    def rebuilt_state(
        self, base: dict[str, Any], masters: Sequence[torch.Tensor], scaler: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See base class."""
        started = {LOSS_SCALER: self._scaler_after(scaler), "overflow": False}
        return {**self._in_files(base, masters), **started}

    def _give_up(self) -> None:
        """Let go of everything but the model, which another engine takes. All ranks call it."""
        self.reload_states()
        super().destroy()

    def destroy(self) -> None:
        """See base class; the model gets plain parameters back. All ranks call it."""
        self.reload_states()
        self.parameter_offload.destroy()
        super().destroy()
