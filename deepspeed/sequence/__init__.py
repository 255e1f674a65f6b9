"""Ulysses sequence parallelism: ranks that share a sequence exchange positions for attention heads
and back (`layer`, `exchange`; `cross_entropy` has the loss). Rank r of P holds the r-th of P equal
pieces of every sequence; who shares one is the engine's `ParallelMap`'s.

[Note: one divisor] Every backward here adds up what all ranks' losses contribute, as autograd does
in one process. So what d data-parallel times P sequence-parallel ranks reduce is the sum of the
gradients of all d * P losses, and the engine's one divisor d * P makes it the gradient of their
mean. A rank's loss may be the mean over its own tokens (equal counts), or one that all ranks make
of gathered losses (counted P times, divided by P), or, of unequal counts, its sum divided by the
mean count per rank, n / P: the mean over ranks of P * (sum of the rank) / n is (sum of all) / n.
"""

from deepspeed.sequence.layer import DistributedAttention

__all__ = ["DistributedAttention"]
