"""Faults to put into the package, each with the test that has to notice.

`UNDO_FIXES` takes the fixes of docs/fixes/ out again; `FAULTS` breaks single statements. What is
changed must be found exactly once: a fault that no longer fits is an error. `python -m
unit.mutation.table fix1` in `tests/` prints the fault as a patch; it needs no torch.
"""

from unit.mutation.table import checkpoints, parallel, runtime, zero
from unit.mutation.table.fault import REPOSITORY, Fault
from unit.mutation.table.fixes import UNDO_FIXES

__all__ = ["FAULTS", "REPOSITORY", "UNDO_FIXES", "Fault"]

FAULTS = (*checkpoints.FAULTS, *parallel.FAULTS, *runtime.FAULTS, *zero.FAULTS)
