"""Transformers: no false alarm behind routing that jumps; a fault of its size is still named."""

from typing import Any

import pytest

from deepspeed.verify.oracle.plan import Run, RunKind
from deepspeed.verify.oracle.system import SystemRun
from unit.common import DistributedTest
from unit.verify.families import FAMILIES, example_config
from unit.verify.oracle_runs import failures, plan_of, report_of

pytest.importorskip("transformers")

SIMULATED = (RunKind.SGD, RunKind.SIM)
GATE = "model.layers.1.mlp.gate.weight"
# What a rounding of the step before once did to the gate's update, and was called a fault.
FAULT = 0.088


def report(family: str) -> list[str]:
    sizes = {"steps": 2, "schedules": 1, "sizes": (40_000,) * 5}
    # t5 has two stacks of so many.
    model = FAMILIES[family].replace("t5?num_layers=2", "t5?num_layers=1")
    return failures(report_of(plan_of(example_config(), model, SIMULATED, **sizes)))


class TestFamilies(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("family", ["mixtral", "t5"])
    def test_pass(self, family: str) -> None:
        # Kills: a bound over steps from different weights; an encoder-decoder built as another.
        assert report(family) == []

    def test_a_fault_of_that_size_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kills: a bound that is wide enough for whatever routing does."""
        build = SystemRun.__init__

        def faulty(self: SystemRun, run: Run, *args: Any) -> None:
            build(self, run, *args)
            if run.kind is RunKind.SIM:
                self.params[GATE].register_hook(lambda grad: grad * (1 + FAULT))

        monkeypatch.setattr(SystemRun, "__init__", faulty)
        failed = [row for row in report("mixtral") if row.startswith("simulated device = host")]
        assert len(failed) == 1 and GATE in failed[0], failed
