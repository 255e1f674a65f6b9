"""Faults of the step sequence, and of which optimizer steps what."""

from __future__ import annotations

from unit.mutation.table.fault import Fault
from unit.mutation.table.places import OUTCOME, SCALING, SEQUENCE, WAITS, WHOLE_PARAMETERS

FAULTS = (
    Fault(
        "unscaled with the next scale",
        SEQUENCE,
        (
            (
                "        return float(self._scaler.loss_scale)\n",
                "        after = type(self._scaler).__new__(type(self._scaler))\n"
                "        after.__dict__.update(self._scaler.__dict__)\n"
                "        after.update_scale(False)\n"
                "        return float(after.loss_scale)\n",
            ),
        ),
        SCALING,
        "growth",
    ),
    Fault(
        "steps with a gradient that is not finite",
        SEQUENCE,
        (
            (
                "        elif not self.overflow:\n",
                "        else:\n",
            ),
        ),
        SCALING,
        "test_overflow_on_one_rank_skips_on_both",
    ),
    Fault(
        "a mark that another optimizer does not read",
        "deepspeed/runtime/optimizers/muon_groups.py",
        (("    if is_elementwise:\n", "    if False:\n"),),
        "tests/unit/v1/optimizers/test_whole_parameters.py",
        "test_refused",
    ),
    Fault(
        "the host looks at the norm before the update",
        SEQUENCE,
        (
            (
                "            self._late_norms.rotate()\n",
                "            self._late_norms.rotate()\n            self.learn_outcome()\n",
            ),
        ),
        WAITS,
        "test_of_a_step",
    ),
    Fault(
        "the optimizer does not hear that the step is skipped",
        OUTCOME,
        (("optimizer.found_inf = self.found_inf", "optimizer.found_inf = None"),),
        WAITS,
        "test_training",
    ),
    Fault(
        "the host copy of one norm is used for two steps",
        SEQUENCE,
        (("            self._late_norms.rotate()\n", ""),),
        WAITS,
        "nobody_asked",
    ),
    Fault(
        "a skipped step of fused SGD makes its momentum",
        OUTCOME,
        (('        group["momentum"] and optimizer', "        False and optimizer"),),
        "tests/unit/runtime/optimizers/test_step_outcome.py",
        "momentum",
    ),
    Fault(
        "the norm of a skipped step is reported",
        SEQUENCE,
        (
            (
                "            else:\n                self._applied = outcome\n",
                "            self._applied = outcome\n",
            ),
        ),
        "tests/unit/v1/zero/test_clients_ways.py",
        "TestNorm",
    ),
    Fault(
        "an optimizer of whole parameters steps shards",
        "deepspeed/runtime/optimizers/on_shards.py",
        (("    return OwnerSteps(basic)\n", "    return basic\n"),),
        WHOLE_PARAMETERS,
        "TestAsOneProcess",
    ),
    Fault(
        "an optimizer is tried at a rate of zero",
        "deepspeed/runtime/optimizers/update_probe.py",
        (('        options["lr"] = _LR\n', "        pass\n"),),
        "tests/unit/runtime/optimizers/test_update_probe.py",
    ),
)
