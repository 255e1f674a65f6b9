"""Short trainings whose parameters are gathered beside a forward and read in all ways heard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from unit.models import config_of, drawn, seeded
from unit.verify.guards import watched

WIDTH = 16
LAYERS = 4
ROWS = 2
STEPS = 3


class Unheard(nn.Module):
    """A layer of an extension's kernel: no function of torch's sees the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        with torch._C.DisableTorchFunctionSubclass():
            return x @ weight


def make_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)), Unheard())


def make_engine(dtype: str = "fp32", offload: bool = False, stage: int = 2, **zero: Any) -> Any:
    """One layer per bucket."""
    zero = {"reduce_bucket_size": WIDTH * WIDTH, "overlap_param_gather": True, **zero}
    precision, _, accumulate_in = dtype.partition("+")
    more: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    if accumulate_in:
        more["data_types"] = {"grad_accum_dtype": accumulate_in}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = config_of(stage, ROWS, 1, precision, zero_optimization=zero, **more)
    return deepspeed.initialize(model=seeded(make_model, seed=7), config=config)[0]


def train(engine: Any, steps: int = STEPS) -> None:
    for number in range(steps):
        x = drawn(10 * number + dist.get_rank(), ROWS, WIDTH).to(engine.device, engine.model_dtype)
        engine.backward(engine(x).float().square().mean())
        engine.step()


def in_modules(engine: Any) -> None:
    """Read by nobody else."""


def kept(engine: Any) -> None:
    """A parameter that the script has kept, of the last layer."""
    engine.kept.mul(2)


def on_two_streams(engine: Any) -> None:
    """By the current stream, and then by another that has not waited."""
    accelerator = get_accelerator()
    current, side = accelerator.current_stream(), accelerator.Stream()
    engine.kept.mul(2)
    with accelerator.stream(side):
        engine.kept.mul(2)
    current.wait_stream(side)


def checker(read: Callable[[Any], None], **settings: Any) -> list[str]:
    """What the stream checker finds when parameters are read right after each step."""
    with watched(in_pieces=False) as found:
        deepspeed.init_distributed(dist_backend="gloo")
        engine = make_engine(**settings)
        engine.kept = list(engine.module.parameters())[-1]
        for _ in range(STEPS):
            train(engine, 1)
            with torch.no_grad():
                read(engine)
        get_accelerator().synchronize()
        engine.destroy()
    return found


_OFFLOADED = {"dtype": "bf16", "offload": True}
SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "streams: gathered beside forward": partial(checker, in_modules),
    "streams: gathered beside forward, bf16": partial(checker, in_modules, dtype="bf16", stage=1),
    "streams: gathered beside forward, offload": partial(checker, in_modules, **_OFFLOADED),
    "streams: gathered beside forward, read elsewhere": partial(checker, kept),
    "streams: gathered beside forward, two streams": partial(checker, on_two_streams),
}
