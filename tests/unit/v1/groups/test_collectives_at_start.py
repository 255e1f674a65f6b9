"""How many collectives `initialize` issues: as many for a deep model as for a shallow one."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed.comm.watch.observation import CollectiveCall, add_observer, remove_observer
from unit.common import DistributedTest
from unit.v1.looping import each
from unit.v1.tensor.megatron import Mpu

WIDTH = 8
SHALLOW, DEEP = 2, 24


class Counted:
    """What is issued, by name."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def run(self, call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
        """Called for every operation."""
        self.names[call.name] += 1
        return proceed()


def issued(layers: int, stage: int, mpu: Mpu | None) -> Counter[str]:
    """By `initialize`, for a model of so many linear layers and layer norms."""
    model = nn.Sequential()
    for _ in range(layers):
        model.append(nn.Linear(WIDTH, WIDTH))
        model.append(nn.LayerNorm(WIDTH))
        for param in model[-1].parameters():
            param.sequence_parallel = mpu is not None  # type: ignore[attr-defined]  # as Megatron marks it
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    counted = Counted()
    add_observer(counted)
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    remove_observer(counted)
    assert engine.module is model and next(model.parameters()).dtype == torch.bfloat16
    engine.destroy()
    return counted.names


class TestStart(DistributedTest):
    world_size = 2

    def test_of_data_parallel_ranks(self) -> None:
        # Kills: a parameter that is broadcast, or cut, or compared by a collective of its own.
        for stage in range(4):
            shallow, deep = issued(SHALLOW, stage, None), issued(DEEP, stage, None)
            assert deep == shallow, f"stage {stage}: {shallow} -> {deep}"

    @each(stage=(0, 1, 2))
    def test_of_tensor_parallel_ranks(self, stage: int) -> None:
        # Kills: a reduction for each layer norm that the ranks share.
        mpu = Mpu(2)
        assert issued(DEEP, stage, mpu) == issued(SHALLOW, stage, mpu)
