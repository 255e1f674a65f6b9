"""Compares what the system did with what it must have done, parameter by parameter, and sums up in
plain numbers. What parameters may differ by after a step is derived in docs/ds_verify.md.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspeed.ops.muon.muon import MuonWithAuxAdam
from deepspeed.ops.muon.newton_schulz import orthogonalize
from deepspeed.runtime.gradients.norm import clip_factor
from deepspeed.runtime.optimizer_factory import build_basic_optimizer
from deepspeed.verify.oracle.plan import Run, RunKind, read_config
from deepspeed.verify.oracle.reference import (
    FP32_TOLERANCE,
    ROUNDOFF,
    Expected,
    Tensors,
    global_norm,
)
from deepspeed.verify.oracle.system import SGD_LEARNING_RATE, StepRecord, plain_optimizer

UPDATE_TOLERANCE = 1e-4
# Roundings of half-precision moments that may add up in an update, and those of a weight in a step.
MOMENT_ROUNDINGS, WEIGHT_ROUNDINGS = 16, 2


def _tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Return what is allowed of the sizes of a weight kept in `dtype` and of its update."""
    if dtype == torch.float32:
        return FP32_TOLERANCE, UPDATE_TOLERANCE
    return WEIGHT_ROUNDINGS * ROUNDOFF[dtype], MOMENT_ROUNDINGS * ROUNDOFF[dtype]


@dataclass
class Deviation:
    """One quantity of one parameter: 2-norms of error, allowance and value."""

    error: float
    bound: float
    size: float

    @property
    def is_within(self) -> bool:
        """False for NaN too."""
        return self.error <= self.bound


@dataclass
class StepFindings:
    """One step against its reference."""

    step: int
    # Against the reference in the model's precision; fp32: in double precision.
    gradients: dict[str, Deviation] = field(default_factory=dict)
    # Against the whole batch in double precision.
    whole: dict[str, Deviation] = field(default_factory=dict)
    # The model alone: mean of micro-batches against the whole batch, both in double precision.
    split: dict[str, Deviation] = field(default_factory=dict)
    parameters: dict[str, Deviation] = field(default_factory=dict)  # after the step
    norm: Deviation | None = None
    # Per parameter: <system, reference> and <reference, reference>, whose quotient measures the
    # divisor.
    products: dict[str, tuple[float, float]] = field(default_factory=dict)
    skipped: str = ""  # why the step is not compared; empty if it is


def deviation(found: torch.Tensor | None, wanted: torch.Tensor, bound: float) -> Deviation:
    """Compare one tensor; what is missing counts as zero."""
    value = torch.zeros_like(wanted) if found is None else found
    return Deviation((value.double() - wanted.double()).norm().item(), bound, wanted.norm().item())


def deviations(
    found: Mapping[str, torch.Tensor], wanted: Tensors, bounds: dict[str, float]
) -> dict[str, Deviation]:
    """Compare every tensor."""
    return {name: deviation(found.get(name), value, bounds[name]) for name, value in wanted.items()}


def judge_step(
    record: StepRecord, expected: Expected, largest: float, prefer_exact: bool
) -> StepFindings:
    """Judge gradient, norm and divisor of one step; in sums nothing fits above `largest`."""
    findings = StepFindings(record.step)
    # NaN compares false: it is an overflow too.
    if not record.applied and not expected.peak < largest:
        findings.skipped = "skipped by the system, rightly: a sum of gradients overflows"
        return findings
    wanted, bounds = expected.wanted(prefer_exact)
    if expected.whole is not None and expected.split is not None:
        findings.whole = deviations(record.grads, expected.whole, expected.exact_bounds)
        total = math.sqrt(sum(size**2 for size in expected.sizes.values()))
        allowed = {n: FP32_TOLERANCE * (size + 0.01 * total) for n, size in expected.sizes.items()}
        findings.split = deviations(expected.split, expected.whole, allowed)
    findings.gradients = deviations(record.grads, wanted, bounds)
    for name, value in wanted.items():
        grad = record.grads.get(name)
        dot = 0.0 if grad is None else (grad.double() * value).sum().item()
        findings.products[name] = (dot, value.square().sum().item())
    norm = global_norm(wanted.values())
    # The system adds up squares in fp32; rounding of n of them grows like a random walk.
    numel = sum(value.numel() for value in wanted.values())
    rounding = FP32_TOLERANCE + ROUNDOFF[torch.float32] * math.sqrt(numel)
    bound = math.sqrt(sum(bound**2 for bound in bounds.values())) + rounding * norm
    reported = math.nan if record.norm is None else record.norm
    findings.norm = Deviation(abs(reported - norm), bound, norm)
    return findings


def judge_sgd(findings: StepFindings, record: StepRecord, gradient: Tensors, clip: float) -> None:
    """Judge parameters after a step of SGD from the reference's own gradient."""
    if findings.skipped or findings.norm is None:
        return
    norm, norm_bound = findings.norm.size, findings.norm.bound
    factor = clip_factor(norm, clip)
    relative = norm_bound / norm if clip > 0 and norm > 0 else 0.0
    for name, before in record.before.items():
        grad = gradient[name]
        wanted = before.double() - SGD_LEARNING_RATE * factor * grad
        off = findings.gradients[name].bound + relative * grad.norm().item()
        allowed = SGD_LEARNING_RATE * factor * off
        rounding = _tolerances(before.dtype)[0] * before.norm().item()
        findings.parameters[name] = deviation(record.after.get(name), wanted, allowed + rounding)


class _PlainMuon(torch.optim.Optimizer):
    """Muon and AdamW over the groups of the package's, written down once more; a fault in that
    would be in both sides of the comparison otherwise.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            rate, decay = group["lr"], group["lr"] * group["weight_decay"]
            first, second = group["betas"]
            for param in (one for one in group["params"] if one.grad is not None):
                grad, state = param.grad, self.state[param]
                if not state:
                    state |= {"step": 0, "mean": torch.zeros_like(param)}
                    state["square"] = torch.zeros_like(param)
                state["step"] += 1
                mean, square = state["mean"], state["square"]
                if group["use_muon"]:
                    # In these operations: of another rounding bf16 would make more.
                    mean.lerp_(grad, 1 - group["momentum"])
                    ahead = grad.lerp(mean, group["momentum"])
                    found = orthogonalize(ahead, group["ns_method"]).to(param.dtype)
                    rows, columns = found.shape[-2:] if found.dim() == 3 else found.flatten(1).shape
                    change = found * max(1.0, rows / columns) ** 0.5
                else:
                    mean.mul_(first).add_(grad, alpha=1 - first)
                    square.mul_(second).addcmul_(grad, grad, value=1 - second)
                    root = (square / (1 - second ** state["step"])).sqrt() + group["eps"]
                    change = mean / (1 - first ** state["step"]) / root
                param.mul_(1 - decay).sub_(change, alpha=rate)


class ReferenceOptimizer:
    """The configuration's optimizer over whole fp32 parameters, fed with the system's gradients."""

    def __init__(self, run: Run, before: Tensors, module: torch.nn.Module) -> None:
        self.note = ""  # what it is, if it is not torch's own optimizer
        self.clip = read_config(run.config, run.shape.world).tree.gradient_clipping
        self.params = {name: module.get_parameter(name) for name in sorted(before)}
        for name, value in before.items():
            self.params[name].data = value.clone()
        try:
            self.optimizer = plain_optimizer(run.config["optimizer"], list(self.params.values()))
        except LookupError:
            config = read_config({**run.config, "zero_optimization": {"stage": 0}}, run.shape.world)
            self.optimizer = build_basic_optimizer(config, list(self.params.values()), module)
            made = type(self.optimizer).__name__
            self.note = f"the reference is this package's own {made} over whole parameters"
            if isinstance(self.optimizer, MuonWithAuxAdam):
                self.optimizer = _PlainMuon(self.optimizer.param_groups)
                self.note = "of Muon the orthogonalization alone is not checked by another"
        self.faults: list[str] = []  # what a second half does otherwise than without a stop
        self._run, self._path = run, Path(run.checkpoint, "reference.pt")
        self._handed: dict[Any, Any] = {}
        if run.kind is RunKind.RESUMED:
            self._handed = torch.load(self._path, weights_only=True)
            self.optimizer.load_state_dict(self._handed["optimizer"])
            masters = self._handed["masters"].items()
            apart = [name for name, value in masters if not torch.equal(before[name], value)]
            self.faults += [f"{name} is not as it was saved" for name in apart]

    def judge(self, record: StepRecord) -> dict[str, Deviation]:
        """Step as the system did, and compare the parameters."""
        for own in self.optimizer.param_groups:
            # The system's may be parted further, for experts.
            kind = own.get("use_muon")
            other = next(group for group in record.groups if group.get("use_muon") == kind)
            # What schedules change; switches of an implementation (fused, foreach) stay its own.
            for key in {"lr", "betas", "momentum", "weight_decay"} & own.keys() & other.keys():
                own[key] = other[key]
        factor = clip_factor(record.norm or 0.0, self.clip)
        for name, param in self.params.items():
            with torch.no_grad():
                param.copy_(record.before[name])
            grad = record.grads.get(name)
            param.grad = None if grad is None else (grad * factor).to(param.dtype)
        if record.applied:
            self.optimizer.step()
        found = {}
        for name, param in self.params.items():
            before = record.before[name]
            weight, change = _tolerances(before.dtype)
            update = (param.detach() - before).norm().item()
            bound = change * update + weight * before.norm().item()
            found[name] = deviation(record.after.get(name), param.detach(), bound)
        if self._run.checkpoint:
            self._hand_over(record)
        return found

    def _hand_over(self, record: StepRecord) -> None:
        """Tell the second half how a run goes on that does not stop; or compare it with that."""
        run, handed = self._run, self._handed
        rates = [record.loss_scale, *sorted({float(group["lr"]) for group in record.groups})]
        if run.kind is RunKind.RESUMED:
            if rates != (wanted := handed[record.step]):
                text = f"loss scale and learning rates {rates}, without a stop {wanted}"
                self.faults.append(f"step {record.step}: {text}")
            return
        handed[record.step] = rates
        if record.step + 1 == run.half:
            handed["masters"] = record.after
            handed["optimizer"] = copy.deepcopy(self.optimizer.state_dict())
        if record.step + 1 == run.steps:
            torch.save(handed, self._path)
