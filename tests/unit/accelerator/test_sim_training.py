"""The engine on the simulated device: right as it is, not-a-number with a wait missing."""

import dataclasses
from typing import Any

import pytest

from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.streams import SideStream
from unit.common import DistributedTest
from unit.v1.contract.matrix import Case
from unit.v1.contract.runner import run_cases

# Several parameters per bucket, so that one bucket is filled from several streams.
SHARED_BUCKET = Case(2, "bf16", 1, True, True, True, False, "exact", 2, "sgd")
LOCAL_ACCUMULATION = Case(1, "fp16+fp32", 3, True, True, True, False, "tiny", 2, "sgd")


class TestTraining(DistributedTest):
    """Two ranks against the contract's reference."""

    world_size = 2

    @pytest.mark.parametrize("schedule", [0, 1])
    def test_equals_one_process(self, schedule: int) -> None:
        # Kills: a missing wait in engine or optimizer; zeroing the accumulator while the reduction
        # stream still reads it.
        for case in (
            SHARED_BUCKET,
            dataclasses.replace(SHARED_BUCKET, stage=1, offload=True),
            LOCAL_ACCUMULATION,
        ):
            with simulate(schedule=schedule, backward_streams=2):
                run_cases([case])

    def test_undone_fix_1_is_not_a_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a simulation that forgives a reduction that waits for the last producer only.
        wait_for = SideStream.wait_for

        def only_current(self: SideStream, producers: Any) -> None:
            wait_for(self, {self.current_stream()})

        monkeypatch.setattr(SideStream, "wait_for", only_current)
        with simulate(backward_streams=3), pytest.raises(AssertionError, match="off by nan"):
            run_cases([SHARED_BUCKET])
