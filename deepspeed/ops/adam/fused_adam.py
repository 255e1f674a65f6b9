"""Adam under DeepSpeed's names, on torch's fused kernels (one pass over memory per step)."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

# torch before 2.7 has no switch between Adam's two weight decays inside one class.
_HAS_SWITCH = "decoupled_weight_decay" in inspect.signature(torch.optim.Adam.__init__).parameters


class FusedAdam(torch.optim.AdamW):
    """Adam (Kingma and Ba, arXiv:1412.6980) with decoupled weight decay (arXiv:1711.05101) unless
    `adam_w_mode` is off, which adds it to the gradient (L2).

    `bias_correction`, an option of groups too, undoes the moments' start at zero; `amsgrad` uses
    the maximum of second moments; with `set_grad_none` `zero_grad` sets gradients to None.
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
        self.defaults["bias_correction"] = bias_correction
        self._fill_groups()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore; groups that torch's Adam has saved get what they lack from the constructor's."""
        super().__setstate__(state)
        self._fill_groups()

    def _fill_groups(self) -> None:
        for group in self.param_groups:
            group.setdefault("bias_correction", self.defaults.get("bias_correction", True))

    # torch's own method, which every step asks for a group's tensors, those of its counts last: a
    # `step` of this class around torch's would run hooks of steps twice.
    def _init_group(self, group: dict[str, Any], *args: Any) -> Any:
        found = super()._init_group(group, *args)
        counts: list[torch.Tensor] = args[-1]
        if counts and not group["bias_correction"]:
            found_inf = getattr(self, "found_inf", None)
            torch._foreach_add_(counts, 1.0 if found_inf is None else 1.0 - found_inf)
            # The kernels divide by 1 - beta^count, which after infinitely many steps is 1.
            counts[:] = torch._foreach_add(counts, math.inf)
        return found

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; `set_to_none` defaults to the constructor's `set_grad_none`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
