"""`ds_verify` by equality: silent on what is right, one unit in the last place is found."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed.verify.oracle.parts import Parts
from deepspeed.verify.oracle.plan import Plan, RunKind
from deepspeed.verify.oracle.ranks import Outcome
from deepspeed.verify.oracle.report import Row, Verdict
from deepspeed.verify.oracle.system import SystemRun
from deepspeed.verify.oracle.verdicts import make_report
from unit.common import DistributedFixture, DistributedTest
from unit.v1.reproducibility.test_faults import FAULTS, Planted
from unit.verify.oracle_runs import config_of, plan_of, session_of

HOST = {"device": "cpu"}
# Model, stage, precision, and what else ZeRO does.
CASES: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "stage 0": ("right", 0, "fp32", {}),
    "stage 1, bf16": ("right", 1, "bf16", {}),
    "stage 2, fp16": ("right", 2, "fp16", {}),
    "host": ("with_dropout", 2, "fp32", {"offload_optimizer": HOST}),
    "shards on the host": ("right", 3, "bf16", {"offload_optimizer": HOST, "offload_param": HOST}),
    "hpZ": ("right", 3, "fp32", {"zero_hpz_partition_size": 2}),
    "stages": ("pipeline", 0, "fp32", {}),
    "chunks": ("interleaved", 1, "bf16", {}),
}
STATE_OF_ONE = ("a bit of a moment", "the last element of a slice")


def plan_for(case: str) -> Plan:
    model, stage, precision, zero = CASES[case]
    config = config_of(stage, precision, gradient_accumulation_steps=3, gradient_clipping=0.1)
    config["zero_optimization"] |= zero
    parts = Parts(stages=2) if case in ("stages", "chunks") else None
    return plan_of(config, model, (RunKind.EXACT, RunKind.ALONE), steps=3, parts=parts)


class one_process(DistributedFixture):  # noqa: N801  # the name of the fixture
    world_size = 1

    def run(self, class_tmpdir: str) -> None:
        found = {}
        for case in CASES:
            _, alone = (plan := plan_for(case)).runs
            found[case] = session_of(replace(plan, runs=[alone])).outcomes[alone.name].ranks
        Path(class_tmpdir, "found").write_text(json.dumps(found), encoding="utf-8")


def row_of(case: str, folder: str) -> Row:
    """What ranks are told of a case; the same on all of them."""
    exact, alone = (plan := plan_for(case)).runs
    session = session_of(replace(plan, runs=[exact]))
    found = json.loads(Path(folder, "found").read_text(encoding="utf-8"))
    session.outcomes[alone.name] = Outcome(found[case])
    (row,) = [row for row in make_report(plan, session, {}).rows if row.check.startswith("exact")]
    return row


class TestExact(DistributedTest):
    world_size = 2

    def test_what_is_right_and_one_off(
        self, one_process: None, class_tmpdir: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a reference of another sum, losses in another order; a tolerance.
        for case in CASES:
            row = row_of(case, class_tmpdir)
            assert row.verdict is Verdict.PASS and "3 steps" in row.detail, (case, row)
        train = SystemRun._train_batch

        def with_its_engine(run: SystemRun, step: int) -> list[float]:
            Planted.engine = run.engine
            return train(run, step)

        monkeypatch.setattr(SystemRun, "_train_batch", with_its_engine)
        told = {}
        for name, planted in FAULTS.items():
            with planted():
                row = row_of("host", class_tmpdir)
            if row.verdict is not Verdict.FAIL or not row.detail.startswith("at step 1 "):
                told[name] = row.detail
            if name in STATE_OF_ONE:
                assert "state of" in row.detail and len(row.parameters) == 1, row
            elif name == "a leaf one off":
                assert "gradient of" in row.detail and "0.weight" in row.parameters, row
        Planted.engine = None
        assert told == {}
