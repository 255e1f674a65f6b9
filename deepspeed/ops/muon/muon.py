"""Muon (Jordan et al., 2024) for matrices and AdamW for the rest, behind one optimizer.

Muon's update of a matrix M with gradient G is

    B <- B + (1 - momentum) (G - B),    D = G + momentum (B - G),
    M <- (1 - lr * weight_decay) M - lr * sqrt(max(1, rows / columns)) * O(D),

where O(D) is the nearly orthogonal factor of D (`newton_schulz`). All but O is elementwise, so on
shards ranks keep cut masters and momentum, and exchange D in the two bytes per element that O
computes in (`ops.whole_parameters`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import EllipsisType
from typing import Any

import torch

from deepspeed.accelerator import runs_ahead
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.muon.newton_schulz import NS_METHODS, orthogonalize
from deepspeed.ops.parameter_runs import stepped_by_runs
from deepspeed.ops.squares import IN_ORDER
from deepspeed.ops.whole_parameters import Part, WholeParameterOptimizer
from deepspeed.utils.tensor_fragment import logical_shape

MARK = "use_muon"  # of parameters, and the key of parameter groups
ADAMW_KEYS = ("lr", "betas", "weight_decay", "eps")


def is_matrix(param: torch.Tensor) -> bool:
    """Tell whether Muon can update it: its whole shape has rows and columns."""
    return len(logical_shape(param)) >= 2


def with_marks(
    params: Iterable[Any],
    uses_muon: Callable[[torch.Tensor], bool],
    names: Mapping[Any, str] | None = None,
) -> list[dict[str, Any]]:
    """Group parameters, or complete groups, by the key `use_muon`; `uses_muon` decides of
    parameters that are not marked (`param.use_muon`), and `names` are for errors: a mark that says
    otherwise than its group, or Muon for what is no matrix.
    """
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    found: list[dict[str, Any]] = []
    for group in groups:
        if MARK in group:
            found.append(group)
        else:
            members = _members(group)
            chosen = [bool(getattr(param, MARK, uses_muon(param))) for param in members]
            for use in (True, False):
                own = [param for param, mark in zip(members, chosen, strict=True) if mark == use]
                if own:
                    found.append({**group, "params": own, MARK: use})
    for number, group in enumerate(found):
        _check_group(number, group, names or {})
    return found or [{"params": [], MARK: False}]


def _members(group: dict[str, Any]) -> list[torch.Tensor]:
    members = group["params"]
    return [members] if isinstance(members, torch.Tensor) else list(members)


def _check_group(number: int, group: dict[str, Any], names: Mapping[Any, str]) -> None:
    group["params"] = _members(group)
    for index, param in enumerate(group["params"]):
        name = names.get(param, f"parameter {index} of group {number}")
        what = f"{name}, of shape {tuple(logical_shape(param))}"
        if group[MARK] and not is_matrix(param):
            raise ValueError(
                f"{what}, has use_muon, but Muon updates matrices: set param.use_muon = False, or "
                "give it a group with use_muon=False"
            )
        if hasattr(param, MARK) and bool(getattr(param, MARK)) != bool(group[MARK]):
            raise ValueError(
                f"{what}, has param.use_muon = {getattr(param, MARK)}, its group "
                f"use_muon={group[MARK]}: make them agree"
            )


class MuonWithAuxAdam(WholeParameterOptimizer):
    """Steps matrices with Muon and all else with `FusedAdam`.

    Groups may have the key `use_muon`. Without it, a parameter of two dimensions or more uses Muon
    unless it is marked `param.use_muon = False`, as embeddings and output heads should be (the
    engine does so for a configuration). `muon_lr` and `adam_lr` are `lr` unless given; `ns_method`
    is "gram", or "standard", the order of products of `torch.optim.Muon`, which are larger where a
    matrix is far from square. ValueError of `with_marks`, or for an unknown `ns_method`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        ns_method: str = "gram",
    ) -> None:
        if ns_method not in NS_METHODS:
            raise ValueError(f"ns_method: {ns_method!r} is unknown; use one of {NS_METHODS}")
        groups = with_marks(params, is_matrix)
        for group in groups:
            rate = muon_lr if group[MARK] else adam_lr
            group.setdefault("lr", lr if rate is None else rate)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": tuple(betas),
            "eps": eps,
            "ns_method": ns_method,
        }
        super().__init__(groups, defaults)
        self._adamw: dict[int, FusedAdam] = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore; ValueError if a group of Muon's would become one of AdamW's, or the reverse."""
        saved = state_dict["param_groups"]
        for number, (group, other) in enumerate(zip(self.param_groups, saved, strict=False)):
            if other.get(MARK) != group[MARK]:
                raise ValueError(
                    f"parameter group {number} has use_muon={group[MARK]}, in the state that is "
                    f"loaded use_muon={other.get(MARK)}: it is of another optimizer, or of other "
                    "groups"
                )
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            # State of before there was a choice.
            group.setdefault("ns_method", self.defaults["ns_method"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. On shards, all ranks call it."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for number, group in enumerate(self.param_groups):
            if group[MARK]:
                for tensor in group["params"]:
                    if tensor.grad is not None:
                        self._step_muon(tensor, group)
            else:
                runs = {one: self.runs[one] for one in group["params"] if one in self.runs}
                with stepped_by_runs(self, runs):
                    self._step_adamw(number, group)
        return loss

    def _step_muon(self, tensor: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[tensor], tensor.grad
        assert grad is not None, "a tensor without a gradient is left out"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(tensor)
        momentum, beta = state["momentum_buffer"], group["momentum"]
        ns_method, decay = group["ns_method"], 1 - group["lr"] * group["weight_decay"]
        whole = self.parameters_in(tensor)

        # Part by part, which on the host are in its caches from one operation to the next.
        def direction(at: slice | EllipsisType) -> torch.Tensor:
            if not self.is_stepped(tensor, Part(0, at)):
                return torch.zeros_like(grad[at], dtype=torch.bfloat16)
            ahead = grad[at].lerp(momentum[at].lerp_(grad[at], 1 - beta), beta)
            return ahead.to(torch.bfloat16)

        def update(part: Part, found: torch.Tensor) -> None:
            if not self.is_stepped(tensor, part):
                return
            rate = group["lr"] * _scale(whole.shapes[part.param])
            tensor[part.at].mul_(decay).add_(found, alpha=-rate)

        whole.through_owners(direction, lambda matrix: orthogonalize(matrix, ns_method), update)

    def _step_adamw(self, number: int, group: dict[str, Any]) -> None:
        if not group["params"]:
            return
        if number not in self._adamw:
            own = {key: group[key] for key in ADAMW_KEYS}
            self._adamw[number] = FusedAdam(group["params"], **own)
        inner = self._adamw[number]
        # Runs of the step before are gone.
        inner.state.clear()
        # The outer group is what schedulers write to and what the engine hands masters to.
        inner.param_groups[0].update({key: group[key] for key in (*ADAMW_KEYS, "params")})
        # On the host torch's fused kernel rounds the end of a slice otherwise than its middle.
        shows_cut = not runs_ahead(group["params"][0])
        inner.param_groups[0]["fused"] = not (shows_cut and self.squares is not IN_ORDER)
        for tensor in group["params"]:
            inner.state[tensor] = state = self.state[tensor]
            if "step" in state:
                # The fused kernel counts on the device; what was loaded may be on the host.
                state["step"] = torch.as_tensor(
                    state["step"], dtype=torch.float32, device=tensor.device
                )
        inner.step()


def _scale(shape: torch.Size) -> float:
    """Keep the size of a tall matrix' update that of a square one's, by element."""
    rows, columns = shape[-2:] if len(shape) == 3 else (shape[0], shape[1:].numel())
    return math.sqrt(max(1, rows / columns)) if columns else 1.0
