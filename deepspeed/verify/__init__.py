"""Tools that check gradient synchronization instead of trusting it. Nothing here is imported by
training unless it is switched on.

`check_streams()`: races and lifetime errors on streams. `ledger()`: every gradient contribution
counted exactly once. `lowered_sizes()`: pieces of work so small that a small model has several.
`memory_peak()`: who holds the simulated device's memory when most of it is in use.
`check_budgets()`: what can hang for want of hardware queues and processors.

Behind them: `streams` (the checker), `ledgers`, `sizes`, `memory`, `budgets`. `oracle` is the
command `ds_verify`, which runs a user's model against one process, `diff` the command `ds_diff`,
which tells where two runs part.
"""

from deepspeed._lazy import lazy_attributes

_CHECK = "deepspeed.verify.streams"
_NAMES = {
    **dict.fromkeys(
        ("check_streams", "enable_stream_checking", "disable_stream_checking", "raise_findings"),
        _CHECK,
    ),
    "StreamChecker": "deepspeed.verify.streams.checker",
    "Finding": "deepspeed.verify.streams.findings",
    "StreamRaceError": "deepspeed.verify.streams.findings",
    "ledger": "deepspeed.verify.ledgers",
    "lowered_sizes": "deepspeed.verify.sizes",
    "memory_peak": "deepspeed.verify.memory",
    **dict.fromkeys(("Budget", "BudgetError", "check_budgets"), "deepspeed.verify.budgets"),
    "GradientLedgerError": "deepspeed.runtime.gradients.ledger.gradient_ledger",
}

__getattr__ = lazy_attributes(__name__, _NAMES, ("streams", "oracle"))
