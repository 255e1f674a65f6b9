"""When a bucket may be launched: pure counting, no torch.

A gradient is ready when its hook has fired as often as it will in this backward: more than once
when reentrant activation checkpointing or shared layers run several autograd tasks. How often is
learned in the first backward and agreed between ranks, because a rank that launches on another
count would issue other collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

BucketIndex = int
SlotIndex = int


class LateGradientError(RuntimeError):
    """A gradient arrived after its bucket had been sent."""


class ReadinessTracker:
    """Counts hook firings per parameter ("slot") and releases buckets strictly in plan order."""

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
        self.fired = [0] * len(self.bucket_of)
        self._missing = list(self._sizes)
        self._next: BucketIndex = 0
        self.late: set[SlotIndex] = set()

    @property
    def fires_repeatedly(self) -> bool:
        """Whether some parameter's hook is expected more than once per backward."""
        return any(count > 1 for count in self.expected)

    @property
    def may_be_late(self) -> bool:
        """Whether a gradient may arrive after its bucket was launched, in a backward that is no
        fault.
        """
        return not self.learned or self.fires_repeatedly

    def mark(self, slot: SlotIndex) -> range:
        """Count a hook that fired; returns the buckets to launch now, in order.

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

    def remaining(self) -> Sequence[BucketIndex]:
        """The buckets not launched yet, in order; afterwards all are."""
        first, self._next = self._next, len(self._missing)
        return range(first, self._next)

    def learn(self, fired: Sequence[int], late: Sequence[int] = ()) -> None:
        """Expect these counts from now on (at least one each: an unused parameter may be used
        later); `late`: 1 for each slot that fired after its bucket had been sent.
        """
        self.expected = [
            max(1, count, known) for count, known in zip(fired, self.expected, strict=True)
        ]
        self.learned = True


class UnitReadiness(ReadinessTracker):
    """The tracker where units of parameters are gathered during backward too (stage 3).

    Reductions and gathers then come in one order, which must not depend on what has a gradient: a
    bucket leaves when backward is done with its unit (`zero.gathering.backward_order`), whatever
    has fired. Without any gathers (`has_units`), buckets leave as elsewhere.
    """

    def __init__(self, bucket_of: Sequence[BucketIndex], num_buckets: int) -> None:
        self._wait_for_all: set[BucketIndex] = set()  # gradients come from elsewhere too
        self.has_units = True
        super().__init__(bucket_of, num_buckets)

    def reset(self) -> None:
        super().reset()
        self._sent: set[BucketIndex] = set()

    @property
    def fires_repeatedly(self) -> bool:
        return not self.has_units and super().fires_repeatedly

    @property
    def may_be_late(self) -> bool:
        return not self.has_units and super().may_be_late

    def mark(self, slot: SlotIndex) -> range:
        """Count a hook, which launches nothing."""
        if not self.has_units:
            return super().mark(slot)
        self.fired[slot] += 1
        if self.bucket_of[slot] in self._sent:
            self.late.add(slot)
        return range(0)

    def release(self, bucket: BucketIndex) -> bool:
        """Backward is done with the unit of `bucket`; returns whether to launch it now."""
        held = bucket in self._wait_for_all or any(self.bucket_of[at] == bucket for at in self.held)
        if held or bucket in self._sent:
            return False
        self._sent.add(bucket)
        return True

    def remaining(self) -> Sequence[BucketIndex]:
        if not self.has_units:
            return super().remaining()
        left = [bucket for bucket in range(len(self._sizes)) if bucket not in self._sent]
        self._sent.update(left)
        return left

    def learn(self, fired: Sequence[int], late: Sequence[int] = ()) -> None:
        """Have buckets with late gradients wait for the end of backward from now on."""
        super().learn(fired, late)
        self._wait_for_all.update(self.bucket_of[slot] for slot, was in enumerate(late) if was)
