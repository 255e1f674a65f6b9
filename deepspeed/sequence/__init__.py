"""Ulysses sequence parallelism: ranks that share a sequence exchange positions for attention heads
and back.

`layer` has the attention wrapper and its all-to-all, `cross_entropy` the loss over a split
sequence. Who shares one is the engine's `ParallelMap`'s. Rank r of P in a sequence group holds the
r-th of P equal pieces of every sequence.

[Note: one divisor] Every backward here is the adjoint of its forward: it adds up what all ranks'
losses contribute, as autograd does in one process. So what d data-parallel times P
sequence-parallel ranks reduce is the sum of the gradients of all d * P losses, and the engine's one
divisor d * P makes it the gradient of their mean, however a loss is made:

1. A rank's loss is the mean over its own tokens: the mean over ranks is the mean over all tokens
   (equal counts).
2. All P ranks make the same loss of gathered per-token losses: it is counted P times, and P times
   it divided by P is itself.
3. Unequal counts: divide a rank's summed loss by the mean count per rank, n / P with n tokens in
   the group; the mean over ranks of P * (sum of the rank) / n is (sum of all) / n.
"""

from deepspeed.sequence.layer import DistributedAttention

__all__ = ["DistributedAttention"]
