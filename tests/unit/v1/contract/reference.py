"""The single-process reference of the contract suite: plain torch, no process group, no deepspeed.

fp32: trains on the concatenated global batch from the first step to the last. Gradients, norm and
parameters agree within 1e-6, gradients relative to M = mean_i |g[i]|, the size of the
micro-batches' gradients that are averaged: where they cancel (a scalar parameter's can nearly
vanish) the reference itself is no better than that.

Half precision: starts each step from the system's own masters (the first from the initial weights),
rounds the model as the system does and takes the gradient g[i] of every micro-batch of every rank
as that rank's autograd rounds it; what is left is how the sum of the g[i] is rounded. `[Note:
bound]` The system makes at most A - 1 additions over micro-batches, N - 1 over ranks and two
scalings, each with a relative error of at most u (half a unit in the last place) of a partial sum,
and no partial sum exceeds M. One more for a vector kernel that rounds otherwise on other
alignments, so per tensor, in the 2-norm,

    |system - reference| <= (A + N + 1) * u * M + tiny,

with u of the narrowest dtype that sums pass through, and `tiny` for fp16's smallest subnormal, loss
scale removed. SGD is linear: parameters differ by the learning rate times that. Clipping adds the
relative error of the norm.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import nn

from unit.v1.contract.model import (
    Batch,
    ContractModel,
    concatenated,
    global_batch,
    make_model,
    parameter_groups,
)

# Small enough that a step doesn't throw the model about: a rounding error of one step would grow in
# the next ones' gradients.
LEARNING_RATE = 0.1
CLIP = 0.05
LOSS_SCALE = 128.0
FP32_TOLERANCE = 1e-6
CLIP_EPSILON = 1e-6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FP16_SMALLEST = 2.0**-24

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Expected:
    """What one step must give.

    Attributes:
        grads: Averaged gradient of each trainable parameter, zero where it took no part, before
            clipping.
        params: fp32 parameters after the step.
        grad_bounds: Allowed 2-norm of the difference, per parameter; `param_bounds` likewise.
    """

    grads: Tensors
    norm: float
    params: Tensors
    grad_bounds: dict[str, float]
    norm_bound: float
    param_bounds: dict[str, float]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def gradients(model: ContractModel, batch: Batch, loss_factor: float) -> Tensors:
    """Gradient of the loss times `loss_factor`; zero for parameters that take no part."""
    model.zero_grad(set_to_none=True)
    (model(*batch) * loss_factor).backward()
    named = ((name, param, param.grad) for name, param in trainable(model).items())
    return {n: torch.zeros_like(p) if grad is None else grad.clone() for n, p, grad in named}


def global_norm(grads: Tensors) -> float:
    """Norm over all elements of all tensors, in double precision."""
    return math.sqrt(sum(grad.double().square().sum().item() for grad in grads.values()))


def clip_factor(norm: float, clip: bool) -> float:
    """torch.nn.utils.clip_grad_norm_'s."""
    return min(1.0, CLIP / (norm + CLIP_EPSILON)) if clip else 1.0


def mean_of_norms(model: ContractModel, batches: list[Batch]) -> dict[str, float]:
    """M of `[Note: bound]`: mean norm of the micro-batches' gradients, per parameter."""
    sizes = dict.fromkeys(trainable(model), 0.0)
    for batch in batches:
        for name, grad in gradients(model, batch, 1.0 / len(batches)).items():
            sizes[name] += grad.norm().item()
    return sizes


@functools.cache
def fp32_run(steps: int, accumulation: int, clip: bool, world: int) -> list[Expected]:
    """One process that trains on the global batch with torch alone."""
    model = make_model()
    optimizer = torch.optim.SGD(parameter_groups(model), lr=LEARNING_RATE)
    run = []
    for step in range(steps):
        batches = global_batch(step, world, accumulation)
        magnitude = mean_of_norms(model, batches)
        grads = gradients(model, concatenated(batches), 1.0)
        for name, param in trainable(model).items():
            param.grad = grads[name].clone()
        norm = global_norm(grads)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        params = {name: param.detach().clone() for name, param in trainable(model).items()}
        grad_bounds = {name: FP32_TOLERANCE * size for name, size in magnitude.items()}
        bounds = {name: FP32_TOLERANCE * param.norm().item() for name, param in params.items()}
        run.append(Expected(grads, norm, params, grad_bounds, FP32_TOLERANCE * norm, bounds))
    return run


@functools.cache
def half_template(precision: str) -> ContractModel:
    """A model of that dtype whose weights the caller overwrites; frozen ones are initial."""
    return make_model().to(DTYPES[precision])


_half_gradients: dict[tuple[object, ...], tuple[Tensors, dict[str, float]]] = {}


def half_gradients(
    masters: Tensors, precision: str, step: int, accumulation: int, world: int
) -> tuple[Tensors, dict[str, float]]:
    """Mean of all micro-batches' gradients, summed in double precision, and M of `[Note: bound]`.

    Configurations that ought to be equal bit for bit ask the same; it is answered once.
    """
    fingerprint = hash(b"".join(master.numpy().tobytes() for master in masters.values()))
    key = (fingerprint, precision, step, accumulation, world)
    if key not in _half_gradients:
        model = half_template(precision)
        scale = LOSS_SCALE if precision == "fp16" else 1.0
        with torch.no_grad():
            for name, param in trainable(model).items():
                param.copy_(masters[name])
        total = {name: torch.zeros_like(value).double() for name, value in masters.items()}
        magnitude = dict.fromkeys(masters, 0.0)
        for batch in global_batch(step, world, accumulation):
            for name, grad in gradients(model, batch, scale / accumulation).items():
                exact = grad.double() / (scale * world)
                total[name] += exact
                magnitude[name] += exact.norm().item()
        _half_gradients[key] = (total, magnitude)
    return _half_gradients[key]


def half_step(
    masters: Tensors,
    weight_decay: dict[str, float],
    precision: str,
    sums_in: torch.dtype,
    step: int,
    accumulation: int,
    clip: bool,
    world: int,
) -> Expected:
    """What a half-precision SGD step from `masters` gives; `sums_in`: its narrowest dtype."""
    sums = half_gradients(masters, precision, step, accumulation, world)
    roundings = accumulation + world + 1
    return rounded_step(masters, weight_decay, *sums, precision, sums_in, roundings, clip)


def rounded_step(
    masters: Tensors,
    weight_decay: dict[str, float],
    grads: Tensors,
    magnitude: dict[str, float],
    precision: str,
    sums_in: torch.dtype,
    roundings: int,
    clip: bool,
) -> Expected:
    """One SGD step, its sums rounded `roundings` times; `magnitude` is M of `[Note: bound]`."""
    relative = max(roundings * ROUNDOFF[sums_in], FP32_TOLERANCE)
    tiny = roundings * FP16_SMALLEST / LOSS_SCALE if precision == "fp16" else 0.0
    smallest = {name: tiny * math.sqrt(grad.numel()) for name, grad in grads.items()}
    grad_bounds = {name: relative * magnitude[name] + smallest[name] for name in grads}
    norm = global_norm(grads)
    norm_bound = math.sqrt(sum(bound**2 for bound in grad_bounds.values())) + FP32_TOLERANCE * norm
    factor = clip_factor(norm, clip)
    factor_error = norm_bound / norm if clip else 0.0
    params, param_bounds = {}, {}
    for name, master in masters.items():
        update = factor * grads[name] + weight_decay[name] * master.double()
        params[name] = (master.double() - LEARNING_RATE * update).float()
        error = factor * (grad_bounds[name] + factor_error * grads[name].norm().item())
        param_bounds[name] = LEARNING_RATE * error + FP32_TOLERANCE * master.norm().item()
    return Expected(grads, norm, params, grad_bounds, norm_bound, param_bounds)
