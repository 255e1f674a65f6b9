"""How much of the time that files take is hidden behind computing, with parameters and optimizer
state in files: per phase of a step, and a picture.

    OMP_NUM_THREADS=1 python benchmarks/offload_overlap.py --folder FOLDER [--picture overlap.svg]

A transfer counts from when a thread begins to move its bytes until they are moved; of that, what
the training thread waits is not hidden. Several transfers at once count once. More `--rows` make
forward and backward longer, and the files' part the same.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from offload_memory import Unit, config_of
from torch import nn

import deepspeed
from deepspeed.ops.aio.engines import NativeEngine, PythonEngine, Transfer
from deepspeed.ops.aio.handle import AsyncIOHandle
from deepspeed.ops.early_update import SpeculativeUpdate
from deepspeed.utils.reports import pyplot

Span = tuple[float, float]
PHASES = ("forward", "backward", "step", "train_batch")


class Spans:
    """Beginnings and ends, in seconds, by what it was."""

    def __init__(self) -> None:
        self.of: dict[str, list[Span]] = {}
        self.moved_bytes = 0

    def timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.of.setdefault(name, []).append((begin, time.perf_counter()))

    def watch_files(self) -> None:
        """Time all transfers and all waits for them from now on."""
        for engine in (NativeEngine, PythonEngine):
            run = engine.run

            def moved(engine: Any, transfer: Transfer, how: Any, run: Any = run) -> Any:
                kind = "write" if transfer.is_write else "read"
                self.moved_bytes += transfer.num_bytes
                return self.timed(kind, run, engine, transfer, how)

            engine.run = moved  # type: ignore[method-assign]  # that is the point
        for owner, name in ((AsyncIOHandle, "wait"), (SpeculativeUpdate, "_halt")):
            setattr(owner, name, self._waiting(getattr(owner, name)))

    def _waiting(self, wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Time a method that waits, unless it is the thread of updates ahead that does."""

        def waited(own: Any) -> Any:
            is_beside = threading.current_thread().name.startswith("speculative update")
            return self.timed("wait beside" if is_beside else "wait", wait, own)

        return waited


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge what overlaps."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def common(some: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """What lies in both; each is merged."""
    both = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return [(begin, end) for begin, end in both if begin < end]


def seconds(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def train(options: argparse.Namespace, spans: Spans) -> None:
    config = config_of(options.folder, 8 * options.width**2)
    config["train_micro_batch_size_per_gpu"] = options.rows
    config["gradient_accumulation_steps"] = options.accumulation
    config["gradient_clipping"] = 0.0  # a clipped step updates nothing ahead
    offload = config["zero_optimization"]["offload_optimizer"]
    offload = {**offload, "speculative_update": options.ahead}
    config["zero_optimization"]["offload_optimizer"] = offload
    if options.fp32:
        del config["bf16"], config["data_types"]
    with deepspeed.zero.Init(remote_device="nvme", config_dict_or_path=config):
        model = nn.Sequential(*(Unit(options.width) for _ in range(options.units)))
    params = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    begins = torch.Generator().manual_seed(1)

    def batch() -> torch.Tensor:
        return torch.randn(options.rows, options.width, generator=begins).to(engine.model_dtype)

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - 1.0).float().pow(2).mean()  # type: ignore[no-any-return]  # a tensor's

    for step in range(options.warmup + options.steps):
        if step == options.warmup:
            spans.watch_files()
        timed = spans.timed if step >= options.warmup else lambda _, call, *args: call(*args)
        batches = [batch() for _ in range(options.accumulation)]
        if options.vertical:
            timed("train_batch", engine.train_batch, iter(batches), loss_of)
            continue
        for x in batches:
            loss = timed("forward", loss_of, engine, x)
            timed("backward", engine.backward, loss)
            timed("step", engine.step)
    engine.destroy()


def draw(path: Path, spans: Spans) -> None:
    """The last micro-batch and step: phases, waits, reads and writes, one line each."""
    rows = [name for name in (*PHASES, "wait", "read", "write") if name in spans.of]
    first, last = spans.of[rows[0]][-1][0], spans.of[rows[-4]][-1][1]
    figure, axes = pyplot().subplots(figsize=(12, 3), layout="constrained")
    for number, name in enumerate(rows):
        late = [(begin - first, end - begin) for begin, end in spans.of[name] if begin >= first]
        axes.broken_barh(late, (len(rows) - number - 0.8, 0.6), color=f"C{number}")
    axes.set_yticks([len(rows) - number - 0.5 for number in range(len(rows))], rows)
    axes.set_xlim(0, last - first)
    axes.set_xlabel("seconds of one step")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--vertical", action="store_true", help="by engine.train_batch")
    parser.add_argument("--ahead", action="store_true", help="with speculative_update")
    parser.add_argument("--fp32", action="store_true", help="for processors without bf16")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--picture", type=Path, help="of the last step (needs matplotlib)")
    options = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.init_distributed()
    spans = Spans()
    train(options, spans)
    files = union([*spans.of["read"], *spans.of["write"]])
    waits = union(spans.of["wait"])
    print("| phase | s | files move (s) | of that waited for (s) | hidden |")
    print("|---|---:|---:|---:|---:|")
    rows = [(name, spans.of[name]) for name in PHASES if name in spans.of]
    for name, phase in [*rows, ("all", union(sum((phase for _, phase in rows), [])))]:
        moved = common(phase, files)
        waited = common(moved, waits)
        numbers = [seconds(one) / options.steps for one in (phase, moved, waited)]
        hidden = f"{1 - numbers[2] / numbers[1]:.0%}" if numbers[1] else ""
        print(f"| {name} | {' | '.join(f'{one:.2f}' for one in numbers)} | {hidden} |")
    print(f"\n{spans.moved_bytes / options.steps / 1e9:.2f} GB to and from files per step")
    if options.picture:
        draw(options.picture, spans)


if __name__ == "__main__":
    main()
