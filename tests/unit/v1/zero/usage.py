"""A small model, engines on it, and plain torch over the whole batch, for scripts' ways."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.logging import _log_dist_once, logger
from unit import models
from unit.models import drawn, seeded
from unit.one_process import OneProcess, go_through

LR = 0.1
STAGES = (0, 1, 2)
ROWS = 4
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16+fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
}
# fp32: summation order. Half precision: a few roundings of the gradient (1/256 for bf16), times the
# learning rate.
TOLERANCE = {"fp32": 2e-6, "bf16": 5e-3, "bf16+fp32": 5e-3, "fp16": 1e-3}
Params = dict[str, torch.Tensor]


class Net(nn.Module):
    """Small, with odd sizes; returns `[rows, 3]`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh())


def make_net(seed: int = 3, cls: type[nn.Module] = Net) -> Any:
    return seeded(cls, seed=seed)


def config_of(
    stage: int,
    accumulation: int = 1,
    precision: str = "fp32",
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Many small buckets and overlap, where ordering mistakes show; at stage 3 all is sharded."""
    sharded = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    zero = {"reduce_bucket_size": 20, "overlap_comm": True, **sharded, **(zero or {})}
    keys = {**PRECISIONS[precision], **more}
    return models.config_of(stage, ROWS, accumulation, zero_optimization=zero, **keys)


def make_engine(
    stage: int,
    accumulation: int = 1,
    precision: str = "fp32",
    model: nn.Module | None = None,
    **more: Any,
) -> Any:
    model = make_net() if model is None else model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    config = config_of(stage, accumulation, precision, **more)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class Warnings(logging.Handler):
    """Texts of the warnings that are logged meanwhile, those too that were said before."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def about(self, words: str) -> list[str]:
        """Those that have these words."""
        return [text for text in self.texts if words in text]

    def __enter__(self) -> Warnings:
        _log_dist_once.cache_clear()
        logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logger.removeHandler(self)


class Reports(Warnings):
    """Those that have certain words; other ranks can wait for the first. All ranks make theirs.

    Attributes:
        since: When there was one, by `time.monotonic`.
    """

    _numbers = itertools.count()

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words, self.since = words, float("inf")
        self._key = f"reports/{next(self._numbers)}"

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if self() and self.since == float("inf"):
            self.since = time.monotonic()
            dist.get_store().set(f"{self._key}/{dist.get_rank()}", "")

    def __call__(self) -> list[str]:
        return self.about(self.words)

    def await_others(self, seconds: float) -> None:
        """Return when each other rank has one."""
        others = set(range(dist.get_world_size())) - {dist.get_rank()}
        dist.get_store().wait(
            [f"{self._key}/{rank}" for rank in others], timedelta(seconds=seconds)
        )


def data(index: int, rank: int | None = None) -> torch.Tensor:
    """Input of a micro-batch of a rank: different for each."""
    return drawn(1000 * index + (dist.get_rank() if rank is None else rank), ROWS, 5)


def inputs(engine: Any, index: int) -> torch.Tensor:
    return data(index).to(engine.model_dtype)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def loss_at(engine: Any, index: int) -> torch.Tensor:
    """Of this rank's micro-batch."""
    return loss_of(engine(inputs(engine, index)))


def train(engine: Any, indices: Iterable[int], plain: bool = False) -> None:
    """Go through micro-batches of these numbers."""
    go_through(engine, indices, loss_at, plain)


def windows_of(accumulation: int, steps: int = 2) -> list[list[int]]:
    """The micro-batches of each step."""
    return [[step * accumulation + i for i in range(accumulation)] for step in range(steps)]


def reference_params(
    windows: Iterable[Iterable[int]],
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    model: nn.Module | None = None,
) -> Params:
    """Plain torch over all ranks' data; one list of micro-batch indices per optimizer step.
    ``loss`` is given a micro-batch's input. Without it and ``model`` they are trained once.
    """
    if loss is None and model is None:
        return _params_of_net(tuple(map(tuple, windows)), 3)
    loss = loss or (lambda net, x: loss_of(net(x)))
    one = OneProcess(make_net() if model is None else model, LR, loss)
    for indices in windows:
        one.step(data(index, rank) for index in indices for rank in range(dist.get_world_size()))
    return one.params()


@functools.cache
def _params_of_net(windows: tuple[tuple[int, ...], ...], seed: int) -> Params:
    return reference_params(windows, model=make_net(seed))


def assert_close(engine: Any, wanted: Params, tolerance: float = TOLERANCE["fp32"]) -> None:
    """fp32 parameters of the engine, relative to their norm."""
    for name, param in engine.module.named_parameters():
        found = safe_get_full_fp32_param(param)
        error = ((found - wanted[name]).norm() / wanted[name].norm()).item()
        if not error <= tolerance:
            raise AssertionError(f"{name} is off by {error:.2e} (allowed {tolerance:.0e})")


def check(
    engine: Any, windows: Iterable[Iterable[int]], precision: str = "fp32", seed: int = 3
) -> None:
    """The engine has trained the net of this seed as plain torch does."""
    assert_close(engine, _params_of_net(tuple(map(tuple, windows)), seed), TOLERANCE[precision])


def params_of(engine: Any) -> Params:
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}
