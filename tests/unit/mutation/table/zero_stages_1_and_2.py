"""Faults of ZeRO stages 1 and 2."""

from __future__ import annotations

from unit.mutation.table.fault import Fault
from unit.mutation.table.fixes import RECORD_AND_COMMENT
from unit.mutation.table.places import FIX1, FIX3, LAYOUT, ZERO

FAULTS = (
    Fault("no stream is recorded", ZERO, ((RECORD_AND_COMMENT, ""),), FIX1, "TestProducerStreams"),
    Fault(
        "no fallback to the current stream",
        ZERO,
        (
            (
                "wait_for(bucket.copy_streams or {self.side_stream.current_stream()})",
                "wait_for(bucket.copy_streams)",
            ),
        ),
        FIX1,
        "TestFallback",
    ),
    Fault(
        "clear keeps the streams",
        ZERO,
        (("        self.copy_streams.clear()\n", ""),),
        FIX1,
        "clear",
    ),
    Fault(
        "the offloaded norm is reduced per group",
        ZERO,
        (
            (
                'self._squared_norm(group_index, torch.device("cpu")).to(self.device)',
                'self._reduced(self._squared_norm(group_index, torch.device("cpu"))'
                ".to(self.device))\n\n"
                "    def _reduced(self, squared: torch.Tensor) -> torch.Tensor:\n"
                "        dist.all_reduce(squared, group=self.norm_group)\n"
                "        return squared",
            ),
        ),
        FIX3,
        "TestOneCollective",
    ),
    Fault(
        "squares are summed in bf16",
        ZERO,
        (
            (
                "torch.zeros(self.num_norm_groups, dtype=torch.float32,",
                "torch.zeros(self.num_norm_groups, dtype=torch.bfloat16,",
            ),
        ),
        FIX3,
        "TestPrecision",
    ),
    Fault(
        "the norm stays local",
        ZERO,
        (
            (
                "reduce_squared_norm(squares, self.norm_group)",
                "squares",
            ),
        ),
        FIX3,
        "TestOneCollective",
    ),
    Fault(
        "a bucket's padding is what was there before",
        ZERO,
        (
            (
                "                buffer.tensor[plan.used : plan.numel].zero_()\n",
                "                pass\n",
            ),
        ),
        LAYOUT,
        "padding and True",
    ),
)
