"""`deepspeed.verify.ledger()`: the gradient ledger for a block of code, on one engine or on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deepspeed.runtime.engine_parts import verification
from deepspeed.runtime.engine_parts.engine_state import WatchedEngine

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.gradients.ledger.findings import LedgerFinding
    from deepspeed.runtime.gradients.ledger.gradient_ledger import GradientLedger


class LedgerBook:
    """The ledgers of one `ledger()` block."""

    def __init__(self) -> None:
        # One per engine, in the order in which they were attached.
        self.ledgers: list[GradientLedger] = []

    @property
    def findings(self) -> list[LedgerFinding]:
        """What was wrong, over all engines."""
        return [finding for ledger in self.ledgers for finding in ledger.findings]

    @property
    def steps(self) -> int:
        """Steps checked, over all engines."""
        return sum(ledger.steps for ledger in self.ledgers)

    @property
    def zero_gradients(self) -> tuple[str, ...]:
        """Parameters whose gradient was zero on all ranks at the last step of their engine."""
        return tuple(name for ledger in self.ledgers for name in ledger.zero_gradients)

    def report(self) -> str:
        """Tell what was seen, in words."""
        return "\n".join(ledger.report() for ledger in self.ledgers) or "gradient ledger: no engine"


@contextmanager
def ledger(engine: DeepSpeedEngine | None = None, raises: bool = True) -> Iterator[LedgerBook]:
    """Check within the block that every gradient contribution reaches the optimizer exactly once.
    All ranks enter it alike.

    Args:
        engine: Whose gradients; None: of all engines there are, and of those made within the block.
        raises: Raise `GradientLedgerError` at the step (on all ranks) when a gradient is not right;
            otherwise read the findings.

    """
    book = LedgerBook()
    attached = []

    def attach(one: WatchedEngine) -> None:
        if one._sequence is None:
            return
        before = one._sequence.observer
        opened = verification.attach_ledger(one, raises)
        if opened is not None:
            book.ledgers.append(opened)
        if opened is not before:
            attached.append(one)

    for one in list(verification.engines) if engine is None else [engine]:
        attach(one)
    if engine is None:
        verification.watchers.append(attach)
    try:
        yield book
    finally:
        if engine is None:
            verification.watchers.remove(attach)
        for one in attached:
            verification.detach_ledger(one)
