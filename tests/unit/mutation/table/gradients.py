"""Faults between backward and the optimizer: buckets, sums, the rule of scaling."""

from __future__ import annotations

from unit.mutation.table.fault import Fault
from unit.mutation.table.places import LARGE_SUMS, READINESS, REDUCE_RULE, SINK

FAULTS = (
    Fault(
        "the first write adds to what was left",
        SINK,
        (("first = bucket not in self.written", "first = False"),),
        "tests/unit/runtime/gradients/test_sink.py",
    ),
    Fault(
        "fp16 is summed before it is divided",
        REDUCE_RULE,
        (("if travels_in == torch.float16 else 1.0", "if False else 1.0"),),
        LARGE_SUMS,
        "test_the_mean_is_used",
    ),
    Fault(
        "a given predivide factor is overruled",
        REDUCE_RULE,
        (("        if factor is None:\n", "        if True:\n"),),
        LARGE_SUMS,
        "test_the_users_factor_is_used",
    ),
    Fault(
        "buckets leave as they are ready",
        READINESS,
        (
            (
                "        return range(first, self._next)\n\n    def remaining",
                "        return range(bucket, bucket + (not self._missing[bucket]))\n\n"
                "    def remaining",
            ),
        ),
        "tests/unit/runtime/gradients/test_readiness.py",
    ),
    Fault(
        "a late gradient is forgotten",
        READINESS,
        (
            (
                "            self.late.add(slot)\n            return range(0)\n",
                "            return range(0)\n",
            ),
        ),
        "tests/unit/runtime/gradients/test_readiness.py",
    ),
)
