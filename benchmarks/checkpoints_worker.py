"""One rank of one system of `checkpoints.py`: an engine that saves and loads, and copies the same
files, when told to.

Protocol: one JSON line on stdout when ready; then for each line on stdin one JSON line with what
the command of that name returns; end of input ends the process. While it waits it uses no processor
time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from serving import start_distributed, take_stdout

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.checkpointing.background_save import in_flight

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, GPTConfig  # noqa: E402  the path above is where it lies
from train_gpt import engine_config, parse_arguments, train_step  # noqa: E402

READ_BYTES = 16 << 20
COPY = "copy"  # folder of the plain copy, beside the tags
TAG = "saved"


class Worker:
    """What one rank does.

    Args:
        folder: Where checkpoints go.
        layers, width: Size of the GPT; None is the demo's, with its batches.
        checkpoint: The `checkpoint` block.
    """

    def __init__(
        self, folder: str, layers: int | None, width: int | None, checkpoint: dict[str, Any]
    ) -> None:
        demo = parse_arguments([])
        if layers is not None and width is not None:
            demo.layers, demo.width, demo.micro_batch, demo.context = layers, width, 1, 16
        torch.manual_seed(0)
        model = GPT(
            GPTConfig(demo.layers, demo.width, demo.width // 32, demo.context, wide_products=True)
        )
        config = {
            **engine_config(demo, total_steps=10**6),
            "checkpoint": checkpoint,
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        self.folder = folder
        self.batches = self._batches(demo.micro_batch, demo.context)

    @staticmethod
    def _batches(rows: int, context: int) -> Any:
        generator = torch.Generator().manual_seed(dist.get_rank())
        batch = torch.randint(256, (rows, context + 1), generator=generator)
        while True:
            yield batch

    def steps(self, count: str) -> list[float]:
        """Seconds until the end of each of `count` steps."""
        start, ends = time.perf_counter(), []
        for _ in range(int(count)):
            train_step(self.engine, self.batches)
            ends.append(time.perf_counter() - start)
        return ends

    def save_beside(self) -> dict[str, Any]:
        """Save in the background: seconds until the call returned, and until the end of each step
        until the checkpoint is there.
        """
        # A run gives each checkpoint a name of its own, so saving replaces none.
        if dist.get_rank() == 0:
            shutil.rmtree(Path(self.folder, TAG), ignore_errors=True)
        dist.barrier()
        start, ends = time.perf_counter(), []
        self.engine.save_checkpoint(self.folder, tag=TAG)
        held = time.perf_counter() - start
        while in_flight:  # all ranks forget a save at the same step
            train_step(self.engine, self.batches)
            ends.append(time.perf_counter() - start)
        return {"held": held, "ends": ends}

    def bandwidth(self) -> dict[str, float]:
        """Seconds of saving, loading and plain copies of this rank's share, and bytes of the whole
        folder.
        """
        found = {"save": together(lambda: self.engine.save_checkpoint(self.folder, tag=TAG))}
        tag = Path(self.folder, TAG)
        files = sorted(
            (path for path in tag.rglob("*") if path.is_file()),
            key=lambda path: -path.stat().st_size,
        )
        share = files[dist.get_rank() :: dist.get_world_size()]
        found["bytes"] = sum(path.stat().st_size for path in files)
        target = Path(self.folder, COPY)
        target.mkdir(exist_ok=True)
        self.read(share)  # into the page cache, past which the fast writer wrote
        found["copy"] = together(lambda: [copy(path, target / path.name) for path in share])
        found["read"] = together(lambda: self.read(share))
        for level in ("full", "off"):
            self.engine._config.tree.checkpoint.verify = level
            found[f"load {level}"] = together(
                lambda: self.engine.load_checkpoint(self.folder, tag=TAG)
            )
        for path in share:
            (target / path.name).unlink()
        dist.barrier()
        return found

    @staticmethod
    def read(paths: list[Path]) -> None:
        """Copy files into memory, which is new for each as it is for who loads."""
        for path in paths:
            memory = memoryview(torch.empty(path.stat().st_size, dtype=torch.uint8).numpy())
            with path.open("rb", buffering=0) as file:
                done = 0
                while count := file.readinto(memory[done : done + READ_BYTES]):
                    done += count


def timed(action: Callable[[], Any]) -> float:
    """Seconds that `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def together(action: Callable[[], Any]) -> float:
    """Seconds until `action` has returned on all ranks, which begin together."""
    gc.collect()
    dist.barrier()

    def on_all() -> None:
        action()
        dist.barrier()

    return timed(on_all)


def copy(source: Path, target: Path) -> None:
    """A plain copy, flushed to disk."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def main() -> None:
    """Build the engine and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True, help="JSON of Worker's arguments")
    arguments = parser.parse_args()
    protocol = take_stdout()
    torch.set_num_threads(1)
    versions = start_distributed(with_deepspeed=True)
    worker = Worker(**json.loads(arguments.system))
    worker.steps("2")
    print(json.dumps(versions), file=protocol, flush=True)
    for line in sys.stdin:
        name, *values = line.split()
        dist.barrier()
        print(json.dumps(getattr(worker, name)(*values)), file=protocol, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
