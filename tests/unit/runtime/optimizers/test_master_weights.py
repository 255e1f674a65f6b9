"""What an optimizer keeps by its parameters, once masters take their place."""

from typing import Any

import pytest
import torch
from torch import nn
from unit.common import DistributedTest

import deepspeed


def engine_over(optimizer: torch.optim.Optimizer, module: nn.Module, stage: int) -> Any:
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}}
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


class TestState(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("name, options", [("AdamW", {}), ("SGD", {"momentum": 0.9})])
    def test_of_steps_that_were_taken_is_not_forgotten(
        self, name: str, options: dict[str, Any]
    ) -> None:
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
