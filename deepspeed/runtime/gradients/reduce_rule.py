"""The reduce rule: the only code that decides by what a gradient is scaled for its reduction.

Derivation. The gradient that the optimizer must see is that of one process with the whole batch B:

    g = (1/|B|) sum_{s in B} grad l_s = 1/(N*A) sum_{r<N} sum_{a<A} g[r,a]            (1)

with N data-parallel ranks, A micro-batches per step, and g[r,a] the mean gradient of one
micro-batch. Therefore

1. *Accumulation*, 1/A. `engine.backward` divides the loss, so that half-precision sums stay in
   range. A plain `loss.backward()` has no such place; its sum is divided when it is reduced.
   `accumulation_divisor` is A in that case and 1 in the first.
2. *World*, 1/N, split around the collective as pre * post:
   a. `prescale_gradients`: pre = 1/N, post = 1. Smallest partial sums; loses low bits of small
      half-precision gradients.
   b. else, with `gradient_predivide_factor` f: pre = 1/f, post = f/N.
   c. neither is given, and fp16 travels: b. with f = 2^k, the largest with 4^k <= 2N, which lies
      within a factor sqrt(2) of sqrt(N). fp16 ends at 65504, and its steps are no smaller than
      2^-24. Summed first (d.), N gradients of size g overflow at g = 65504/N, log2(N) binades
      before their mean does. Divided first (a.), each loses its lowest log2(N) binades. With f,
      about half of them go on each side: sums overflow at g = 65504 f/N >= 46318/sqrt(N), and what
      is lost of a gradient is below 2^-24 f <= 2^-24 sqrt(2N). f is a power of two: pre moves
      exponents only, and post rounds as 1/N would, so wherever nothing overflows or is lost the
      result is that of d. bit for bit; for N = 1, f = 1.
   d. else (bf16, fp32, with as many exponents as there are sums): f = 1, sums first and divides
      once.
3. `gradient_allreduce_op` "sum" asks for N times (1); post carries that factor. It is a factor and
   not a skipped division, so that a buffer that is averaged twice (a second backward at the
   boundary) is still right: mean(mean(x) + y) = mean(x) + mean(y).
4. *Several ranks per sequence* (sequence parallelism): N counts them too. Each has the mean over
   its own part of the tokens, so with equal parts the mean of a sample is the mean of its ranks',
   and (1) holds over data times sequence parallel ranks.
5. *Experts*: the gradient of an expert on rank r is already a sum: all-to-all's backward brings the
   tokens of all E ranks of its expert group, unscaled, each with the gradient of its own rank's
   mean loss. With e(r) these E ranks and D = N/E ranks that hold the same expert, one of each
   expert group,

       1/N sum_{r<N} g[r] = 1/N sum_{d<D} ( sum_{r in e(d)} g[r] ),

   so the reduction runs over the D ranks and still divides by N: the same rule with another group.
   (Experts that are spread over T tensor-parallel ranks too: E*D = N*T, the T ranks each send a
   part of the same tokens, and N is still the number of means.)
6. *Loss scale*: not here. The step unscales with the scale that the scaler says was used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


def balanced_factor(world: int) -> int:
    """The f of 2c: the largest power of two whose square is at most twice `world`."""
    factor = 1
    while (2 * factor) ** 2 <= 2 * world:
        factor *= 2
    return factor


class ReduceFactors(NamedTuple):
    """What a bucket is multiplied by before and after its collective."""

    pre: float
    post: float


@dataclass(frozen=True)
class ReduceRule:
    """Scaling of one reduction group; see the module's derivation.

    Args:
        world: N: the number of ranks whose means are averaged, directly or through an expert's
            all-to-all.
        prescale: Divide before the collective.
        predivide_factor: Part of the division that is done before the collective when `prescale` is
            off; None chooses it by what travels.
        sum_op: `gradient_allreduce_op` is "sum".
        divides: Off, neither is done here: who sums (`canonical`) divides once.
    """

    world: int
    prescale: bool = False
    predivide_factor: float | None = None
    sum_op: bool = False
    divides: bool = True

    def factors(
        self, accumulation_divisor: float = 1.0, travels_in: torch.dtype | None = None
    ) -> ReduceFactors:
        """Return the factors for a bucket of the dtype `travels_in` whose sum over micro-batches
        still has to be divided by `accumulation_divisor`.
        """
        if not self.divides:
            return ReduceFactors(1.0, 1.0)
        pre, post = (1.0 / self.world, 1.0) if self.prescale else self._split(travels_in)
        return ReduceFactors(pre, post / accumulation_divisor)

    def _split(self, travels_in: torch.dtype | None) -> tuple[float, float]:
        factor = self.predivide_factor
        if factor is None:
            factor = balanced_factor(self.world) if travels_in == torch.float16 else 1.0
        return 1.0 / factor, factor / self.world

    @property
    def step_factor(self) -> float:
        """The factor of the averaged gradient before it is used: `world` for the sum operation."""
        return float(self.world) if self.sum_op else 1.0
