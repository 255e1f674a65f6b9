"""Faults of the tools that check training."""

from __future__ import annotations

from unit.mutation.table.fault import Fault

FAULTS = (
    Fault(
        "a device whose blocked queues block no other stream",
        "deepspeed/verify/budgets.py",
        (("for _ in range(budget.queues)]", "for _ in range(99)]"),),
        "tests/unit/verify/test_budgets.py",
        "blocks_its_queue",
    ),
    Fault(
        "kernels that hold no processors while they wait for other ranks",
        "deepspeed/verify/budgets.py",
        (("            self.free -= self._budget.needs(entry)\n", ""),),
        "tests/unit/verify/test_budgets.py",
        "receives_ahead",
    ),
)
