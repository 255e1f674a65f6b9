"""Faults of the files beside the rooms of `deepspeed/runtime`."""

from __future__ import annotations

from unit.mutation.table.fault import Fault
from unit.mutation.table.fixes import ABSORB, ABSORB_ELSEWHERE
from unit.mutation.table.places import BF16, ENGINE, FIX2, FIX4, STREAMS

FAULTS = (
    Fault(
        "a bf16 hook works on another stream",
        BF16,
        ((ABSORB, ABSORB_ELSEWHERE),),
        FIX2,
        "TestBF16Optimizer",
    ),
    Fault(
        "the last micro-batch never joins", BF16, (("        self.update_hp_grads()\n", ""),), FIX4
    ),
    Fault(
        "the accumulator that is reduced is a copy",
        BF16,
        (
            (
                "            self.get_grads_for_reduction(),\n",
                "            [flat.clone() for flat in self.get_grads_for_reduction()],\n",
            ),
        ),
        FIX4,
    ),
    Fault(
        "the host reads a norm that is still on its way",
        STREAMS,
        (("        self._copied.synchronize()\n", ""),),
        "tests/unit/runtime/optimizers/test_step_outcome.py",
        "late",
    ),
    Fault(
        "buffers are rounded with the parameters",
        "deepspeed/runtime/model_setup.py",
        (
            (
                "        wanted = buffers if id(tensor) in kept else dtype\n",
                "        wanted = dtype\n",
            ),
        ),
        "tests/unit/v1/zero/test_buffer_dtypes.py",
        "kept",
    ),
    Fault(
        "forwards stay compiled when an engine of stage 3 has ended",
        ENGINE,
        (("            compiled.remove()\n", "            pass\n"),),
        "tests/unit/v1/zero/stage3/test_modes.py",
        "same_gradients",
    ),
    Fault(
        "a model of stage 3 is compiled with the gathers of its blocks",
        "deepspeed/runtime/compiler.py",
        (("in parts_between_hooks(roots, has_hooks)", "in [model]"),),
        "tests/unit/v1/zero/stage3/test_modes.py",
        "same_gradients",
    ),
)
