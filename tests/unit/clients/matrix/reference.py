"""A model, samples, and what plain torch makes of them in one process."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import deepspeed
from unit.one_process import OneProcess

RANKS, MICRO, SAMPLES, FEATURES, LR = 2, 2, 32, 6, 0.05

Optimizers = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def layers(seed: int = 0) -> torch.nn.Sequential:
    """A small regression, the same with the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, 1))


def samples() -> TensorDataset:
    """`SAMPLES` inputs of `FEATURES` features, and a number to predict for each."""
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(7))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def samples_of(batch: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Every second sample of a batch of all ranks."""
    return samples()[batch * MICRO * RANKS + rank : (batch + 1) * MICRO * RANKS : RANKS]


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """The error of what is predicted."""
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def sgd(params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """With momentum, so that the state counts."""
    return torch.optim.SGD(params, lr=LR, momentum=0.9)


def trained(
    make: Optimizers = sgd,
    steps: int = 4,
    accumulation: int = 1,
    clip: float = 0.0,
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
    model: torch.nn.Module | None = None,
) -> list[torch.Tensor]:
    """The parameters of `layers`, or ``model``, after steps with the batches of all ranks at once,
    each of ``accumulation`` micro-batches of `MICRO` samples per rank.
    """
    model, data = model or layers(), samples()
    optimizer = make(model.parameters())
    scheduler = schedule(optimizer) if schedule else None
    alone = OneProcess(model, optimizer, loss_of, clip)
    each = accumulation * MICRO * RANKS
    for step in range(steps):
        # The mean over the batch does not ask which rank had which sample, as long as steps agree.
        places = [place % SAMPLES for place in range(step * each, (step + 1) * each)]
        alone.step([data[places]])
        if scheduler:
            scheduler.step()
    return params_of(model)


def params_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters of a model that is whole."""
    return [param.detach() for param in model.parameters()]


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of a model's parameters, gathered where they are sharded. Collective."""
    params = list(model.parameters())
    with deepspeed.zero.GatheredParameters(params):
        return [param.detach().clone() for param in params]


def assert_close(
    found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-6
) -> None:
    """Every element within ``tolerance``, in fp32."""
    assert len(found) == len(wanted)
    pairs = zip(found, wanted, strict=True)
    worst = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
    assert worst <= tolerance, f"parameters differ by {worst}"


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Every element bit by bit."""
    are_equal = len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert are_equal, "parameters are not bit-equal"
