"""Gradients that arrive after their bucket was sent: learned about once, or sent in every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed import comm as dist
from deepspeed.comm.watch import lone_waits
from deepspeed.runtime.gradients.readiness import BucketIndex, LateGradientError, ReadinessTracker


def buckets_to_send_again(
    readiness: ReadinessTracker, names: Sequence[str], device: torch.device, group: dist.Group
) -> list[BucketIndex]:
    """At the end of a backward whose buckets are all sent; every rank of `group` gets the same.

    Whether a bucket is sent again must be the same on all ranks, so ranks agree first. A model
    whose parameters fire once needs no agreement, and pays none after its first backward.

    Args:
        readiness: What has fired in this backward.
        names: Of each slot's parameter.
        device: Where ranks agree.
        group: The ranks that send the same buckets.

    Raises:
        LateGradientError: A parameter has fired more often than in the first backward.
    """
    if readiness.learned and not readiness.fires_repeatedly:
        if readiness.late:
            late_names = ", ".join(names[slot] for slot in sorted(readiness.late))
            raise LateGradientError(
                f"{late_names}: another gradient arrived after the bucket had been reduced, which "
                "did not happen in the first backward. For models whose graph varies so, use stage "
                "0 or 1 with zero_optimization.overlap_comm false, or run the first backward with "
                "the fullest graph"
            )
        return []
    late = [int(slot in readiness.late) for slot in range(len(names))]
    agreed = torch.tensor([readiness.fired, late], dtype=torch.int32, device=device)
    with lone_waits.watch.waiting(lambda: "which gradients arrive late"):
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    fired, late = agreed.tolist()
    readiness.learn(fired, late)
    return sorted({readiness.bucket_of[slot] for slot, is_late in enumerate(late) if is_late})
