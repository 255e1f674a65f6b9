"""FP16_Optimizer: half-precision model with flat fp32 masters that every rank holds whole (no
ZeRO); by upstream's naming for bf16 too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint import constants as keys
from deepspeed.runtime.bf16_optimizer import Accumulated
from deepspeed.runtime.gradients.overlay import Overlay
from deepspeed.runtime.gradients.reduction import (
    GradientContext,
    GradientReduction,
    ReductionSettings,
)
from deepspeed.runtime.gradients.replicated import FlatGradients
from deepspeed.runtime.gradients.replicated_reduction import Replicated
from deepspeed.runtime.optimizers.group_layout import GroupLayout
from deepspeed.runtime.optimizers.master_weights import MasterNames, MasterWeights
from deepspeed.runtime.optimizers.settings import ShardSettings, StepSettings
from deepspeed.runtime.optimizers.state_layout import StateFiles, StateLayout
from deepspeed.runtime.optimizers.step_outcome import Outcomes
from deepspeed.runtime.optimizers.step_sequence import StepSequence, forwarded
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.sharding.loading_in_place import load_in_place


class Overlaid(Replicated):
    """Gradients in the model's dtype that have the same memory as those in the masters'."""

    def __init__(
        self, context: GradientContext, groups: list[ShardedGroup], settings: ReductionSettings
    ) -> None:
        self._overlays = [
            Overlay(group.flat.numel(), group.flat.dtype, group.grad_dtype, group.device)
            for group in groups
        ]
        gradients = []
        for group, overlay in zip(groups, self._overlays, strict=True):
            group.use_grad(overlay.wide)
            # A group of a stage or of a user may be empty: there is no parameter to ask.
            narrow = overlay.narrow
            gradients.append(FlatGradients(group.params, like=narrow, flat=narrow))
        self._reduced = False
        self._finished = False
        super().__init__(context, gradients, [g.replicas for g in groups], settings, groups)

    def backward_prologue(self) -> None:
        """Let gradients that were made ready for the step take more contributions."""
        if self._finished:
            for overlay, gradients in zip(self._overlays, self.gradients, strict=True):
                overlay.narrow_again()
                gradients.attach()
            self._finished = False
        super().backward_prologue()

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        if self.reduces_now:
            self._reduced = True
            self._finished = False

    @property
    def has_reduced_gradients(self) -> bool:
        return self._reduced

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Make the averaged gradient one in the masters' dtype; the memory of `param.grad` is used
        up.

        Once per reduction: `safe_set_full_grad` comes between and must not be overwritten by the
        step.
        """
        if self._finished or not self._reduced:
            return
        self._take_edits()
        self._finished = True
        for overlay, gradients in zip(self._overlays, self.gradients, strict=True):
            gradients.detach()
            overlay.widen()

    def unread_gradients(self) -> list[nn.Parameter]:
        return GradientReduction.unread_gradients(self) if self._finished else []

    @property
    def _owns_sums(self) -> bool:
        return self._finished

    def _marks(self) -> dict[str, bool]:
        return {"_reduced": self._reduced, "_finished": self._finished}

    def _set_marks(self, marks: Mapping[str, bool]) -> None:
        self._reduced, self._finished = marks.values()

    def load_window_state(self, saved: Mapping[str, Any]) -> None:
        GradientReduction.load_window_state(self, saved)
        for gradients in self.gradients:
            if self._finished:
                gradients.detach()
            else:
                gradients.collect_present()

    def clear(self) -> None:
        super().clear()
        self._reduced = False
        self._finished = False

    def destroy(self) -> None:
        super().destroy()
        self._overlays = []


class WholeFiles(StateFiles):
    """Files of masters that every rank has whole, saved by one rank in the model-states file."""

    def __init__(self, masters: MasterWeights, outcomes: Outcomes, masters_key: str) -> None:
        super().__init__(masters.optimizer)
        self._masters = masters
        self._outcomes = outcomes
        self._key = masters_key

    @property
    def state_layout(self) -> StateLayout:
        return StateLayout(has_masters=True)

    def _scaler_state(self) -> dict[str, Any]:
        scaler = self._outcomes.loss_scaler
        present = {key: getattr(scaler, key) for key in keys.SCALER_KEYS if hasattr(scaler, key)}
        # A static scale counts no steps, but upstream's loader wants the number whatever the scale.
        is_dynamic = self._outcomes.dynamic_loss_scale
        return {"dynamic_loss_scale": is_dynamic, "cur_iter": 0, **present}

    def _masters_state(self) -> dict[str, Any]:
        return {
            self._key: [group.master.detach() for group in self._masters.groups],
            "clip_grad": self._outcomes.clip_grad,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._scaler_state(),
            keys.OPTIMIZER_STATE_DICT: self._optimizer.state_dict(),
            **self._masters_state(),
        }

    def fits(self, saved: Mapping[str, Any]) -> bool:
        return keys.MASTER_KEYS & saved.keys() == {self._key}

    def rebuilt_state(
        self, base: dict[str, Any], masters: Sequence[torch.Tensor], scaler: Mapping[str, Any]
    ) -> dict[str, Any]:
        grouped = self._grouped_masters(masters)
        return {**scaler, keys.OPTIMIZER_STATE_DICT: base, self._key: grouped}

    def _grouped_masters(self, masters: Sequence[torch.Tensor]) -> Sequence[object]:
        """The masters of `own_tensors` as the files have them: one per group."""
        return list(masters)

    def _saved_masters(self, state_dict: dict[str, Any]) -> list[list[torch.Tensor]]:
        return [[flat] for flat in state_dict[self._key]]

    @torch.no_grad()
    def _load(self, saved: dict[str, Any], with_moments: bool, with_masters: bool) -> None:
        self._outcomes.loss_scaler.go_on_from(saved)
        if with_moments:
            load_in_place(self._optimizer, saved[keys.OPTIMIZER_STATE_DICT])
        if not with_masters:
            self._masters.refresh_fp32_params()
            return
        groups = self._masters.groups
        for group, values in zip(groups, self._saved_masters(saved), strict=True):
            for master, value in zip(group.masters, values, strict=True):
                master.copy_(value)


class FP16_Optimizer(MasterNames, StepSequence):
    """The optimizer of half-precision models without ZeRO; see module.

    Args:
        init_optimizer: torch optimizer over the model's parameters.
        param_names: Name of each parameter, in model order.
        steps, reduction: Settings.
        local_accumulation_dtype: Sum micro-batches in this dtype instead of the model's. They are
            reduced when backward is over.
    """

    masters: MasterWeights

    files_class: type[WholeFiles] = WholeFiles
    masters_key = keys.FP32_GROUPS_FLAT
    per_param = False

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        steps: StepSettings,
        reduction: ReductionSettings,
        local_accumulation_dtype: torch.dtype | None = None,
    ) -> None:
        context, outcomes = steps.context(init_optimizer, param_names), steps.outcomes()
        layout = GroupLayout(context, ShardSettings())
        masters = MasterWeights(init_optimizer, context, steps, layout, self.per_param)
        reducing: GradientReduction = (
            Overlaid(context, masters.groups, reduction)
            if local_accumulation_dtype is None
            else Accumulated(context, masters.groups, reduction, local_accumulation_dtype)
        )
        files = self.files_class(masters, outcomes, self.masters_key)
        super().__init__(init_optimizer, context, reducing, masters, files, outcomes)

    fp32_groups_flat: list[torch.Tensor] = forwarded(
        "masters", name="single_partition_of_fp32_groups"
    )
