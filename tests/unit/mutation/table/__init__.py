"""Faults to put into the package, each with the test that has to notice.

`UNDO_FIXES` takes the fixes of docs/fixes/ out again; `FAULTS` breaks single lines of them and of
other guards, one module for each package that is broken. Texts are exact and must occur once, so
that a fault that no longer fits the code is an error and not a test of nothing.

    python -m unit.mutation.table fix1

in `tests/` prints the fault as a patch; it needs no torch.
"""

from __future__ import annotations

from unit.mutation.table import (
    checkpoints,
    gradients,
    moe,
    optimizers,
    pipe,
    runtime,
    sharding,
    tensor_parallel,
    verify,
    zero_instances,
    zero_stage_3,
    zero_stages_1_and_2,
)
from unit.mutation.table.fault import REPOSITORY, Fault
from unit.mutation.table.fixes import UNDO_FIXES

__all__ = ["FAULTS", "REPOSITORY", "UNDO_FIXES", "Fault"]

FAULTS: tuple[Fault, ...] = (
    *checkpoints.FAULTS,
    *gradients.FAULTS,
    *moe.FAULTS,
    *optimizers.FAULTS,
    *pipe.FAULTS,
    *runtime.FAULTS,
    *sharding.FAULTS,
    *tensor_parallel.FAULTS,
    *verify.FAULTS,
    *zero_instances.FAULTS,
    *zero_stage_3.FAULTS,
    *zero_stages_1_and_2.FAULTS,
)
