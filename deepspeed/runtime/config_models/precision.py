"""Number formats: the blocks fp16, bf16, data_types, torch_autocast and amp."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, field_validator
from pydantic_core import PydanticCustomError

from deepspeed.runtime.config_models.base import (
    Bool,
    DeepSpeedConfigModel,
    Float,
    Int,
    Text,
    option,
)
from deepspeed.runtime.config_utils import DeepSpeedConfigError, parse_dtype


def checked_dtype_name(value: str | None) -> str | None:
    """Return ``value`` when it names a dtype (or is None)."""
    try:
        parse_dtype(value)
    except DeepSpeedConfigError as error:
        raise PydanticCustomError("wrong_type", '"fp32", "fp16", "bf16" or null') from error
    return value


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """Training in fp16 with loss scaling."""

    enabled: Bool = option(False, "Train in fp16.")
    auto_cast: Bool = option(False, "Cast the floating-point inputs of forward to fp16.")
    loss_scale: Float = option(0.0, "Static loss scale; 0 chooses dynamic scaling.", ge=0)
    initial_scale_power: Int = option(16, "Dynamic scaling starts at 2 to this power.", ge=0)
    loss_scale_window: Int = option(
        1000, "Clean steps after which the dynamic scale doubles.", ge=1
    )
    hysteresis: Int = option(2, "Overflows needed before the dynamic scale is halved.", ge=1)
    consecutive_hysteresis: Bool = option(
        False, "Refill the hysteresis on each clean step, not only on growth."
    )
    min_loss_scale: Int = option(
        1, "The dynamic scale never goes below; overflow at it is an error.", ge=0
    )
    fp16_master_weights_and_grads: Bool = option(
        False, "Keep master weights and gradients in fp16."
    )

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale adapts."""
        return self.loss_scale == 0

    def initial_dynamic_scale(self) -> int:
        """Return the scale that dynamic scaling starts with."""
        return 1 << self.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the keyword arguments of ``DynamicLossScaler``."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "min_scale": self.min_loss_scale,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
        }


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """Training in bf16 with fp32 master weights."""

    enabled: Bool = option(False, "Train in bf16.")
    immediate_grad_update: Bool = option(
        False, "Add each gradient to the fp32 accumulator as soon as it is made."
    )
    check_grad_overflow: Bool = option(
        True, "Skip the step on every rank when a gradient on any rank is not finite."
    )
    bf16_master_weights_and_grads: Bool = option(
        False, "Keep master weights and gradients in bf16."
    )
    bf16_optimizer_states: Bool = option(False, "Keep optimizer state in bf16.")


class DataTypesConfig(DeepSpeedConfigModel):
    """Types of intermediate buffers: "fp32", "fp16", "bf16" or null."""

    grad_accum_dtype: Text | None = option(
        None, "Type in which gradients accumulate; null: the model's type."
    )
    param_dtype: Text | None = option(
        None, "Type of the parameters: the same as the enabled precision says; null: that."
    )
    buffer_dtype: Text | None = option(
        None, "Type that module buffers are cast to; null: each keeps the type it was made in."
    )

    _check = field_validator("grad_accum_dtype", "param_dtype", "buffer_dtype")(checked_dtype_name)


class TorchAutocastConfig(DeepSpeedConfigModel):
    """torch.autocast around forward."""

    enabled: Bool = option(False, "Run forward under torch.autocast.")
    dtype: Text | None = option(None, "Autocast type; null: torch's default for the device.")
    lower_precision_safe_modules: list[Text] | None = option(
        None,
        "Class paths of modules whose gradients may be communicated in the autocast type; null: a "
        "built-in list.",
    )

    _check = field_validator("dtype")(checked_dtype_name)


class AmpConfig(DeepSpeedConfigModel):
    """NVIDIA Apex AMP; its remaining keys are Apex's."""

    model_config = ConfigDict(extra="allow")

    enabled: Bool = option(False, "Use NVIDIA Apex AMP.")
