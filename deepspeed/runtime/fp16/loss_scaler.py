"""Loss scaling: which factor the loss is multiplied by so that fp16 gradients neither vanish nor
overflow. Whether a step overflowed is decided elsewhere, identically on every rank.

Class paths and attribute names are part of the checkpoint format: optimizer state files pickle the
scaler itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, SupportsFloat

import torch

from deepspeed.checkpoint.constants import SCALER_KEYS
from deepspeed.runtime.config_utils import DeepSpeedConfigObject

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"

SCALE_FACTOR = 2.0


def to_python_float(t: SupportsFloat | torch.Tensor) -> float:
    """Return a Python float for a number or a one-element tensor."""
    if isinstance(t, torch.Tensor):
        return float(t.item())
    return float(t)


class LossScalerBase(DeepSpeedConfigObject):
    """The scale and what every scaler does with it.

    Call order per optimizer step, the same on every rank: ``backward`` (or ``scale_loss``) for each
    micro-batch, then one ``update_scale(overflow)``, whose result is the scale to divide this
    step's gradients by.
    """

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = float(cur_scale)
        # An instance attribute, because upstream's readers look for it in the pickled __dict__.
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by."""
        return self.cur_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss * scale``; computed in fp32, since 2**16 overflows fp16 by itself."""
        return loss.float() * self.cur_scale

    def scale_gradient(
        self, module: object, grad_in: tuple[torch.Tensor, ...], grad_out: object
    ) -> tuple[torch.Tensor, ...]:
        """Return ``grad_in`` times the scale; the signature is that of a module backward hook."""
        return tuple(self.cur_scale * grad for grad in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        torch.autograd.backward(self.scale_loss(loss), retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> float:
        """Judge one optimizer step; ``overflow`` is equal on all ranks.

        Returns:
            The scale that was used for the step just judged, before any change. Dividing the
            gradients by the new scale instead would be wrong by the growth factor on each step
            where the scale grows.
        """
        return self.cur_scale

    def state_dict(self) -> dict[str, Any]:
        """Return the plain attributes, to be given to :meth:`load_state_dict`."""
        return dict(self.__dict__)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; ValueError: it is of another kind."""
        unknown = sorted(set(state_dict) - set(self.__dict__))
        if unknown or state_dict.get("dynamic", self.dynamic) != self.dynamic:
            raise ValueError(
                f"loss scaler state {dict(state_dict)!r} does not fit {type(self).__name__}: "
                f"unknown names {unknown}; check that fp16.loss_scale is the same as when the "
                "state was saved"
            )
        self.__dict__.update(state_dict)

    def go_on_from(self, saved: Mapping[str, Any]) -> None:
        """Take over where the scale of a run stood, whose scaler may have been of another kind:
        attributes that this kind does not have are left.
        """
        for key in SCALER_KEYS:
            if key in saved and hasattr(self, key):
                setattr(self, key, saved[key])


class LossScaler(LossScalerBase):
    """A scale that never changes, 1 for none."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: object) -> bool:
        """Always False: a static scale does not react to overflow."""
        return False


class DynamicLossScaler(LossScalerBase):
    """A scale that halves on overflow and doubles after ``scale_window`` clean steps.

    Args:
        init_scale: the scale to start with.
        scale_window: clean steps in a row after which the next one doubles the scale.
        min_scale: the scale never goes below.
        delayed_shift: hysteresis; this many overflows are needed before the scale is halved.
        consecutive_hysteresis: clean steps refill the hysteresis; otherwise only growing does.
        raise_error_at_min_scale: overflow at ``min_scale`` raises instead of skipping for ever.
        dtype: the low-precision type whose range the scale protects.
    """

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__(init_scale)
        self.dynamic = True
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = SCALE_FACTOR
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype

    def has_overflow_serial(self, params: Any) -> bool:
        """Return whether a gradient of ``params`` here holds inf or nan (reads the device)."""
        return any(p.grad is not None and not bool(torch.isfinite(p.grad).all()) for p in params)

    def update_scale(self, overflow: bool) -> float:
        """Judge one optimizer step; RuntimeError: the scale is at ``min_scale`` already."""
        used = self.cur_scale
        if overflow:
            self._on_overflow()
        else:
            self._on_clean_step()
        self.cur_iter += 1
        return used

    def _on_overflow(self) -> None:
        if self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
        else:
            if self.cur_scale <= self.min_scale and self.raise_error_at_min_scale:
                raise RuntimeError(
                    "gradients are not finite although the loss scale is at its minimum already: "
                    f"loss scale {self.cur_scale}, fp16.min_loss_scale {self.min_scale}, step "
                    f"{self.cur_iter}. The model diverged or produces nan; lower the learning "
                    "rate, or train in bf16"
                )
            self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
        self.last_overflow_iter = self.cur_iter

    def _on_clean_step(self) -> None:
        if self.consecutive_hysteresis:
            self.cur_hysteresis = self.delayed_shift
        clean_steps_before = self.cur_iter - self.last_overflow_iter - 1
        if clean_steps_before > 0 and clean_steps_before % self.scale_window == 0:
            self.cur_hysteresis = self.delayed_shift
            self.cur_scale *= self.scale_factor


class LossScaleProfile(str, Enum):
    """Which optimizer's defaults hold when the configuration gives none."""

    FUSED = "fused"
    UNFUSED = "unfused"


@dataclass(frozen=True)
class LossScaleProfileDefaults:
    """Numbers that a profile stands for."""

    initial_dynamic_scale: float
    default_scale_window: int
    default_min_loss_scale: float
    scale_factor: float


LOSS_SCALE_PROFILE_DEFAULTS = {
    LossScaleProfile.FUSED: LossScaleProfileDefaults(2**32, 1000, 1, SCALE_FACTOR),
    LossScaleProfile.UNFUSED: LossScaleProfileDefaults(2.0**16, 1000, 0.25, SCALE_FACTOR),
}


class LossScaleConfig:
    """Loss-scaling settings of an fp16 optimizer, resolved from its arguments.

    Args:
        low_precision_dtype: type of the model; only ``torch.float16`` is scaled.
        dynamic_loss_scale: whether the scale adapts.
        static_loss_scale: the scale when it does not.
        dynamic_loss_args: ``init_scale``, ``scale_window``, ``min_scale`` (``delayed_shift`` and
            ``consecutive_hysteresis`` optional); the profile's defaults where absent.
        profile: where defaults come from.
        initial_dynamic_scale: replaces the profile's initial scale when no ``init_scale`` is given.
    """

    def __init__(
        self,
        low_precision_dtype: torch.dtype,
        dynamic_loss_scale: bool,
        static_loss_scale: float,
        dynamic_loss_args: Mapping[str, Any] | None,
        *,
        profile: LossScaleProfile = LossScaleProfile.FUSED,
        initial_dynamic_scale: float | None = None,
    ) -> None:
        defaults = LOSS_SCALE_PROFILE_DEFAULTS[profile]
        given = dict(dynamic_loss_args or {})
        self.low_precision_dtype = low_precision_dtype
        self.use_grad_scaling = low_precision_dtype == torch.float16
        self.dynamic_loss_scale = dynamic_loss_scale and self.use_grad_scaling
        self.dynamic_loss_args = dynamic_loss_args
        self.cur_iter = 0
        self.last_overflow_iter: int | None = None
        self.scale_factor: float | None = None
        self.scale_window: int | None = None
        self.min_loss_scale: float | None = None
        if not self.dynamic_loss_scale:
            self.cur_scale: float = static_loss_scale if self.use_grad_scaling else 1.0
            return
        if initial_dynamic_scale is None:
            initial_dynamic_scale = defaults.initial_dynamic_scale
        self.cur_scale = given.get(INITIAL_LOSS_SCALE, initial_dynamic_scale)
        self.last_overflow_iter = -1
        self.scale_factor = defaults.scale_factor
        self.scale_window = given.get(SCALE_WINDOW, defaults.default_scale_window)
        self.min_loss_scale = given.get(MIN_LOSS_SCALE, defaults.default_min_loss_scale)


def CreateLossScaler(  # noqa: N802 - the name is upstream's
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScalerBase:
    """Return the scaler for a training type.

    Args:
        dtype: type of the model; anything but ``torch.float16`` gets a static scale of 1.
        static_loss_scale: the scale when it does not adapt.
        dynamic_scaling: whether it adapts; ``dynamic_loss_args`` are :class:`DynamicLossScaler`'s.
    """
    if dtype != torch.float16:
        return LossScaler(1.0)
    if not dynamic_scaling:
        return LossScaler(static_loss_scale)
    if dynamic_loss_args is None:
        raise ValueError(
            "dynamic loss scaling needs dynamic_loss_args, got None; pass init_scale, "
            "scale_window, ..."
        )
    return DynamicLossScaler(**{"dtype": dtype, **dynamic_loss_args})
