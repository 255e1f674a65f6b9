"""ZeRO stage 3: parameters sharded too. What is whole when is `parameter_offload`'s.

It is stage 2 with another layout: every parameter is cut by itself (`ParameterCutTable`), so
a bucket is a unit, whose gradients are copied together into rows `[N, s]` and reduced by one even
reduce-scatter, of which a rank gets its row. Updated masters are rounded into this rank's shards;
what persists is gathered at once, the rest by the next forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from deepspeed._lazy import lazy_attributes
from deepspeed.comm.parallel_map import OptimizerInstances
from deepspeed.runtime.gradients.bucket_buffers import BucketBuffer
from deepspeed.runtime.gradients.readiness import UnitReadiness
from deepspeed.runtime.gradients.reduction import GradientContext, ReductionSettings
from deepspeed.runtime.optimizers.settings import ShardSettings, StepSettings
from deepspeed.runtime.optimizers.step_sequence import forwarded
from deepspeed.runtime.sharding.cut_rows import RowFiller
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit
from deepspeed.runtime.zero.movable_states import MovableStates
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage_1_and_2 import Bucketed, BucketNames, Reduction
from deepspeed.runtime.zero.units.buckets import UnitBucket, buckets_of
from deepspeed.runtime.zero.units.files import CutFiles
from deepspeed.runtime.zero.units.leaves import MicroBatchLeaves
from deepspeed.runtime.zero.units.masters import CutLayout, CutMasters
from deepspeed.runtime.zero.zero_optimizer import ZeROOptimizer, instances_of
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


class Units(Bucketed):
    """Reduces gradients unit by unit: of the rows of a bucket a rank gets its own."""

    plans: list[UnitBucket]  # type: ignore[assignment]  # of this stage

    def __init__(
        self,
        context: GradientContext,
        masters: CutMasters,
        settings: ReductionSettings,
        instances: OptimizerInstances,
        parameter_offload: DeepSpeedZeRoOffload,
    ) -> None:
        super().__init__(context, masters, settings, instances)
        self._places = masters.places
        self.parameter_offload = parameter_offload
        self._is_in_parameter_hook = False
        self._sends_units = False
        self.leaves: MicroBatchLeaves | None = None  # while micro-batches take turns
        parameter_offload.backward_order.on_done = self._send_unit

    @property
    def _units_readiness(self) -> UnitReadiness:
        readiness = self.hooks.readiness
        assert isinstance(readiness, UnitReadiness), f"{type(readiness).__name__} at stage 3"
        return readiness

    def _make_buckets(self) -> None:
        """Plan one bucket for each unit, in the order in which backward completes them; what
        persists is used everywhere, so it comes last.
        """
        units = [*reversed(self.parameter_offload.units), *self.parameter_offload.persistent_units]
        held = self.hooks.held
        found = [
            (unit, bucket)
            for unit in units
            for bucket in buckets_of(unit, self.groups, self._places, self.settings)
        ]
        found.sort(key=lambda pair: any(self._param(at) in held for at in pair[1].params))
        self.plans = [bucket for _, bucket in found]
        self._indices: dict[GatherUnit, list[int]] = {}
        for index, (unit, _) in enumerate(found):
            if not unit.persists:
                self._indices.setdefault(unit, []).append(index)
        self._use_buckets(
            [[self._param(at) for at in bucket.params] for bucket in self.plans], UnitReadiness
        )
        self._fillers: dict[tuple[BucketBuffer, int], RowFiller] = {}

    def _param(self, at: tuple[int, int]) -> nn.Parameter:
        return self.groups[at[0]].params[at[1]]

    # Backward

    def reduce_ready_partitions_and_remove_grads(self, param: torch.Tensor, i: int) -> None:
        self._is_in_parameter_hook = True
        super().reduce_ready_partitions_and_remove_grads(param, i)
        self._is_in_parameter_hook = False

    def backward_prologue(self) -> None:
        """Prepare for units. A backward that only a parameter's gradient has shown may show later
        on other ranks, so its buckets leave at the end.
        """
        super().backward_prologue()
        self.parameter_offload.have_persistent()
        self._units_readiness.has_units = bool(self.parameter_offload.units)
        self._sends_units = (
            self.hooks.reducing and self.works_during_backward and not self._is_in_parameter_hook
        )

    def local_sum(self, param: torch.Tensor) -> torch.Tensor | None:
        if self.leaves is None:
            return super().local_sum(param)
        return self.leaves.sum_of(cast(nn.Parameter, param))

    def _send_unit(self, unit: GatherUnit, micro_batch: int) -> None:
        """Send what backward is done with: what has no gradient here counts as zeros."""
        if not self._sends_units:
            return
        if self.leaves is not None:
            self.leaves.select(micro_batch)
        for index in self._indices.get(unit, ()):
            if self.leaves is not None and not self.leaves.comes_next(index):
                continue  # at the end of backward, behind the micro-batches before
            if self._units_readiness.release(index):
                self._send_incomplete(index)

    def make_gradient(self, param: torch.Tensor) -> torch.Tensor:
        """Give zeros in the whole shape, which a sharded parameter does not have of itself."""
        self.parameter_offload.give_shape(cast(nn.Parameter, param))
        with torch._C.DisableTorchFunctionSubclass():
            return super().make_gradient(param)

    def backward_epilogue(self) -> None:
        """Take part in what other ranks have gathered and sent in this backward."""
        super().backward_epilogue()
        self.parameter_offload.backward_order.finish()

    def exit_backward(self) -> None:
        """Let go of what backward needed whole."""
        super().exit_backward()
        self._sends_units = False
        self.parameter_offload.end_backward()

    # Reduction

    def reduce_gradients(self) -> None:
        for _ in self.leaves.in_turn() if self.leaves is not None else (0,):
            super().reduce_gradients()

    def reduce_independent_p_g_buckets_and_remove_grads(self, index: int) -> None:
        super().reduce_independent_p_g_buckets_and_remove_grads(index)
        if self.leaves is not None:
            self.leaves.sent(index, self.ipg_buckets[index].params)

    def _fill_buffer(
        self, buffer: BucketBuffer, index: int, grads: list[torch.Tensor | None]
    ) -> torch.Tensor:
        bucket = self.plans[index]
        payload = buffer.tensor[: bucket.numel]
        key = (buffer, index)
        if key not in self._fillers:
            self._fillers[key] = RowFiller(bucket.table, payload)
        self._fillers[key].fill(grads)
        return payload

    def _named_views(
        self, buffer: BucketBuffer, index: int, names: list[str]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Name whole buffers: rows hold the gradients of all of them."""
        return [(", ".join(names), buffer.tensor)]

    def _own_part(self, plan: Any, group: ShardedGroup) -> slice:
        own: slice = plan.table.row(group.shard_rank, plan.kind.itemsize)
        return own

    def _take_in(self, reduction: Reduction, pieces: list[torch.Tensor]) -> Any:
        """Add the row's parts to the groups that own them."""
        read = None
        for number, part in enumerate(self.plans[reduction.index].parts):
            own = [piece[part.start : part.start + part.numel] for piece in pieces]
            # A bucket's parts are written for the first time independently of one another.
            key = reduction.index + number * len(self.plans)
            how = (reduction.factors.post, reduction.is_last)
            event = self.sink.add(key, self.groups[part.group], part.segments, own, *how)
            # Behind it are the copies to the host of all parts so far; of those that stay on the
            # device there is none to wait for.
            read = event if event is not None else read
        return read

    def let_buffers_go(self) -> None:
        super().let_buffers_go()
        self._fillers = {}


class DeepSpeedZeroOptimizer_Stage3(BucketNames, ZeROOptimizer):  # upstream's name
    """ZeRO-3; see module.

    Args:
        init_optimizer: torch optimizer over the model's parameters.
        param_names: Name of each parameter, in model order.
        steps, shards, reduction: Settings.
        parameter_offload: Gathers the model's parameters.
    """

    reduction: Units
    masters: CutMasters
    movable: MovableStates

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        steps: StepSettings,
        shards: ShardSettings,
        reduction: ReductionSettings,
        parameter_offload: DeepSpeedZeRoOffload,
    ) -> None:
        context, outcomes = steps.context(init_optimizer, param_names), steps.outcomes()
        steps, instances = instances_of(context, steps, shards)
        layout = CutLayout(context, shards, instances.inside)
        masters = CutMasters(init_optimizer, context, steps, layout, parameter_offload)
        units = Units(context, masters, reduction, instances, parameter_offload)
        units.start()
        files = CutFiles(masters, instances.across, outcomes)
        movable = MovableStates(masters, units, parameter_offload)
        super().__init__(init_optimizer, context, units, masters, files, outcomes, movable)
        self.parameter_offload = parameter_offload
        parameter_offload.give_up = self._give_up
        parameter_offload.tell_edits(masters.on_edit)

    plans: list[UnitBucket] = forwarded("reduction")
    set_own_masters = forwarded("masters", CutMasters.set_own_masters)
    fp16_groups: list[list[nn.Parameter]] = forwarded("masters", name="bit16_groups")
    fp32_partitioned_groups_flat: list[torch.Tensor] = forwarded(
        "masters", name="single_partition_of_fp32_groups"
    )

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """The gradients of this rank's cuts, by group: as many elements as `param.ds_tensor`, in
        the dtype that they are summed in, averaged and without the loss scale. Empty but between
        the boundary's backward and the step. To change them use `safe_set_local_grad`.
        """
        grads = owned_gradients(self) if self.tracker.is_boundary else None
        self.masters.lend()
        return {
            number: [group.cut_of(index, grad) for index in range(len(group.params))]
            for number, (group, grad) in enumerate(
                zip(self.masters.groups, grads or (), strict=False)
            )
        }

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """Return `averaged_gradients` in fp32, by group and by the place in it."""
        return {
            number: {index: grad.float() for index, grad in enumerate(grads)}
            for number, grads in self.averaged_gradients.items()
        }

    def _give_up(self) -> None:
        """Let go of everything but the model, which another engine takes. All ranks call it."""
        super().destroy()

    def destroy(self) -> None:
        """Give the model plain parameters back. All ranks call it."""
        self.movable.reload_states()
        self.parameter_offload.destroy()
        super().destroy()
