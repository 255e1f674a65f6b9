"""Engines with the default configuration on the simulated device, until periodic work begins."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from deepspeed.verify import Budget, check_budgets, check_streams
from unit.common import DistributedTest
from unit.models import config_of, drawn, seeded
from unit.one_process import own_loss
from unit.v1.looping import each
from unit.v1.moe import runner as experts
from unit.v1.sequence import test_training as sequences

BATCHES, ACCUMULATION = 3, 2
# Sums in another order, grown by three updates; a lost contribution is a thousand times as much.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}

Forward = Callable[[Any, torch.dtype, int], torch.Tensor]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = ((nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + deepspeed.checkpointing.checkpoint(block, x)
        return x.float().square().mean()


def _dense() -> tuple[nn.Module, Forward]:
    def forward(engine: Any, dtype: torch.dtype, turn: int) -> torch.Tensor:
        return own_loss(engine, drawn(10 * turn + dist.get_rank(), 3, 6).to(dtype))

    return Checkpointed(), forward


def _experts() -> tuple[nn.Module, Forward]:
    def forward(engine: Any, dtype: torch.dtype, turn: int) -> torch.Tensor:
        return own_loss(engine, experts.micro_batch(turn, dist.get_rank(), 0, dtype))

    return experts.Net(experts.Case(2, 2, True, 1, "fp32")), forward


def _sequence() -> tuple[nn.Module, Forward]:
    model = sequences.make_model()

    def forward(engine: Any, dtype: torch.dtype, turn: int) -> torch.Tensor:
        group = groups._get_sequence_parallel_group()
        if not isinstance(model.attention, DistributedAttention):
            model.attention = DistributedAttention(model.attention, group)
            model.attention.scatter_idx, model.attention.gather_idx = 2, 1
        tokens, labels = sequences.samples(turn, 0, 0)
        places = torch.arange(tokens.shape[1]).chunk(dist.get_world_size())[dist.get_rank()]
        logits = engine(tokens[:, places], places).float()
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, places].flatten())

    return model, forward


def _optimizer(place: dict[str, Any]) -> dict[str, Any]:
    return {"zero_optimization": {"offload_optimizer": place}}


_CPU = {"device": "cpu", "pin_memory": True}
_CHECKPOINTS = {"activation_checkpointing": {"cpu_checkpointing": True}}
ENGINES: dict[str, tuple[Callable[[], tuple[nn.Module, Forward]], dict[str, Any], Any]] = {
    "plain": (_dense, {}, ((0, "fp32"), (1, "bf16"), (2, "fp32"))),
    "offload": (_dense, _optimizer(_CPU), ((1, "bf16"), (2, "fp32"))),
    # Which only stage 3 has.
    "partial offload": (_dense, _optimizer({**_CPU, "ratio": 0.5}), ((3, "bf16"),)),
    "host checkpoints": (_dense, _CHECKPOINTS, ((0, "fp32"), (2, "bf16"))),
    "experts": (_experts, {}, ((1, "bf16"), (2, "fp32"))),
    "sequence": (_sequence, {"sequence_parallel_size": 2}, ((1, "bf16"), (2, "fp32"))),
}


def train(name: str, stage: int, precision: str, on_device: bool) -> list[torch.Tensor]:
    make, more, _ = ENGINES[name]
    groups.reset()
    with ExitStack() as device:
        if on_device:
            few = Budget(queues=1, processors=1)
            for checked in (simulate(), check_streams(), check_budgets(few)):
                device.enter_context(checked)
        model, forward = seeded(make, seed=4)
        adam = {"type": "Adam", "params": {"lr": 1e-3}}
        config = config_of(stage, 3, ACCUMULATION, precision, optimizer=adam, **more)
        del config["gradient_clipping"]
        engine = deepspeed.initialize(model=model, config=config)[0]
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        if "activation_checkpointing" in more:
            deepspeed.checkpointing.configure(None, deepspeed_config=engine._config)
        losses = []
        for turn in range(BATCHES * ACCUMULATION):
            loss = forward(engine, dtype, turn)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        kept = [*losses, *(param.detach().float() for param in model.parameters())]
        found = [value.clone() for value in kept]
        engine.destroy()
        deepspeed.checkpointing.reset()
    return found


class TestEngines(DistributedTest):
    world_size = 2
    exec_timeout = 120

    @each(name=ENGINES)
    def test_as_on_the_host(self, name: str) -> None:
        # Kills: a wait that only long runs or the defaults' sizes need; memory let go too early
        # where a bucket is never full; an engine that was never run on a device, or hangs on one of
        # few queues or processors.
        for stage, precision in ENGINES[name][2]:
            wanted = train(name, stage, precision, on_device=False)
            found = train(name, stage, precision, on_device=True)
            for one, other in zip(found, wanted, strict=True):
                scale = other.norm() + 1e-2
                assert (one - other).norm() <= TOLERANCE[precision] * scale, (stage, precision)
