"""Adagrad under DeepSpeed's name, torch's implementation."""

from __future__ import annotations

from typing import Any

import torch


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad (Duchi et al., JMLR 2011).

    Args:
        model_params: Parameters or groups, kept by identity.
        lr: Learning rate.
        eps: Added to the denominator.
        weight_decay: L2 weight decay.
        amsgrad: Must be False; Adagrad has no such variant.

    Raises:
        ValueError: For `amsgrad=True`.
    """

    def __init__(
        self, model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, amsgrad: bool = False
    ) -> None:
        if amsgrad:
            raise ValueError("DeepSpeedCPUAdagrad: amsgrad=True is not supported; Adagrad has no such variant")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
