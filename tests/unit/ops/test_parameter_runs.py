"""Steps of parts of a flat parameter, each part as a parameter of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.ops.parameter_runs import (
    STATE_BY_PARAMETER,
    ElementRun,
    keep_state_of_run,
    same_state,
    settle_loaded,
    shared_state,
    state_of_run,
    stepped_by_runs,
)
from unit.models import drawn

NUMEL = 7
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
}


def flat_state(**shared: Any) -> dict[str, Any]:
    return {"exp_avg": torch.arange(float(NUMEL)), **shared}


class TestState:
    def test_is_shared_where_it_has_no_element_for_each(self) -> None:
        own = {"step": torch.tensor(3.0), "rows": torch.ones(2), "none": None}
        state = {**flat_state(**own), STATE_BY_PARAMETER: {"a": {}}}
        assert set(shared_state(state, torch.zeros(NUMEL))) == {"step", "rows"}

    def test_of_a_run_is_a_part_in_place(self) -> None:
        """Kills: a copy, whose update the flat parameter would not see."""
        state, run = flat_state(), ElementRun(2, 5, {"step": 1})
        own = state_of_run(state, torch.zeros(NUMEL), run)
        own["exp_avg"].fill_(9.0)
        own["step"] += 1
        assert state["exp_avg"].tolist() == [0, 1, 9, 9, 9, 5, 6]
        assert run.shared == {"step": 1}

    def test_of_a_new_run_is_none(self) -> None:
        assert (
            state_of_run(flat_state(), torch.zeros(NUMEL), ElementRun(0, 2, {}, is_new=True)) == {}
        )

    def test_that_a_step_replaced_is_kept(self) -> None:
        state, run = flat_state(), ElementRun(1, 3, {"step": 1})
        found = {"exp_avg": torch.full((2,), 8.0), "step": 2, "none": None}
        keep_state_of_run(state, torch.zeros(NUMEL), run, found)
        assert state["exp_avg"].tolist() == [0, 8, 8, 3, 4, 5, 6]
        assert run.shared == {"step": 2}

    def test_that_a_step_made_is_zero_elsewhere(self) -> None:
        state: dict[str, Any] = {}
        found = {"exp_avg": torch.ones(2)}
        keep_state_of_run(state, torch.zeros(NUMEL), ElementRun(5, 7, {}), found)
        assert state["exp_avg"].tolist() == [0, 0, 0, 0, 0, 1, 1]


class TestLoaded:
    def test_counts_are_tensors_where_the_flat_ones_are(self) -> None:
        state = flat_state(step=torch.tensor(5.0))
        state[STATE_BY_PARAMETER] = {"a": {"step": 3}}
        settle_loaded(state)
        assert same_state(state[STATE_BY_PARAMETER]["a"], {"step": torch.tensor(3.0)})

    def test_equal_histories_are_one(self) -> None:
        """Kills: runs that end where a parameter does, of parameters that are stepped alike."""
        counts = {"a": 1, "b": 2, "c": 1}
        own = {name: {"step": torch.tensor(count)} for name, count in counts.items()}
        state = {**flat_state(step=torch.tensor(5)), STATE_BY_PARAMETER: own}
        settle_loaded(state)
        found = state[STATE_BY_PARAMETER]
        assert found["a"] is found["c"]
        assert found["a"] is not found["b"]


class TestSteps:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_of_runs_are_those_of_parameters(self, name: str) -> None:
        """One part misses a step, and a third of the elements all of them."""
        make, flat = OPTIMIZERS[name], nn.Parameter(drawn(0, NUMEL))
        parts = [nn.Parameter(flat.detach()[a:b].clone()) for a, b in ((0, 3), (3, 5), (5, 7))]
        whole, apart = make([flat]), make(parts)
        first: dict[str, Any] = {}
        second: dict[str, Any] = {}
        for step in range(4):
            runs = [ElementRun(0, 3, first, is_new=step == 0)]
            if step != 1:
                runs.append(ElementRun(3, 5, second, is_new=step == 0))
            flat.grad = drawn(step + 1, NUMEL)
            for run, part in zip(((0, 3), (3, 5)), parts, strict=False):
                part.grad = flat.grad[slice(*run)] if step != 1 or part is parts[0] else None
            with stepped_by_runs(whole, {flat: runs}):
                whole.step()
            apart.step()
            torch.testing.assert_close(flat.detach(), torch.cat([p.detach() for p in parts]))
        assert list(whole.state) == [flat]
        assert whole.param_groups[0]["params"] == [flat]

    def test_that_fail_leave_the_groups(self) -> None:
        flat = nn.Parameter(torch.zeros(NUMEL))
        optimizer = OPTIMIZERS["AdamW"]([flat])
        with (
            pytest.raises(KeyError),
            stepped_by_runs(optimizer, {flat: [ElementRun(0, 2, {}, True)]}),
        ):
            raise KeyError
        assert optimizer.param_groups[0]["params"] == [flat]
        assert all(key is flat for key in optimizer.state)
