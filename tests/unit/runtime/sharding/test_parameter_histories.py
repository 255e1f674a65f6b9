"""Which steps the parameters of a flat group have taken, on each of the ranks that share it."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn
from unit.models import drawn

from deepspeed.ops.parameter_runs import STATE_BY_PARAMETER, stepped_by_runs
from deepspeed.runtime.sharding.fragments import FragmentTable
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.sharding.parameter_histories import ParameterHistories, of_parameter

NAMES = ("a", "b", "c")
NUMELS = (3, 4, 3)  # two ranks cut in `b`


class Rank:
    """One rank's shard of three parameters, and an optimizer of torch's."""

    def __init__(self, rank: int = 0, ranks: int = 1, kind: str = "AdamW") -> None:
        self.params = [nn.Parameter(drawn(at, numel)) for at, numel in enumerate(NUMELS)]
        table = FragmentTable.build(NUMELS, ranks)
        how: dict[str, Any] = {"master_dtype": torch.float32, "grad_dtype": torch.float32}
        self.group = ShardedGroup(self.params, table, rank, device=torch.device("cpu"), **how)
        more = {"momentum": 0.9} if kind == "SGD" else {}
        make = getattr(torch.optim, kind)
        self.optimizer: torch.optim.Optimizer = make(self.group.masters, lr=0.1, **more)
        self.histories = ParameterHistories(self.group, NAMES, self.optimizer)

    def step(self, *left_out: str) -> list[tuple[int, int]] | None:
        """Step without these; the elements that were stepped, None for all."""
        flat = self.histories.flat
        flat.grad = torch.ones_like(flat)
        runs = self.histories.begin(self.of_names(left_out))
        if runs is None:
            self.optimizer.step()
        else:
            with stepped_by_runs(self.optimizer, {flat: runs}):
                self.optimizer.step()
        self.histories.end()
        return None if runs is None else [(run.start, run.end) for run in runs if run.end]

    def of_names(self, names: Collection[str]) -> set[nn.Parameter]:
        return {param for name, param in zip(NAMES, self.params, strict=True) if name in names}

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state[self.histories.flat]
        return found

    def counts(self) -> list[float]:
        """How many steps each parameter has taken."""
        flat = self.histories.flat
        own = (of_parameter(self.state, name, flat) for name in NAMES)
        return [float(one.get("step", 0)) for one in own]


def test_nothing_is_kept_while_all_are_stepped() -> None:
    rank = Rank()
    assert rank.step() is None
    assert STATE_BY_PARAMETER not in rank.state


def test_neighbours_with_one_history_are_one_run() -> None:
    assert Rank().step("c") == [(0, 7)]


def test_counts_are_each_parameters() -> None:
    """Kills: one count for all, a count that the others' steps raise."""
    rank = Rank()
    for left_out in ((), ("b",), ("b", "c"), (), ("a",)):
        rank.step(*left_out)
    assert rank.counts() == [4, 3, 4]


def test_moments_of_what_is_left_out_stay() -> None:
    rank = Rank()
    rank.step()
    master = rank.histories.flat.detach().clone()
    before = rank.state["exp_avg"].clone()
    rank.step("b")
    assert torch.equal(rank.histories.flat[3:7], master[3:7])
    assert torch.equal(rank.state["exp_avg"][3:7], before[3:7])
    assert not torch.equal(rank.state["exp_avg"][:3], before[:3])


def test_what_begins_late_has_no_state_before() -> None:
    rank = Rank()
    rank.step("b")
    rank.step("b")
    assert rank.state[STATE_BY_PARAMETER] == {"b": {}}
    rank.step()
    assert rank.counts() == [3, 1, 3]


def test_a_begun_parameter_is_like_all_where_nobody_counts() -> None:
    rank = Rank(kind="SGD")
    rank.step("b")
    assert rank.state[STATE_BY_PARAMETER] == {"b": {}}
    rank.step()
    assert STATE_BY_PARAMETER not in rank.state


def test_parameters_that_missed_the_same_steps_share_a_history() -> None:
    rank = Rank()
    rank.step()
    rank.step("b", "c")
    assert rank.step() == [(0, 3), (3, 10)]


def test_histories_part_when_one_is_left_out_again() -> None:
    rank = Rank()
    rank.step()
    rank.step("b", "c")
    rank.step("b")
    rank.step()
    assert rank.counts() == [4, 2, 3]


@pytest.mark.parametrize("number", [0, 1])
def test_every_rank_counts_for_all_parameters(number: int) -> None:
    """Kills: counts of a rank's own parameters alone, which its file would lack for others."""
    rank = Rank(number, 2)
    for left_out in ((), ("a",), ("c",), ()):
        rank.step(*left_out)
    assert rank.counts() == [3, 4, 3]


@pytest.mark.parametrize("number", [0, 1])
def test_a_shard_without_stepped_elements_counts_the_step(number: int) -> None:
    rank = Rank(number, 2)
    rank.step()
    rank.step("a", "b")
    rank.step("b", "c")
    assert rank.counts() == [2, 1, 2]
    assert float(rank.state["step"]) == 3
