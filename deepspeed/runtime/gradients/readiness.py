"""When a bucket may be launched: pure counting, no torch.

A gradient is ready when its accumulation hook has fired as often as it will in this backward: once
for an ordinary parameter, more often when reentrant activation checkpointing or shared layers run
several autograd tasks. How often is learned in the first backward and agreed between ranks, because
a rank that launches on another count would issue other collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

BucketIndex = int
SlotIndex = int


class LateGradientError(RuntimeError):
    """A gradient arrived after its bucket had been sent."""


class ReadinessTracker:
    """Counts hook firings per parameter ("slot") and releases buckets strictly in plan order.

    Args:
        bucket_of: For each slot, the bucket that carries it.
        num_buckets: How many buckets there are; bucket `i` is released only after bucket `i - 1`.
    """

    def __init__(self, bucket_of: Sequence[BucketIndex], num_buckets: int) -> None:
        self.bucket_of = list(bucket_of)
        self.expected = [1] * len(self.bucket_of)
        self.learned = False
        # Not complete when their hook fires: their bucket waits for `remaining`.
        self.held: frozenset[SlotIndex] = frozenset()
        self._sizes = [0] * num_buckets
        for bucket in self.bucket_of:
            self._sizes[bucket] += 1
        self.reset()

    def reset(self) -> None:
        """Start a new backward."""
        self.fired = [0] * len(self.bucket_of)
        self._missing = list(self._sizes)
        self._next: BucketIndex = 0
        self.late: set[SlotIndex] = set()

    @property
    def fires_repeatedly(self) -> bool:
        """Whether some parameter's hook is expected more than once per backward."""
        return any(count > 1 for count in self.expected)

    def mark(self, slot: SlotIndex) -> range:
        """A hook fired; returns the buckets to launch now, in order.

        A slot that fires after its bucket was launched is remembered in `late`; its gradient lies
        in a fresh buffer and is sent at the end of backward.
        """
        self.fired[slot] += 1
        bucket = self.bucket_of[slot]
        if bucket < self._next:
            self.late.add(slot)
            return range(0)
        if slot in self.held or self.fired[slot] != self.expected[slot]:
            return range(0)
        self._missing[bucket] -= 1
        first = self._next
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._next += 1
        return range(first, self._next)

    def remaining(self) -> range:
        """The buckets not launched yet, in order; afterwards all are."""
        first, self._next = self._next, len(self._missing)
        return range(first, self._next)

    def learn(self, fired: Sequence[int]) -> None:
        """Expect these counts from now on (at least one each: an unused parameter may be used
        later).
        """
        self.expected = [
            max(1, count, known) for count, known in zip(fired, self.expected, strict=True)
        ]
        self.learned = True
