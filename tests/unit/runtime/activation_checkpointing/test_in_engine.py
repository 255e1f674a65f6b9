"""Checkpointed layers in an engine: every stage and form of backward trains as plain torch."""

from typing import Any

import pytest
import torch
from torch import nn
from unit.common import DistributedTest
from unit.models import drawn
from unit.one_process import OneProcess, mean_square
from unit.v1.looping import each_pair

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.activation_checkpointing import checkpointing, settings

KINDS = {
    "reentrant": checkpointing.checkpoint,
    "non_reentrant": checkpointing.non_reentrant_checkpoint,
}
LR = 0.1
# Summation order over ranks and micro-batches, in fp32.
TOLERANCE = 2e-6


class Net(nn.Module):
    """Three checkpointed segments with odd sizes on raw data; two use the weights of `shared`."""

    def __init__(self, call: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.shared, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.call = call or (lambda function, *args: function(*args))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.call(lambda x: self.shared(self.first(x).tanh()), x)
        hidden = self.call(lambda h, scale: self.shared(h.tanh()) * scale, hidden, 2)
        return self.call(lambda h: self.last(h), hidden)


def data(index: int, rank: int) -> torch.Tensor:
    return drawn(100 * index + rank, 4, 5)


def train(
    call: Any, stage: int, form: str, bucket: int, steps: int = 2, accumulation: int = 2
) -> None:
    model = Net(call)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket, "overlap_comm": True},
        "verify": {"ledger": form != "direct", "collectives": True},
    }
    wanted = OneProcess(Net(), LR, mean_square).train(data, steps, accumulation)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config
    )
    for index in range(steps * accumulation):
        x = data(index, dist.get_rank()).to(engine.device)
        if form.startswith("around"):
            loss = call(engine, x).square().mean()
        else:
            loss = mean_square(engine.module if form == "direct" else engine, x)
        if form in ("managed", "around"):
            engine.backward(loss)
        else:
            loss.backward()
        engine.step()
    found = {
        name: deepspeed.utils.safe_get_full_fp32_param(param).clone()
        for name, param in model.named_parameters()
    }
    engine.destroy()
    for name, param in found.items():
        error = ((param - wanted[name]).norm() / wanted[name].norm()).item()
        assert error <= TOLERANCE, f"{name} is off by {error:.2e}"


class TestEngine(DistributedTest):
    world_size = 2

    @each_pair(
        kind=KINDS,
        stage=(0, 1, 2),
        form=("managed", "plain", "direct", "around", "around, plain"),
        bucket=(20, 10**6),
    )
    def test_trains_as_plain_torch(self, kind: str, stage: int, form: str, bucket: int) -> None:
        # Kills: a bucket sent after the first of two hooks of `shared`; a nested backward taken for
        # the end of the backward; a first segment that learns nothing because raw data requires no
        # gradient; an engine that, called again by recomputation, takes its running backward for
        # one that failed. The ledger and the intent check have to stay silent.
        train(KINDS[kind], stage, form, bucket)

    def test_the_block_configures(self) -> None:
        # Kills: a block of the configuration without effect; an engine that overrides what the
        # script chose.
        config = {"train_batch_size": 2, "activation_checkpointing": {"profile": True}}
        deepspeed.initialize(model=Net(), config={"train_batch_size": 2})
        assert not checkpointing.is_configured()
        deepspeed.initialize(model=Net(), config=config)
        assert settings.current().profile and checkpointing.is_configured()
        deepspeed.checkpointing.configure(None, profile=False)
        deepspeed.initialize(model=Net(), config=config)
        assert not settings.current().profile

    @pytest.mark.world_size(1)
    def test_a_block_that_cannot_be_honoured(self) -> None:
        config = {
            "train_batch_size": 1,
            "activation_checkpointing": {"contiguous_memory_optimization": True},
        }
        with pytest.raises(ValueError, match="partition_activations: true"):
            deepspeed.initialize(model=Net(), config=config)


class TestOnASimulatedDevice(DistributedTest):
    world_size = 2

    @each_pair(kind=KINDS, stage=(0, 1, 2), form=("managed", "plain"), cpu=(False, True))
    def test_no_race(self, kind: str, stage: int, form: str, cpu: bool) -> None:
        # Kills: hooks of a nested backward that wait for the wrong stream, and gradients sent
        # before they are complete.
        from deepspeed.accelerator.sim_accelerator import simulate
        from deepspeed.verify import check_streams

        with simulate(backward_streams=2), check_streams():
            deepspeed.checkpointing.configure(None, checkpoint_in_cpu=cpu)
            train(KINDS[kind], stage, form, bucket=20)


def test_configured_by_an_engines_filled_in_configuration() -> None:
    # Kills: asking which ranks share the batch, which a pipeline's configuration does not tell.
    filled = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    before = settings.current()
    try:
        checkpointing.configure(None, deepspeed_config=filled)
        assert settings.current().cpu
    finally:
        settings.choose(before)
