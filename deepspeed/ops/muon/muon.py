"""Muon (Jordan et al., 2024) for matrices and AdamW for the rest, both torch's own, behind one
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class MuonWithAuxAdam(torch.optim.Optimizer):
    """Steps hidden matrices with `torch.optim.Muon` and all else with `torch.optim.AdamW`.

    Args:
        params: Parameters, or groups with the key `use_muon`. Without it, a 2-D parameter uses Muon
            unless it is marked `param.use_muon = False` (embeddings and output heads should be).
        lr: Learning rate of both.
        momentum: Of Muon.
        weight_decay: Of both.
        betas: Of AdamW.
        eps: Of AdamW.

    Raises:
        RuntimeError: If this torch has no Muon (before 2.9).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(f"Muon needs torch 2.9 or newer, this is {torch.__version__}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": tuple(betas),
            "eps": eps,
        }
        super().__init__(self._split(list(params)), defaults)
        self._inner = [self._build(group) for group in self.param_groups]

    @staticmethod
    def _split(params: list[Any]) -> list[dict[str, Any]]:
        groups = params if params and isinstance(params[0], dict) else [{"params": params}]
        split: list[dict[str, Any]] = []
        for group in groups:
            if "use_muon" in group:
                split.append(group)
                continue
            for use_muon in (True, False):
                chosen = [
                    p
                    for p in group["params"]
                    if (p.dim() == 2 and getattr(p, "use_muon", True)) == use_muon
                ]
                if chosen:
                    split.append({**group, "params": chosen, "use_muon": use_muon})
        return split

    @staticmethod
    def _build(group: dict[str, Any]) -> torch.optim.Optimizer:
        if group["use_muon"]:
            options = {key: group[key] for key in ("lr", "momentum", "weight_decay")}
            return torch.optim.Muon(group["params"], **options)
        options = {key: group[key] for key in ("lr", "betas", "weight_decay", "eps")}
        return torch.optim.AdamW(group["params"], **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner in zip(self.param_groups, self._inner, strict=True):
            # The outer group is what schedulers write to and what the engine hands masters to.
            own = inner.param_groups[0]
            own.update({key: group[key] for key in own if key in group})
            for param in group["params"]:
                inner.state[param] = self.state[param]
            inner.step()
        return loss
