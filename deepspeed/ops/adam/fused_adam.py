"""Adam under DeepSpeed's names, on torch's fused kernels (one pass over memory per step)."""

from __future__ import annotations

import inspect
from typing import Any

import torch

# torch before 2.7 has no switch between Adam's two weight decays inside one class.
_HAS_SWITCH = "decoupled_weight_decay" in inspect.signature(torch.optim.Adam.__init__).parameters


def refuse_without_bias_correction(name: str, bias_correction: bool) -> None:
    """Refuse to switch bias correction off: torch's kernels always correct."""
    if not bias_correction:
        raise ValueError(
            f"{name}: bias_correction=False is not supported; torch's Adam always corrects the bias"
        )


class FusedAdam(torch.optim.AdamW):
    """Adam (Kingma and Ba, arXiv:1412.6980) with decoupled weight decay (arXiv:1711.05101) unless
    `adam_w_mode` is off, which adds it to the gradient (L2).

    `bias_correction` must be True; `amsgrad` uses the maximum of second moments; with
    `set_grad_none` `zero_grad` sets gradients to None.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_without_bias_correction(type(self).__name__, bias_correction)
        if not adam_w_mode and weight_decay and not _HAS_SWITCH:
            raise ValueError(
                "adam_w_mode=False with weight decay needs torch 2.7 or newer; use torch.optim.Adam"
            )
        super().__init__(
            params,
            lr=lr,
            betas=(betas[0], betas[1]),
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            fused=True,
        )
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        if _HAS_SWITCH:
            self.defaults["decoupled_weight_decay"] = adam_w_mode
            for group in self.param_groups:
                group["decoupled_weight_decay"] = adam_w_mode

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; `set_to_none` defaults to the constructor's `set_grad_none`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
