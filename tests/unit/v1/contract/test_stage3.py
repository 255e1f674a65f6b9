"""The contract of stage 3: the configurations of stage 2, times what is whole when.

The contract's model takes another branch on each rank, so it is one unit; `test_stage3_training`
has models of many.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

from unit.common import DistributedTest
from unit.v1.contract.matrix import Case, of_world, pairwise_cases
from unit.v1.contract.model import ContractModel
from unit.v1.contract.reference import Tensors
from unit.v1.contract.runner import CaseRun, run_cases

# What stays whole between steps, and what is gathered ahead. They take turns over the cases.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"stage3_param_persistence_threshold": 0},
    {},
    {"stage3_param_persistence_threshold": 12, "stage3_prefetch_bucket_size": 0},
    {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
    {"stage3_param_persistence_threshold": 0, "allgather_partitions": False},
)


@dataclasses.dataclass(frozen=True)
class Stage3Case(Case):
    """A configuration of stage 3.

    Attributes:
        turn: Which of `SETTINGS`.
    """

    turn: int = 0

    @property
    def name(self) -> str:
        """See base class."""
        return f"{super().name}-turn{self.turn}"


def stage3_cases() -> list[Stage3Case]:
    """All pairs of values of the other factors."""
    rows = {dataclasses.replace(case, stage=3) for case in pairwise_cases()}
    ordered = sorted(rows, key=lambda case: case.name)
    turns = itertools.cycle(range(len(SETTINGS)))
    return [
        Stage3Case(**dataclasses.asdict(case), turn=turn)
        for case, turn in zip(ordered, turns, strict=False)
    ]


class Stage3Run(CaseRun):
    """One case."""

    def _config(self) -> dict[str, Any]:
        config = super()._config()
        leaf = f"{ContractModel.__module__}.{ContractModel.__qualname__}"
        zero = {**SETTINGS[self.case.turn], "leaf_module": {"classes": [leaf]}}  # type: ignore[attr-defined]  # a Stage3Case
        config["zero_optimization"] |= zero
        return config

    def _check_replicas(self, step: int, masters: Tensors) -> None:
        """What is gathered is the rounded masters."""
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        with GatheredParameters(self.params.values()):
            super()._check_replicas(step, masters)

    def _check_rest(self, step: int) -> None:
        """Frozen parameters are untouched, padding is zero, and nothing is whole but what
        persists.
        """
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

        live = self.engine.parameter_offload.param_coordinator.live_numel
        if live:
            self.fail(step, f"{live} elements are still gathered")
        for name, param in self.model.named_parameters():
            persists = param.ds_persist
            if (param.ds_status is ZeroParamStatus.AVAILABLE) is not persists:
                self.fail(step, f"{name} is {param.ds_status}, persistent: {persists}")
            own = param._zero3.own_part(torch.empty(param.ds_shape)).numel()
            if param.ds_tensor[own:].count_nonzero():
                self.fail(step, f"padding of {name} is not zero")
        with GatheredParameters(self.model.parameters()):
            for name, before in self.frozen.items():
                if not torch.equal(self.model.get_parameter(name), before):
                    self.fail(step, f"frozen {name} changed")


class TestPairs(DistributedTest):
    """All pairs of values."""

    world_size = [1, 2, 3]
    exec_timeout = 300

    def test(self) -> None:
        # Kills: a bucket that misses a parameter or takes padding for one, masters that do not
        # reach the shards, memory that is kept.
        from deepspeed import comm as dist

        run_cases(of_world(stage3_cases(), dist.get_world_size()), Stage3Run)


class TestSimulated(DistributedTest):
    """The same on the simulated device, where every missing wait is an error."""

    world_size = 2
    exec_timeout = 400

    def test(self) -> None:
        # Kills: a unit read before it is gathered or after its memory was given away, a shard
        # gathered before it is updated.
        from deepspeed.accelerator.sim_accelerator import simulate
        from deepspeed.verify import check_streams

        torch.set_num_threads(1)
        cases = of_world(stage3_cases(), 2)
        with simulate(backward_streams=2), check_streams():
            run_cases(cases, Stage3Run)
