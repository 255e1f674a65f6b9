"""Masters take the place of parameters: optimizer state, and what cannot be trained."""

from typing import Any

import pytest
import torch
from torch import nn
from unit.common import DistributedTest
from unit.models import config_of
from unit.v1.looping import each

import deepspeed
from deepspeed.runtime.optimizers.untrainable import why_untrainable


def engine_over(optimizer: torch.optim.Optimizer, module: nn.Module, stage: int) -> Any:
    config = config_of(stage, 2)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


class TestState(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("name, options", [("AdamW", {}), ("SGD", {"momentum": 0.9})])
    def test_of_steps_that_were_taken_is_not_forgotten(self, name: str, options: Any) -> None:
        # Kills: training that begins without the moments which its optimizer has.
        module = nn.Linear(3, 3)
        optimizer = getattr(torch.optim, name)(module.parameters(), lr=0.1, **options)
        module(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        with pytest.raises(ValueError, match=f"{name} has taken steps already.*load_checkpoint"):
            engine_over(optimizer, module, 1)
        assert engine_over(optimizer, module, 0).optimizer is optimizer  # which updates the same

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_that_is_made_at_once_is_made_anew(self, tmpdir: Any, stage: int) -> None:
        # Kills: state by parameters that are in no group any more, which torch cannot number.
        module = nn.Linear(3, 3)
        engine = engine_over(torch.optim.Adagrad(module.parameters()), module, stage)
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
        assert len(engine.optimizer.state) == 1
        engine.save_checkpoint(str(tmpdir))


class Model(nn.Module):
    """Tied layers, an embedding with sparse gradients and complex frequencies, both frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True).requires_grad_(False)
        self.angles = nn.Parameter(torch.randn(4, dtype=torch.complex64), requires_grad=False)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = (self.table(x).to(torch.complex64) * self.angles).real
        return self.second(self.first(turned.to(self.first.weight.dtype)))


class Duck:
    """Looks like an optimizer, as those of some clients do."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params)}]


def test_ways_of_clients_are_taken() -> None:
    # Kills: a check of names (tied parameters have two), of lists by ==, or of what is frozen.
    model = Model()
    for trained in (
        model.parameters(),  # with what is frozen
        [model.first.weight, model.second.bias],
        [{"params": [model.second.weight]}, {"params": [model.first.bias]}],
    ):
        assert why_untrainable(torch.optim.SGD(trained, lr=0.1), model) is None
    assert why_untrainable(Duck(model.parameters()), model) is None  # type: ignore[arg-type]
    empty = torch.optim.SGD([{"params": []}], lr=0.1)
    assert why_untrainable(empty, model) is None
    # What is not in the optimizer may be sparse or complex.
    for param in (model.table.weight, model.angles):
        param.requires_grad_(True)
        assert why_untrainable(torch.optim.SGD(model.first.parameters(), lr=0.1), model) is None
        assert why_untrainable(torch.optim.SGD([param], lr=0.1), model) is not None
        param.requires_grad_(False)


class TestTraining(DistributedTest):
    world_size = 2

    @each(stage=[0, 1, 2, 3], bf16=[False, True])
    def test_frozen_complex_and_sparse_stay_as_they_are(self, stage: int, bf16: bool) -> None:
        torch.manual_seed(0)
        zero = {"stage3_param_persistence_threshold": 0}
        optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
        precision = "bf16" if bf16 else "fp32"
        config = config_of(stage, 2, 1, precision, optimizer=optimizer, zero_optimization=zero)
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
            model = Model()
        with deepspeed.zero.GatheredParameters([model.angles]):
            angles = model.angles.detach().clone()
        params = model.parameters()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
        for step in range(2):
            engine.backward(engine(torch.tensor([0, step])).float().square().mean())
            engine.step()
        assert float(engine.get_global_grad_norm()) > 0.0
        with deepspeed.zero.GatheredParameters([model.angles]):
            assert torch.equal(model.angles, angles)
        engine.destroy()
