"""Compares what the system did with what it must have done, parameter by parameter, and sums up in
plain numbers.

Owns `[Note: parameters]`: after a step, |system - expected| per parameter is bounded by

- SGD: learning rate times the gradient's bound, with the relative error of the norm when clipping,
  and fp32 rounding of the weight;
- any other optimizer: `UPDATE_TOLERANCE` of the update and fp32 rounding of the weight, when a
  plain optimizer over whole parameters is fed the gradients that the system reports. (Fed the
  reference's own, Adam would turn the rounding of a tiny gradient into a full step.)

Half-precision weights without masters are rounded after every step, and so are moments: both are
then bounded by roundings of that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from deepspeed.runtime.gradients.norm import clip_factor
from deepspeed.runtime.optimizer_factory import build_basic_optimizer
from deepspeed.verify.oracle.plan import Run, read_config
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


def _weight_tolerance(dtype: torch.dtype) -> float:
    # Of the size of weights that are kept in `dtype`.
    return FP32_TOLERANCE if dtype == torch.float32 else WEIGHT_ROUNDINGS * ROUNDOFF[dtype]


def _update_tolerance(dtype: torch.dtype) -> float:
    # Of the size of an update of weights that are kept in `dtype`, as their moments are.
    return UPDATE_TOLERANCE if dtype == torch.float32 else MOMENT_ROUNDINGS * ROUNDOFF[dtype]


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
    # Against the reference in the model's precision; fp32: against the whole batch.
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepFindings:
        changed = dict(data)
        for key in ("gradients", "whole", "split", "parameters"):
            changed[key] = {name: Deviation(**value) for name, value in data[key].items()}
        changed["norm"] = None if data["norm"] is None else Deviation(**data["norm"])
        changed["products"] = {
            name: (value[0], value[1]) for name, value in data["products"].items()
        }
        return cls(**changed)


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
    record: StepRecord,
    expected: Expected,
    *,
    largest: float,
    sum_factor: float,
    whole_is_the_reference: bool,
) -> StepFindings:
    """Gradient, norm and divisor of one step."""
    findings = StepFindings(record.step)
    # NaN compares false: it is an overflow too.
    overflows = not expected.peak < largest
    if not record.applied and overflows:
        findings.skipped = "skipped by the system, rightly: a sum of gradients overflows"
        return findings
    use_whole = whole_is_the_reference and expected.whole is not None
    wanted, bounds = (
        (expected.whole, expected.whole_bounds)
        if use_whole
        else (expected.rounded, expected.rounded_bounds)
    )
    wanted, bounds = _scaled(wanted or {}, bounds, sum_factor)
    findings.gradients = deviations(record.grads, wanted, bounds)
    if expected.whole is not None and expected.split is not None:
        findings.whole = deviations(
            record.grads, *_scaled(expected.whole, expected.whole_bounds, sum_factor)
        )
        total = math.sqrt(sum(size**2 for size in expected.sizes.values()))
        allowed = {
            name: FP32_TOLERANCE * (size + 0.01 * total) for name, size in expected.sizes.items()
        }
        findings.split = deviations(expected.split, expected.whole, allowed)
    for name, value in wanted.items():
        grad = record.grads.get(name)
        dot = 0.0 if grad is None else (grad.double() * value).sum().item()
        findings.products[name] = (dot, value.square().sum().item())
    norm = global_norm(wanted.values())
    # The system adds up squares in fp32; rounding of n of them grows like a random walk.
    rounding = FP32_TOLERANCE + ROUNDOFF[torch.float32] * math.sqrt(
        sum(value.numel() for value in wanted.values())
    )
    bound = math.sqrt(sum(bound**2 for bound in bounds.values())) + rounding * norm
    reported = math.nan if record.norm is None else record.norm
    findings.norm = Deviation(abs(reported - norm), bound, norm)
    return findings


def _scaled(
    values: Tensors, bounds: dict[str, float], factor: float
) -> tuple[Tensors, dict[str, float]]:
    if factor == 1.0:
        return values, bounds
    return {name: value * factor for name, value in values.items()}, {
        name: bound * factor for name, bound in bounds.items()
    }


def judge_sgd(
    findings: StepFindings, record: StepRecord, expected: Expected, clip: float, sum_factor: float
) -> None:
    """Judge parameters after a step of SGD from the reference's own gradient."""
    if findings.skipped or findings.norm is None:
        return
    norm, norm_bound = findings.norm.size, findings.norm.bound
    factor = clip_factor(norm, clip)
    relative = norm_bound / norm if clip > 0 and norm > 0 else 0.0
    source = (
        expected.whole
        if set(findings.whole) and findings.gradients == findings.whole
        else expected.rounded
    )
    for name, before in record.before.items():
        grad = (source or {})[name] * sum_factor
        wanted = before.double() - SGD_LEARNING_RATE * factor * grad
        allowed = (
            SGD_LEARNING_RATE
            * factor
            * (findings.gradients[name].bound + relative * grad.norm().item())
        )
        rounding = _weight_tolerance(before.dtype) * before.norm().item()
        findings.parameters[name] = deviation(record.after.get(name), wanted, allowed + rounding)


class ReferenceOptimizer:
    """The configuration's optimizer over whole fp32 parameters, fed with the system's gradients."""

    def __init__(self, run: Run, before: Tensors, module: torch.nn.Module) -> None:
        self.note = ""  # what it is, if it is not torch's own optimizer
        self.params = {name: module.get_parameter(name) for name in before}
        for name, value in before.items():
            self.params[name].data = value.clone()
        try:
            self.optimizer = plain_optimizer(run.config["optimizer"], list(self.params.values()))
        except LookupError:
            config = read_config({**run.config, "zero_optimization": {"stage": 0}}, run.shape.world)
            self.optimizer = build_basic_optimizer(config, list(self.params.values()), module)
            self.note = (
                f"the reference is this package's own {type(self.optimizer).__name__} over whole "
                "parameters"
            )

    def judge(self, record: StepRecord, clip: float) -> dict[str, Deviation]:
        """Step as the system did, and compare the parameters."""
        for own, other in zip(self.optimizer.param_groups, record.groups, strict=True):
            # What schedules change; switches of an implementation (fused, foreach) stay this one's
            # own.
            own.update(
                {
                    key: other[key]
                    for key in ("lr", "betas", "momentum", "weight_decay")
                    if key in other and key in own
                }
            )
        factor = clip_factor(record.norm or 0.0, clip)
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
            update = (param.detach() - before).norm().item()
            bound = _update_tolerance(before.dtype) * update
            bound += _weight_tolerance(before.dtype) * before.norm().item()
            found[name] = deviation(record.after.get(name), param.detach(), bound)
        return found
