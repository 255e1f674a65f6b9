"""The single-process reference: plain torch on this process's own copy of the model, no process
group, no engine.

`[Note: bound]` The gradient of a step from given weights is the mean of A * N micro-batch gradients
g[i] (A per rank, N ranks). Let M = mean_i |g[i]|, the size of what is averaged, per parameter in
the 2-norm, and u half a unit in the last place of the narrowest dtype that sums pass through.

1. *Summing.* The system makes at most A - 1 additions over micro-batches, N - 1 over ranks, two
   scalings, and one more rounding when sums over several optimizer instances are sent on; a vector
   kernel may round otherwise on other alignments. Each has a relative error of at most u of a
   partial sum, and no partial sum exceeds M:

       |system - mean g[i]| <= (A + N + 2) * u * M

   with fp16's smallest subnormal, loss scale removed, added per element. g[i] is rounded as the
   system rounds it; the mean is summed in double precision. This is the bound for half precision.
2. *Rounding of forward and backward.* Let d[i] be g[i] in double precision. In exact arithmetic
   their mean is the gradient of the whole batch, so by the triangle inequality

       |system - whole batch| <= (A + N + 2) * u * M + mean_i |g[i] - d[i]|

   The last term is measured here and taken twice, since other kernels (batch shapes, compilers)
   round otherwise. This is the bound for fp32, and for comparing different cuts of one batch in any
   precision.
3. A gradient that is zero in exact arithmetic (a bias before a softmax) is rounding alone.
   `NEGLIGIBLE` of the whole gradient's norm is allowed to every parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from deepspeed.runtime.engine_parts.model_setup import cast_module
from deepspeed.verify.oracle.plan import Precision
from deepspeed.verify.oracle.workload import GlobalBatches, Shape, Workload

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
    # Allowed 2-norm of the difference per parameter, point 1 of the note.
    rounded_bounds: dict[str, float]
    # Gradient of the concatenated batch in double precision; None if there is none.
    whole: Tensors | None
    whole_bounds: dict[str, float]  # allowed difference to it, point 2 of the note
    # Mean of the micro-batches' gradients in double precision; None with `whole`.
    split: Tensors | None
    sizes: dict[str, float]  # M per parameter
    peak: float  # largest element that a sum of scaled gradients can reach on its way


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
    cuts = "normalizes over its micro-batch, so another cut of the batch is another model"
    return f"BatchNorm {norms[0]!r} {cuts}"


class Reference:
    """Gradients of given weights on given steps.

    The last gradient of the first `num_kept` steps is kept: several runs that begin a step at the
    same weights share it.
    """

    def __init__(
        self, workload: Workload, batches: GlobalBatches, precision: Precision, num_kept: int = 0
    ) -> None:
        self.workload = workload
        self.batches = batches
        self.precision = precision
        # Why there is no whole-batch gradient; empty if there is one.
        self.no_whole = uncuttable(workload, batches)
        self.no_double = ""  # why double precision could not be used; empty if it could
        self._num_kept = num_kept
        self._kept: dict[int, tuple[object, Tensors, Expected]] = {}

    def expected(
        self, masters: Tensors, step: int, shape: Shape, loss_scale: float, with_whole: bool
    ) -> Expected:
        """Return `computed`, or what it gave for the same arguments last."""
        key, kept = (shape, loss_scale), self._kept.get(step)
        if (
            kept is not None
            and kept[0] == key
            and (kept[2].whole is not None or not with_whole or self.no_whole)
            and all(torch.equal(value, kept[1][name]) for name, value in masters.items())
        ):
            return kept[2]
        found = self.computed(masters, step, shape, loss_scale, with_whole)
        if step < self._num_kept:
            self._kept[step] = (key, masters, found)
        return found

    def computed(
        self, masters: Tensors, step: int, shape: Shape, loss_scale: float, with_whole: bool
    ) -> Expected:
        """Compute the gradient that `step` must have at `masters`, averaged and unscaled."""
        pieces = self.batches.micro_batches(step, shape)
        dtype = self.precision.model
        model, factor = self._model(masters, dtype), loss_scale / shape.accumulation
        rounded, reach = _zeros(masters), _zeros(masters)
        sizes, each = dict.fromkeys(masters, 0.0), []
        for batch in pieces:
            grads = self._gradients(model, batch, factor, dtype)
            for name, grad in grads.items():
                exact = grad.double() / (loss_scale * shape.world)
                rounded[name] += exact
                sizes[name] += exact.norm().item()
                reach[name] += grad.double().abs()
            if with_whole:
                each.append(grads)
        floor = NEGLIGIBLE * math.sqrt(sum(size**2 for size in sizes.values()))
        operations = shape.accumulation + shape.world + 2
        unit = max(operations * ROUNDOFF[self.precision.sums], FP32_TOLERANCE)
        is_fp16 = torch.float16 in (dtype, self.precision.sums)
        tiny = operations * FP16_SMALLEST / loss_scale if is_fp16 else 0.0
        bounds = {
            n: unit * sizes[n] + floor + tiny * math.sqrt(master.numel())
            for n, master in masters.items()
        }
        # torch's maximum keeps NaN, Python's may not.
        peaks = [value.amax() for value in reach.values() if value.numel()]
        peak = torch.stack(peaks).amax().item()
        half = Expected(rounded, bounds, None, {}, None, sizes, peak)
        if not with_whole or self.no_whole:
            return half
        return self._with_whole(masters, step, pieces, each, half, loss_scale * shape.world)

    def _with_whole(
        self,
        masters: Tensors,
        step: int,
        pieces: list[object],
        each: list[Tensors],
        half: Expected,
        divisor: float,
    ) -> Expected:
        wide = self._wide_dtype(masters, step)
        whole = self._gradients(self._model(masters, wide), self.batches.whole(step), 1.0, wide)
        model = self._model(masters, wide)
        split, noise = _zeros(masters), dict.fromkeys(masters, 0.0)
        for batch, grads in zip(pieces, each, strict=True):
            exact = self._gradients(model, batch, 1.0 / len(pieces), wide)
            for name, grad in exact.items():
                split[name] += grad.double()
                noise[name] += (grads[name].double() / divisor - grad.double()).norm().item()
        if self.no_double:
            noise = {name: max(noise[name], UNMEASURED_NOISE * half.sizes[name]) for name in noise}
        whole_bounds = {name: half.rounded_bounds[name] + 2 * noise[name] for name in masters}
        exact = {name: grad.double() for name, grad in whole.items()}
        return replace(half, whole=exact, whole_bounds=whole_bounds, split=split)

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
