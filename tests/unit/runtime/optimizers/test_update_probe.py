"""What an optimizer's update of an element depends on, found out by trying it."""

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.runtime.optimizers.on_shards import BY_OWNERS, ELEMENTWISE, is_elementwise
from deepspeed.runtime.optimizers.update_probe import Update, update_of

OF_TORCH = [name for name in ELEMENTWISE if hasattr(torch.optim, name)]


def made(name: str, **options: Any) -> torch.optim.Optimizer:
    cls: Any = getattr(torch.optim, name)
    return cls([nn.Parameter(torch.ones(3, 2))], **{"lr": 0.1, **options})  # type: ignore[no-any-return]  # a class


class GlobalNorm(torch.optim.SGD):
    """Clips all gradients together, as some optimizers do themselves."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


class Picky(torch.optim.SGD):
    """Wants a size that small tensors do not have."""

    def step(self, closure: Any = None) -> Any:
        raise ValueError("too small")


def one(cls: Any, **options: Any) -> torch.optim.Optimizer:
    return cls([nn.Parameter(torch.ones(3))], lr=0.1, **options)  # type: ignore[no-any-return]  # a class


@pytest.mark.parametrize("name", OF_TORCH)
def test_those_that_are_called_elementwise_are(name: str) -> None:
    # Kills: a name in the list that looks at more, a tolerance that nothing meets.
    assert update_of(made(name)) is Update.ELEMENTWISE


@pytest.mark.parametrize("lr", [0.1, 0.0, torch.tensor(0.0)])
def test_whole_parameters_are_noticed_whatever_the_rate_is(lr: Any) -> None:
    # Kills: a warmup's first rate of zero, with which nothing is updated and so nothing differs.
    for name in BY_OWNERS:
        if hasattr(torch.optim, name):
            assert update_of(made(name, lr=lr)) is Update.BY_PARAMETER, name


def test_each_group_is_tried() -> None:
    # Kills: only the first group's options, of which another may switch the rule.
    class Mixed(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    if group["normed"]:
                        param.grad = param.grad / param.grad.norm()
            return super().step(closure)

    groups = [{"params": [nn.Parameter(torch.ones(2))], "normed": flag} for flag in (False, True)]
    assert update_of(Mixed(groups[:1], lr=0.1)) is Update.ELEMENTWISE
    assert update_of(Mixed(groups, lr=0.1)) is Update.BY_PARAMETER


def test_what_depends_on_other_parameters() -> None:
    # Kills: such an optimizer stepped by owners, each with other parameters beside.
    assert update_of(one(GlobalNorm)) is Update.COUPLED


class Sized(torch.optim.SGD):
    """Has a rule of its own for the norm of a parameter, after some steps, and takes matrices."""

    takes_vectors, starts_at, rate = True, 0, 1.0

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            count = self.state[param].setdefault("count", 0)
            self.state[param]["count"] = count + 1
            assert self.takes_vectors or param.dim() == 2
            if count >= self.starts_at:
                param.grad /= param.grad.norm()
            param.grad *= self.rate
        return super().step(closure)


@pytest.mark.parametrize(
    "trait,value", [("takes_vectors", False), ("starts_at", 25), ("rate", 1e-9)]
)
def test_rules_that_hardly_show(trait: str, value: Any) -> None:
    # Kills: an error with vectors taken for no answer, too few steps, a bound that is not relative.
    assert update_of(one(type("Mine", (Sized,), {trait: value}))) is Update.BY_PARAMETER


def test_one_that_cannot_be_tried_says_so() -> None:
    # Kills: its error raised, an answer that nobody knows; one that moves nothing is no better.
    assert update_of(one(Picky)) is Update.UNKNOWN
    assert update_of(one(type("Still", (Sized,), {"rate": 0.0}))) is Update.UNKNOWN


def test_a_known_name_of_another_package_is_tried() -> None:
    # Kills: a class that is called SGD, and looks at all parameters, on shards.
    assert is_elementwise(one(torch.optim.SGD))
    for base, expected in ((torch.optim.SGD, True), (GlobalNorm, False), (Picky, True)):
        assert is_elementwise(one(type("SGD", (base,), {"__module__": "mine"}))) is expected
    assert not is_elementwise(one(GlobalNorm))  # nor an unknown one


def test_it_leaves_no_trace() -> None:
    # Kills: a schedule's count of steps, state or random numbers that a try moves on.
    optimizer = made("AdamW")
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before, random = optimizer.state_dict(), torch.get_rng_state()
    params = list(optimizer.param_groups[0]["params"])
    assert update_of(optimizer) is Update.ELEMENTWISE
    assert torch.equal(torch.get_rng_state(), random)
    assert optimizer.state_dict() == before and optimizer.param_groups[0]["params"] == params
    assert not getattr(optimizer, "_opt_called", False)
    assert torch.equal(params[0], torch.ones(3, 2)) and params[0].grad is None
