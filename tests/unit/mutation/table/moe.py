"""Faults of experts."""

from __future__ import annotations

from unit.mutation.table.fault import Fault

FAULTS = (
    Fault(
        "a rank without tokens for its experts stays away from exchange and reduction",
        "deepspeed/moe/owner_exchange.py",
        (("outputs = rows + nothing.to(rows.dtype)", "outputs = rows"),),
        "tests/unit/v1/moe/test_auto_ep.py",
        "equals",
    ),
)
