"""BF16_Optimizer: bf16 model, fp32 gradient accumulation on every rank, sharded masters.

The accumulator is whole on every rank and all-reduced at the boundary, over all data-parallel ranks
whatever optimizer instance they are in; every rank updates its shard from its part of it. Costs 4
bytes per parameter more than ZeRO-1 that accumulates in bf16; keeps what 8 mantissa bits drop.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed._lazy import lazy_attributes
from deepspeed.runtime.gradients.local_accumulator import LocalAccumulator
from deepspeed.runtime.gradients.reduction import (
    GradientContext,
    GradientReduction,
    ReductionSettings,
)
from deepspeed.runtime.gradients.replicated import all_reduce_flat
from deepspeed.runtime.optimizers.group_layout import SHARD_ALIGNMENT, GroupLayout
from deepspeed.runtime.optimizers.master_weights import MasterWeights
from deepspeed.runtime.optimizers.settings import ShardSettings, StepSettings
from deepspeed.runtime.optimizers.step_sequence import forwarded
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.zero.sharded_state import ShardFiles
from deepspeed.runtime.zero.zero_optimizer import ZeROOptimizer, instances_of

# Upstream's further names here say what to use instead.
__getattr__ = lazy_attributes(__name__)


class Accumulated(GradientReduction):
    """Sums micro-batches of whole groups in `dtype`, and all-reduces the sums at the boundary.

    With `immediate` each gradient is added from its hook: bf16 ones are freed during backward.
    """

    accumulator: LocalAccumulator

    def __init__(
        self,
        context: GradientContext,
        groups: list[ShardedGroup],
        settings: ReductionSettings,
        dtype: torch.dtype,
        immediate: bool = False,
    ) -> None:
        super().__init__(context, groups)
        self.settings = settings
        self.immediate_grad_update = immediate
        self.accumulator = LocalAccumulator(groups, dtype)
        # Owned gradients that are no part of the sums.
        self._apart: list[tuple[ShardedGroup, torch.Tensor]] = []
        for group, flat in zip(groups, self.accumulator.flats, strict=True):
            own = group.only_part(flat)
            if group.offload:
                # Copied whole, unlike gradients that others add up on the host.
                group.use_grad(group.empty(group.grad_dtype, pin=group.pin).zero_())
            if group.offload or own.dtype != group.grad_dtype:
                self._apart.append((group, own))
            else:
                group.use_grad(own)
        self._reduced = False
        self._moved = False
        self._hook_handles: list[Any] = []
        if immediate:
            self.create_grad_acc_hooks()

    @property
    def fp32_groups_gradients_flat(self) -> list[torch.Tensor]:
        """The accumulator of each group, padding included."""
        return self.accumulator.flats

    @property
    def fp32_groups_gradients(self) -> list[list[torch.Tensor]]:
        """The accumulator of each parameter."""
        return self.accumulator.views

    # Backward

    def create_grad_acc_hooks(self) -> None:
        for group_index, group in enumerate(self.groups):
            for index, param in enumerate(group.params):
                hook = partial(self._arrived, group_index, index)
                handle = param.register_post_accumulate_grad_hook(hook)
                self._hook_handles.append(handle)

    @property
    def works_during_backward(self) -> bool:
        return bool(self._hook_handles)

    def _arrived(self, group_index: int, index: int, param: torch.Tensor) -> None:
        self.context.backward_started()
        # [fix 2] Runs on the stream current inside the hook, the one that produced the gradient.
        # The all-reduce is issued after backward, when autograd has made the caller's stream wait
        # for all of them.
        divisor = self.context.accumulation_divisor
        self.accumulator.absorb_one(group_index, index, 1.0 / divisor)

    def backward_epilogue(self) -> None:
        """The micro-batch at hand joins the accumulator.

        [fix 4] Called before the reduction, the boundary micro-batch's too: added afterwards it
        would stay rank-local, and each rank would step its shard with its own last micro-batch
        instead of the mean of all ranks'.
        """
        self.update_hp_grads()

    def update_hp_grads(self) -> None:
        """Accumulator += every `param.grad`, which is dropped."""
        if not self.immediate_grad_update:
            self.accumulator.absorb(1.0 / self.context.accumulation_divisor)

    def get_grads_for_reduction(self) -> list[torch.Tensor]:
        return self.accumulator.flats

    def reduce_gradients(self) -> None:
        if not self.reduces_now:
            return
        all_reduce_flat(
            self.get_grads_for_reduction(),
            self.settings.reduce_bucket_size,
            self.context.reduce_rule,
            [group.replicas for group in self.groups],
            self.settings.communication_data_type,
        )
        self._reduced = True
        self._moved = False

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Copy to owned gradients that lie apart (on the host, with offload).

        Once per reduction: what `safe_set_full_grad` wrote since must not be overwritten.
        """
        if self._apart and self._reduced and not self._moved:
            self._moved = True
            for group, own in self._apart:
                group.grad.copy_(own)

    @property
    def has_reduced_gradients(self) -> bool:
        return self._reduced

    def _travels_in(self, param: nn.Parameter, local: torch.dtype) -> torch.dtype:
        return self.settings.communication_data_type or local

    # Clearing and state

    def clear_hp_grads(self) -> None:
        self.accumulator.clear()
        self._reduced = False
        self._moved = False

    def clear_lp_grads(self, set_to_none: bool = True) -> None:
        """Forget gradients that have not joined yet."""
        for group in self.groups:
            for param in group.params:
                param.grad = None

    def clear(self) -> None:
        self.clear_lp_grads()
        self.clear_hp_grads()

    @property
    def _owns_sums(self) -> bool:
        return self._moved

    def _marks(self) -> dict[str, bool]:
        return {"_reduced": self._reduced, "_on_host": self._moved}

    def _set_marks(self, marks: Mapping[str, bool]) -> None:
        self._reduced, self._moved = marks.values()

    def destroy(self) -> None:
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles = []


class BF16_Optimizer(ZeROOptimizer):
    """The optimizer of bf16 models with fp32 sums; see module.

    Args:
        init_optimizer: torch optimizer over the model's parameters.
        param_names: Name of each parameter, in model order.
        steps, shards, reduction: Settings; gradients are accumulated in `shards.grad_dtype`.
        immediate_grad_update: Add each gradient from its hook.
    """

    reduction: Accumulated
    nccl_start_alignment_factor: int = SHARD_ALIGNMENT

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        steps: StepSettings,
        shards: ShardSettings,
        reduction: ReductionSettings,
        immediate_grad_update: bool = False,
    ) -> None:
        context, outcomes = steps.context(init_optimizer, param_names), steps.outcomes()
        steps, instances = instances_of(context, steps, shards)
        layout = GroupLayout(context, shards, instances.inside)
        masters = MasterWeights(init_optimizer, context, steps, layout)
        accumulated = Accumulated(
            context, masters.groups, reduction, shards.grad_dtype, immediate_grad_update
        )
        files = ShardFiles(masters, instances.across, outcomes)
        super().__init__(init_optimizer, context, accumulated, masters, files, outcomes)

    update_hp_grads = forwarded("reduction", Accumulated.update_hp_grads)
    get_grads_for_reduction = forwarded("reduction", Accumulated.get_grads_for_reduction)
    create_grad_acc_hooks = forwarded("reduction", Accumulated.create_grad_acc_hooks)
    clear_hp_grads = forwarded("reduction", Accumulated.clear_hp_grads)
    clear_lp_grads = forwarded("reduction", Accumulated.clear_lp_grads)
    immediate_grad_update: bool = forwarded("reduction")
    fp32_groups_gradients_flat: list[torch.Tensor] = forwarded("reduction")
    fp32_groups_gradients: list[list[torch.Tensor]] = forwarded("reduction")
    fp32_groups_flat_partition: list[torch.Tensor] = forwarded(
        "masters", name="single_partition_of_fp32_groups"
    )
