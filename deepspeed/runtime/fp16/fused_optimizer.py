"""FP16_Optimizer: half-precision model with fp32 masters that every rank holds whole (no ZeRO).

For fp16 and, by upstream's naming, for bf16 too. Masters are flat, for optimizers that work element
by element; see `unfused_optimizer` for those that need each parameter's shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.constants import (
    FP32_GROUPS_FLAT,
    MASTER_KEYS,
    OPTIMIZER_STATE_DICT,
    SCALER_KEYS,
)
from deepspeed.runtime.gradients.local_accumulator import LocalAccumulator
from deepspeed.runtime.gradients.overlay import Overlay
from deepspeed.runtime.gradients.replicated import FlatGradients, all_reduce_flat
from deepspeed.runtime.optimizers.master_weights import MasterWeightOptimizer
from deepspeed.runtime.optimizers.replicated_reduction import ReplicatedReduction
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.sharding.loading_in_place import load_in_place


class FP16_Optimizer(MasterWeightOptimizer):
    """See module.

    Args:
        init_optimizer: torch optimizer over the model's parameters.
        param_names: Name of each parameter, in model order.
        reduce_bucket_size: Elements per all-reduce.
        communication_data_type: What travels; None is the gradients' dtype.
        local_accumulation_dtype: Sum micro-batches in this dtype instead of the model's. They are
            reduced when backward is over.
        reduction: See `ReplicatedReduction`: how, and under what names.
        kwargs: See `MasterWeightOptimizer`.

    Attributes:
        masters_key: Under what the state has its masters.
    """

    masters_key = FP32_GROUPS_FLAT
    _window_marks = ("_reduced", "_finished")

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        *,
        reduce_bucket_size: int = 500_000_000,
        communication_data_type: torch.dtype | None = None,
        local_accumulation_dtype: torch.dtype | None = None,
        reduction: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(init_optimizer, param_names, shard_group=None, **kwargs)
        self.reduce_bucket_size = reduce_bucket_size
        self.communication_data_type = communication_data_type
        self.accumulator: LocalAccumulator | None = None
        self._reduced = False
        self._finished = False
        self._flat_gradients: list[FlatGradients] = []
        self._overlays: list[Overlay] = []
        if local_accumulation_dtype is not None:
            self.accumulator = LocalAccumulator(self.groups, local_accumulation_dtype)
            for group, flat in zip(self.groups, self.accumulator.flats, strict=True):
                if flat.dtype == group.grad_dtype:
                    group.use_grad(flat)
        else:
            for group in self.groups:
                self._lay_over(group)
        self._reduction = ReplicatedReduction(
            self,
            self._flat_gradients,
            [group.replicas for group in self.groups],
            bucket_numel=reduce_bucket_size,
            communication_data_type=communication_data_type,
            **(reduction or {}),
        )

    def _lay_over(self, group: ShardedGroup) -> None:
        """Give a group's gradients in the model's dtype and in the masters' the same memory."""
        overlay = Overlay(group.flat.numel(), group.flat.dtype, group.grad_dtype, group.device)
        group.use_grad(overlay.wide)
        self._overlays.append(overlay)
        # A group of a stage or of a user may be empty: there is no parameter to ask.
        narrow = overlay.narrow
        self._flat_gradients.append(FlatGradients(group.params, like=narrow, flat=narrow))

    @property
    def fp32_groups_flat(self) -> list[torch.Tensor]:
        """The master of each group."""
        return self.single_partition_of_fp32_groups

    def backward_prologue(self) -> None:
        """See base class: gradients that were made ready for the step take more contributions."""
        if self._finished and self._overlays:
            for overlay, gradients in zip(self._overlays, self._flat_gradients, strict=True):
                overlay.narrow_again()
                gradients.attach()
            self._finished = False
        self._reduction.backward_prologue()

    @property
    def works_during_backward(self) -> bool:
        """See base class."""
        return self._reduction.works_during_backward

    def exit_backward(self) -> None:
        """See base class."""
        self._reduction.exit_backward()

    def hold(self, params: Iterable[nn.Parameter]) -> None:
        """See base class."""
        self._reduction.hold(params)

    def backward_epilogue(self) -> None:
        """See base class."""
        if self.accumulator is not None:
            self.accumulator.absorb(1.0 / self.accumulation_divisor)

    @property
    def _step_divisor(self) -> float:
        return 1.0 if self.accumulator is not None else self.accumulation_divisor

    def reduce_gradients(self) -> None:
        """See base class: only the boundary reduces."""
        if not self.reduces_now:
            return
        if self.accumulator is None:
            self._reduction.reduce()
        else:
            all_reduce_flat(
                self.accumulator.flats,
                self.reduce_bucket_size,
                self.reduce_rule,
                [group.replicas for group in self.groups],
                self.communication_data_type,
            )
        self._reduced = True
        self._finished = False

    @property
    def has_reduced_gradients(self) -> bool:
        """See base class."""
        return self._reduced

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """See base class: the averaged gradient in the masters' dtype.

        Once per reduction: `safe_set_full_grad` comes between and must not be overwritten by the
        step. The memory of `param.grad` is used up.
        """
        if self._finished or not self._reduced:
            return
        self._finished = True
        for overlay, gradients in zip(self._overlays, self._flat_gradients, strict=True):
            gradients.detach()
            overlay.widen()
        if self.accumulator is not None:
            for group, flat in zip(self.groups, self.accumulator.flats, strict=True):
                if group.grad is not flat:
                    group.grad.copy_(flat)

    @property
    def _owns_sums(self) -> bool:
        return self._finished

    def load_window_state(self, saved: Mapping[str, Any]) -> None:
        """See base class."""
        super().load_window_state(saved)
        for gradients in self._flat_gradients:
            if self._finished:
                gradients.detach()
            else:
                gradients.collect_present()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See base class."""
        self._reduction.clear()
        if self.accumulator is not None:
            for group in self.groups:
                for param in group.params:
                    param.grad = None
            self.accumulator.clear()
        self._reduced = False
        self._finished = False
        super().zero_grad(set_to_none)

    def destroy(self) -> None:
        """See base class."""
        self._reduction.destroy()
        self._flat_gradients, self._overlays = [], []
        super().destroy()

    # State, saved whole by one rank in the model-states file

    def _scaler_state(self) -> dict[str, Any]:
        present = {
            key: getattr(self.loss_scaler, key)
            for key in SCALER_KEYS
            if hasattr(self.loss_scaler, key)
        }
        # A static scale counts no steps, but upstream's loader wants the number whatever the scale.
        return {"dynamic_loss_scale": self.dynamic_loss_scale, "cur_iter": 0, **present}

    def _masters_state(self) -> dict[str, Any]:
        return {
            self.masters_key: [group.master.detach() for group in self.groups],
            "clip_grad": self.clip_grad,
        }

    def state_dict(self) -> dict[str, Any]:
        """Scaler, wrapped optimizer and masters."""
        return {
            **self._scaler_state(),
            OPTIMIZER_STATE_DICT: self.optimizer.state_dict(),
            **self._masters_state(),
        }

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """See base class."""
        return MASTER_KEYS & saved.keys() == {self.masters_key}

    def rebuilt_state(
        self, base: dict[str, Any], masters: Sequence[torch.Tensor], scaler: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See base class."""
        return {
            **scaler,
            OPTIMIZER_STATE_DICT: base,
            self.masters_key: self._grouped_masters(masters),
        }

    def _grouped_masters(self, masters: Sequence[torch.Tensor]) -> list[Any]:
        """The masters of `own_tensors` as the files have them: one per group."""
        return list(masters)

    def _saved_masters(self, state_dict: dict[str, Any]) -> list[list[torch.Tensor]]:
        return [[flat] for flat in state_dict[self.masters_key]]

    @torch.no_grad()
    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = True,
    ) -> None:
        """Restore what `state_dict` returned."""
        self.loss_scaler.go_on_from(state_dict)
        if load_optimizer_states:
            load_in_place(self.optimizer, state_dict[OPTIMIZER_STATE_DICT])
        if not load_from_fp32_weights:
            self.refresh_fp32_params()
            return
        for group, saved in zip(self.groups, self._saved_masters(state_dict), strict=True):
            for master, value in zip(group.masters, saved, strict=True):
                master.copy_(value)
