"""The single-process reference: plain torch on this process's own copy of the model, no process
group, no engine. What may differ from it, and why, is derived in docs/ds_verify.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from deepspeed.runtime.engine_parts.model_setup import cast_module
from deepspeed.verify.oracle.batches import GlobalBatches, Shape
from deepspeed.verify.oracle.plan import Precision
from deepspeed.verify.oracle.workload import Workload

ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FP16_SMALLEST = 2.0**-24
FP32_TOLERANCE = 1e-6
NEGLIGIBLE = 1e-8
# When the model cannot run in double precision: what fp32 forward and backward may cost.
UNMEASURED_NOISE = 1e-5

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Expected:
    """The gradient that a step must have."""

    # Mean of the micro-batches' gradients as the model's dtype rounds them, in double precision.
    rounded: Tensors
    # Allowed 2-norm of the difference per parameter, of summing alone.
    rounded_bounds: dict[str, float]
    # Gradient of the concatenated batch in double precision; None if there is none.
    whole: Tensors | None
    # Allowed difference to it and to `split`, with forward's and backward's rounding.
    exact_bounds: dict[str, float]
    # Mean of the micro-batches' gradients in double precision; None if it was not asked for.
    split: Tensors | None
    sizes: dict[str, float]  # M per parameter
    peak: float  # largest element that a sum of scaled gradients can reach on its way

    def wanted(self, exact: bool) -> tuple[Tensors, dict[str, float]]:
        """The gradient, for `exact` in double precision where that was made, and its allowance."""
        found = self.whole or self.split
        if exact and found is not None:
            return found, self.exact_bounds
        return self.rounded, self.rounded_bounds


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return trainable parameters by name; a tied one counts once."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def global_norm(grads: Iterable[torch.Tensor]) -> float:
    """Return the norm over all elements of all tensors, in double precision."""
    return math.sqrt(sum(grad.double().square().sum().item() for grad in grads))


def uncuttable(workload: Workload, batches: GlobalBatches) -> str:
    """Say why the global batch cannot be cut in another way and be the same; empty if it can."""
    norms = workload.batch_norms()
    if batches.whole_reason is not None or not norms:
        return batches.whole_reason or ""
    what = "its output depends on the whole micro-batch, so another cut is another model"
    return f"{type(workload.module.get_submodule(norms[0])).__name__} {norms[0]!r}: {what}"


class Reference:
    """Gradients of given weights on given steps. The last ones of the first `num_kept` steps are
    kept: several runs that begin a step at the same weights share them.
    """

    def __init__(
        self,
        workload: Workload,
        batches: GlobalBatches,
        precision: Precision,
        summed: bool = False,
        num_kept: int = 0,
    ) -> None:
        self.workload = workload
        self.batches = batches
        self.precision = precision
        self._summed = summed  # gradients are added up over ranks, not averaged
        # Why there is no whole-batch gradient; empty if there is one.
        self.no_whole = uncuttable(workload, batches)
        self.no_double = ""  # why double precision could not be used; empty if it could
        self._num_kept = num_kept
        self._kept: dict[int, tuple[object, Tensors, Expected]] = {}

    def expected(
        self, masters: Tensors, step: int, shape: Shape, loss_scale: float, with_exact: bool
    ) -> Expected:
        """Return `computed`, or what it gave for the same arguments last."""
        key, kept = (shape, loss_scale), self._kept.get(step)
        if (
            kept is not None
            and kept[0] == key
            and (kept[2].split is not None or not with_exact)
            and all(torch.equal(value, kept[1][name]) for name, value in masters.items())
        ):
            return kept[2]
        found = self.computed(masters, step, shape, loss_scale, with_exact)
        if step < self._num_kept:
            self._kept[step] = (key, masters, found)
        return found

    def computed(
        self, masters: Tensors, step: int, shape: Shape, loss_scale: float, with_exact: bool
    ) -> Expected:
        """Compute the gradient that `step` must have at `masters`, reduced and unscaled."""
        factor_of_ranks = shape.world if self._summed else 1
        divisor = loss_scale * shape.world / factor_of_ranks
        pieces = self.batches.micro_batches(step, shape)
        dtype = self.precision.model
        model, factor = self._model(masters, dtype), loss_scale / shape.accumulation
        rounded, reach = _zeros(masters), _zeros(masters)
        sizes, each = dict.fromkeys(masters, 0.0), []
        for batch in pieces:
            grads = self._gradients(model, batch, factor, dtype)
            for name, grad in grads.items():
                exact = grad.double() / divisor
                rounded[name] += exact
                sizes[name] += exact.norm().item()
                reach[name] += grad.double().abs()
            if with_exact:
                each.append(grads)
        floor = NEGLIGIBLE * math.sqrt(sum(size**2 for size in sizes.values()))
        operations = shape.accumulation + shape.world + 2
        unit = max(operations * ROUNDOFF[self.precision.sums], FP32_TOLERANCE)
        is_fp16 = torch.float16 in (dtype, self.precision.sums)
        tiny = operations * FP16_SMALLEST * shape.world / divisor if is_fp16 else 0.0
        bounds = {
            n: unit * sizes[n] + floor + tiny * math.sqrt(master.numel())
            for n, master in masters.items()
        }
        # torch's maximum keeps NaN, Python's may not.
        peaks = [value.amax() for value in reach.values() if value.numel()]
        peak = torch.stack(peaks).amax().item()
        half = Expected(rounded, bounds, None, {}, None, sizes, peak)
        if not with_exact:
            return half
        wide = self._wide_dtype(masters, step)
        model = self._model(masters, wide)
        split, noise = _zeros(masters), dict.fromkeys(masters, 0.0)
        for batch, grads in zip(pieces, each, strict=True):
            wider = self._gradients(model, batch, factor_of_ranks / len(pieces), wide)
            for name, grad in wider.items():
                split[name] += grad.double()
                noise[name] += (grads[name].double() / divisor - grad.double()).norm().item()
        if self.no_double:
            noise = {name: max(noise[name], UNMEASURED_NOISE * sizes[name]) for name in noise}
        exact_bounds = {name: bounds[name] + 2 * noise[name] for name in masters}
        whole = None
        if not self.no_whole:
            batch = self.batches.whole(step)
            found = self._gradients(self._model(masters, wide), batch, factor_of_ranks, wide)
            whole = {name: grad.double() for name, grad in found.items()}
        return replace(half, whole=whole, exact_bounds=exact_bounds, split=split)

    def _wide_dtype(self, masters: Tensors, step: int) -> torch.dtype:
        """Choose double precision, unless the model has parts that insist on fp32."""
        if self.no_double:
            return torch.float32
        wide = torch.float64
        try:
            batch = self.batches.micro_batches(step)[0]
            self._gradients(self._model(masters, wide), batch, 1.0, wide)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            self.no_double = (
                f"the model does not run in double precision ({str(error).splitlines()[0]}); fp32 "
                "is the reference"
            )
            return torch.float32
        return wide

    @torch.no_grad()
    def _model(self, masters: Tensors, dtype: torch.dtype) -> nn.Module:
        model = self.workload.copy_module(self.precision.model, self.precision.buffers)
        cast_module(model, dtype)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(torch.promote_types(buffer.dtype, dtype))
        params = trainable(model)
        for name, master in masters.items():
            # Rounded to the model's dtype first: the whole-batch gradient is that of the weights
            # which the model has.
            params[name].copy_(master.to(self.precision.model))
        return model

    def _gradients(
        self, model: nn.Module, batch: object, factor: float, dtype: torch.dtype
    ) -> Tensors:
        """Compute the gradient of the loss times `factor`; zero where a parameter takes no part."""
        model.zero_grad(set_to_none=True)
        rounds = self.precision.autocast is not None and dtype == self.precision.model
        with torch.autocast("cpu", dtype=self.precision.autocast, enabled=rounds):
            loss = self.workload.loss_of(model, batch, dtype)
        wide = loss if loss.dtype == torch.float64 else loss.float()
        (wide * factor).backward()
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in trainable(model).items()
        }


def _zeros(masters: Tensors) -> Tensors:
    return {name: torch.zeros_like(master, dtype=torch.float64) for name, master in masters.items()}
