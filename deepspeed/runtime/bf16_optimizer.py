"""BF16_Optimizer: bf16 model, fp32 gradient accumulation on every rank, masters sharded over the
data-parallel ranks.

Each micro-batch's bf16 gradients are added to a full fp32 accumulator; at the boundary the
accumulator is all-reduced, after which it is equal on all ranks, and every rank updates its shard
from its part of it. Costs 4 bytes per parameter more than ZeRO-1 with bf16 accumulation; keeps what
eight mantissa bits would drop.

With several optimizer instances (`zero/zero_optimizer.py`) only the sharding changes: the
accumulator is whole on every rank, so one all-reduce over all data-parallel ranks gives every owner
of a shard the same sum, whatever instance it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed._lazy import lazy_attributes
from deepspeed.runtime.gradients.local_accumulator import LocalAccumulator
from deepspeed.runtime.gradients.replicated import all_reduce_flat
from deepspeed.runtime.optimizers.state_layout import StateLayout
from deepspeed.runtime.zero.sharded_state import load_sharded_state, sharded_state_dict
from deepspeed.runtime.zero.zero_optimizer import ZeROOptimizer

# Upstream's further names here say what to use instead.
__getattr__ = lazy_attributes(__name__)


class BF16_Optimizer(ZeROOptimizer):
    """See module.

    Args:
        init_optimizer: torch optimizer over the model's parameters.
        param_names: Name of each parameter, in model order.
        grad_acc_dtype: Dtype of the accumulator.
        immediate_grad_update: Add each gradient from its hook, as soon as it exists, instead of all
            at the end of backward: bf16 gradients are then freed during backward.
        reduce_bucket_size: Elements per all-reduce.
        communication_data_type: What travels; None is the accumulator's dtype.
        backward_started: Called by the first hook of a backward that nobody announced.
        kwargs: See `ZeROOptimizer`.
    """

    _window_marks = ("_reduced", "_on_host")

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        *,
        grad_acc_dtype: torch.dtype = torch.float32,
        immediate_grad_update: bool = False,
        reduce_bucket_size: int = 500_000_000,
        communication_data_type: torch.dtype | None = None,
        backward_started: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(init_optimizer, param_names, grad_dtype=grad_acc_dtype, **kwargs)
        self.grad_acc_dtype = grad_acc_dtype
        self.immediate_grad_update = immediate_grad_update
        self.reduce_bucket_size = reduce_bucket_size
        self.communication_data_type = communication_data_type
        self._backward_started = backward_started
        self.accumulator: LocalAccumulator = LocalAccumulator(self.groups, grad_acc_dtype)
        for group, flat in zip(self.groups, self.accumulator.flats, strict=True):
            if not self.cpu_offload:
                group.use_grad(group.only_part(flat))
        self._reduced = False
        self._on_host = False
        self._hook_handles: list[Any] = []
        if immediate_grad_update:
            self.create_grad_acc_hooks()

    @property
    def fp32_groups_gradients_flat(self) -> list[torch.Tensor]:
        """The accumulator of each group, padding included."""
        return self.accumulator.flats

    @property
    def fp32_groups_gradients(self) -> list[list[torch.Tensor]]:
        """The accumulator of each parameter."""
        return self.accumulator.views

    @property
    def fp32_groups_flat_partition(self) -> list[torch.Tensor]:
        """The owned master shard of each group."""
        return self.single_partition_of_fp32_groups

    # Backward

    def create_grad_acc_hooks(self) -> None:
        """Let every gradient join the accumulator from its own hook."""
        for group_index, group in enumerate(self.groups):
            for index, param in enumerate(group.params):
                hook = self._make_hook(group_index, index)
                self._hook_handles.append(param.register_post_accumulate_grad_hook(hook))

    @property
    def works_during_backward(self) -> bool:
        """See base class."""
        return bool(self._hook_handles)

    def _make_hook(self, group_index: int, index: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(param: torch.Tensor) -> None:
            if self._backward_started is not None:
                self._backward_started()
            # [fix 2] Runs on the stream current inside the hook, the one that produced the
            # gradient. The all-reduce is issued after backward, when autograd has made the caller's
            # stream wait for all of them.
            self.accumulator.absorb_one(group_index, index, 1.0 / self.accumulation_divisor)

        return on_gradient

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
            self.accumulator.absorb(1.0 / self.accumulation_divisor)

    def get_grads_for_reduction(self) -> list[torch.Tensor]:
        """What the engine reduces at the boundary: the whole accumulators."""
        return self.accumulator.flats

    def reduce_gradients(self) -> None:
        """See base class: only the boundary reduces."""
        if not self.reduces_now:
            return
        all_reduce_flat(
            self.get_grads_for_reduction(),
            self.reduce_bucket_size,
            self.reduce_rule,
            [group.replicas for group in self.groups],
            self.communication_data_type,
        )
        self._reduced = True
        self._on_host = False

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """See base class: with offload, the owned part moves to the host.

        Once per reduction: `safe_set_full_grad` comes between and must not be overwritten by the
        step.
        """
        if self.cpu_offload and not self._on_host:
            self._on_host = True
            for group, flat in zip(self.groups, self.accumulator.flats, strict=True):
                group.grad.copy_(group.only_part(flat))

    # Clearing and state

    def clear_hp_grads(self) -> None:
        """Forget the accumulated gradients."""
        self.accumulator.clear()
        self._reduced = False
        self._on_host = False

    def clear_lp_grads(self, set_to_none: bool = True) -> None:
        """Forget gradients that have not joined yet."""
        for group in self.groups:
            for param in group.params:
                param.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See base class."""
        self.clear_lp_grads()
        self.clear_hp_grads()
        super().zero_grad(set_to_none)

    @property
    def has_reduced_gradients(self) -> bool:
        """See `ZeROOptimizer`."""
        return self._reduced

    @property
    def _owns_sums(self) -> bool:
        return self._on_host

    @property
    def state_layout(self) -> StateLayout:
        """See base class."""
        return replace(super().state_layout, lists_frozen=False)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, in upstream's layout."""
        return sharded_state_dict(self, elastic=False)

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = True,
    ) -> None:
        """See base class."""
        load_sharded_state(self, state_dict, load_optimizer_states, load_from_fp32_weights)

    def destroy(self) -> None:
        """See base class."""
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles = []
        super().destroy()
