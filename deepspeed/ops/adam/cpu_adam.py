"""Adam for optimizer state on the host, on torch's fused CPU kernel."""

from __future__ import annotations

from typing import Any

from deepspeed.ops.adam.fused_adam import FusedAdam


class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam` with upstream's host-side signature.

    Args:
        model_params: Parameters or groups; group dictionaries are kept by identity, so schedulers that hold them go on working.
        lr: Learning rate.
        bias_correction: Must be True.
        betas: Decay of first and second moment.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        amsgrad: Use the maximum of second moments.
        adamw_mode: Decouple weight decay.
        fp32_optimizer_states: Moments are kept in the dtype of the masters, which is fp32; False is refused.

    Raises:
        ValueError: For what torch's kernel does not do, naming the argument.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ValueError("DeepSpeedCPUAdam: fp32_optimizer_states=False is not supported; moments follow the masters' fp32")
        super().__init__(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            adam_w_mode=adamw_mode,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )
