"""What a step pays for noticing writes into the model: many tiny layers, where it shows most.

    torchrun --nproc-per-node 2 benchmarks/model_writes.py --stage 2 --precision bf16

The check is timed inside the steps that it is a part of, so step and check have the same load.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist

LAYERS, WIDTH, WARMUP = 400, 4, 20


class Stopwatch:
    """The time spent in some calls since it was last read."""

    def __init__(self) -> None:
        self.spent = 0.0

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.spent += time.perf_counter() - began

    def read(self) -> float:
        spent, self.spent = self.spent, 0.0
        return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    is_half = arguments.precision == "bf16"
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": is_half},
        "zero_optimization": {"stage": arguments.stage},
    }
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    engine, *_ = deepspeed.initialize(model=model, config=config)
    writes, watch = engine._sequence.masters.writes, Stopwatch()
    for name in ("take_in", "keep"):
        setattr(writes, name, partial(watch.call, getattr(writes, name)))
    batch = torch.randn(4, WIDTH, dtype=engine.model_dtype)
    steps, shares = [], []
    for _ in range(arguments.steps + WARMUP):
        began = time.perf_counter()
        engine.backward(engine(batch).float().square().mean())
        engine.step()
        steps.append(time.perf_counter() - began)
        shares.append(watch.read() / steps[-1])
    if dist.get_rank() == 0:
        step, share = (statistics.median(values[WARMUP:]) for values in (steps, shares))
        print(f"step {1e3 * step:.1f} ms, check {1e6 * step * share:.0f} us, {100 * share:.2f} %")


if __name__ == "__main__":
    main()
