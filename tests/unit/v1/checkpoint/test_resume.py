"""A resumed run equals, bit for bit, one that did not stop; in other processes: see `kills`."""

from pathlib import Path
from typing import Any

import pytest

from unit.common import DistributedTest

from . import runs
from .runs import ACCUMULATE, BF16, CPU, SUMS, differences, loaded, saved, start, train, zero

FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 2}
}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}}
IMMEDIATE = {**SUMS, "bf16": {"enabled": True, "immediate_grad_update": True}}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}

CASES: dict[str, dict[str, Any]] = {
    "stage0-fp32": {},
    "stage0-fp32-sgd": SGD,
    "stage0-bf16": BF16,
    "stage0-bf16-accumulate": ACCUMULATE,
    "stage0-fp16": FP16,
    "stage0-fp16-per-parameter": {**FP16, **runs.TORCH_ADAM},
    "stage0-fp16-consecutive": {"fp16": {**FP16["fp16"], "consecutive_hysteresis": True}},
    "stage0-fp16-static": {"fp16": {"enabled": True, "loss_scale": 64}},
    "stage1-fp32": zero(1),
    "stage1-bf16": {**BF16, **zero(1)},
    "stage1-fp16": {**FP16, **zero(1)},
    "stage1-bf16-accumulate": {**ACCUMULATE, **zero(1)},
    "stage1-bf16-immediate": {**IMMEDIATE, **zero(1)},
    "stage1-bf16-accumulate-offload": {**ACCUMULATE, **zero(1, **CPU)},
    "stage1-sgd": {**SGD, **zero(1)},
    "stage2-fp32": zero(2),
    "stage2-bf16": {**BF16, **zero(2)},
    "stage2-fp16": {**FP16, **zero(2)},
    "stage2-bf16-offload": {**BF16, **zero(2, **CPU)},
    "stage2-fp16-offload": {**FP16, **zero(2, **CPU)},
    "stage2-fp32-elastic": zero(2, elastic_checkpoint=True),
    "stage2-bf16-elastic": {**BF16, **zero(2, elastic_checkpoint=True)},
    "stage2-bf16-round-robin": {**BF16, **zero(2, round_robin_gradients=True)},
    "stage2-lion": {**BF16, **LION, **zero(2)},
}
STEPS, SAVED_AT = 4, 2


class TestResume(DistributedTest):
    """Kills: weights, masters, moments, scale, schedule, counters, random states or data lost."""

    world_size = 2

    @pytest.mark.parametrize("stage", ["stage0", "stage1", "stage2"])
    def test_bit_equal(self, tmp_path: Path, stage: str) -> None:
        cases = [case for case in CASES if case.startswith(stage)]
        wrong = {case: found for case in cases if (found := self.resume(tmp_path / case, case))}
        assert wrong == {}

    def resume(self, folder: Path, case: str) -> list[str]:
        """Where a resumed run differs from one that did not stop."""
        engine = start(**CASES[case])
        train(engine, SAVED_AT)
        assert engine.save_checkpoint(str(folder), client_state={"note": [1, "two"]})
        straight = train(engine, STEPS - SAVED_AT)

        resumed = start(seed=2, **CASES[case])
        train(resumed, 1)  # state that loading must replace
        path, client_state = resumed.load_checkpoint(str(folder))
        assert path == str(folder / f"global_step{SAVED_AT}")
        assert client_state is not None and client_state["note"] == [1, "two"]
        if "fp16" in case and "static" not in case:
            assert straight[-1]["counters"][1] > 0, "the case has no skipped steps to remember"
        return differences(straight, train(resumed, STEPS - SAVED_AT))

    @pytest.mark.parametrize("case", ["stage0-fp16", "stage2-fp16"])
    def test_after_every_step(self, tmp_path: Path, case: str) -> None:
        """Whatever the scaler's, the schedule's and the epoch's state is when it is saved."""
        engine = start(**CASES[case])
        for step in range(1, 6):
            train(engine, 1)
            engine.save_checkpoint(tmp_path, tag=f"at{step}")
        last = train(engine, 1)
        for step in range(1, 6):
            resumed = loaded(tmp_path, tag=f"at{step}", seed=step + 1, **CASES[case])
            assert differences(last[-1], train(resumed, 6 - step)[-1]) == [], step

    def test_saving_changes_nothing(self, tmp_path: Path) -> None:
        plain = train(start(**CASES["stage2-bf16"]), 4)
        engine = saved(tmp_path, 2, **CASES["stage2-bf16"])
        assert differences(plain[2:], train(engine, 2)) == []

    def test_a_plain_loop_over_the_loader_goes_on_mid_epoch(self, tmp_path: Path) -> None:
        engine = start(**CASES["stage1-fp32"])
        batches = iter(engine.training_dataloader)
        for _ in range(2):
            next(batches)
        engine.save_checkpoint(tmp_path)
        rest = [x for x, _ in batches]
        resumed = loaded(tmp_path, **CASES["stage1-fp32"])
        assert differences(rest, [x for x, _ in resumed.training_dataloader]) == []
        assert len(rest) == 3
