"""Which parameters are gathered together."""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.runtime.zero.units import choose_persistent, plan_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def own_of(model: nn.Module, leaves: tuple[nn.Module, ...] = ()) -> dict[str, list[str]]:
    names = {param: name for name, param in model.named_parameters()}
    plans = plan_units(model, lambda module: module in leaves)
    assert [p for plan in plans for p in plan.own] and len(
        {p for plan in plans for p in plan.own}
    ) == len(names)
    return {plan.name: [names[param] for param in plan.own] for plan in plans}


def test_blocks_are_units() -> None:
    # Kills: a unit per layer, parameters of a list that nobody gathers, a tied weight owned twice.
    found = own_of(Net())
    assert found[""] == ["scale", "extra.0"]
    assert found["embed"] == ["embed.weight"]
    assert found["blocks.1"] == [
        f"blocks.1.{name}" for name in ("a.weight", "a.bias", "b.weight", "b.bias")
    ]
    assert found["head"] == []
    assert len(found) == 6


def test_a_tied_weight_is_used_by_both() -> None:
    # Kills: a module whose forward doesn't ask for what another unit owns.
    model = Net()
    head = next(plan for plan in plan_units(model, lambda module: False) if plan.name == "head")
    assert head.params == [model.embed.weight]


def test_leaves_are_units() -> None:
    # Kills: a marked module that is divided.
    model = Net()
    assert list(own_of(model, (model,))) == [""]
    model = Net()
    assert "blocks.0" in own_of(model, (model.blocks[0].a,))


class ChosenExperts(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["a"](x)


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 2)
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_experts_are_one_unit() -> None:
    # Kills: a unit per expert, which only the ranks that chose it would gather.
    listed = Mixture(nn.ModuleList([nn.Linear(2, 2) for _ in range(3)]))
    assert list(own_of(nn.Sequential(listed, nn.ReLU()))) == ["", "0"]
    chosen = Mixture(ChosenExperts({name: nn.Linear(2, 2) for name in "abc"}))
    assert list(own_of(nn.Sequential(chosen, nn.ReLU()))) == ["", "0.gate", "0.experts"]


def test_children_of_uncalled_lists_are_units() -> None:
    # Kills: a list of lists taken for a block, whose forward never runs.
    pairs = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), Block()]) for _ in range(2)])
    model = nn.Module()
    model.pairs = pairs
    model.forward = lambda x: x  # type: ignore[method-assign]  # it is called
    assert set(own_of(model)) == {"", "pairs.0.0", "pairs.0.1", "pairs.1.0", "pairs.1.1"}


def test_persistent_parameters() -> None:
    # Kills: a threshold of one parameter that ignores that of all.
    params = [nn.Parameter(torch.zeros(numel)) for numel in (0, 4, 5, 6, 4)]
    chosen = choose_persistent(params, lambda param: param.numel(), 5, 10)
    assert [param in chosen for param in params] == [True, True, True, False, False]
