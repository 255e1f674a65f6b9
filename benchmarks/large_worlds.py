"""Host time of one rank of thousands: building the engine, and one step of ZeRO.

    python benchmarks/large_worlds.py
    python benchmarks/large_worlds.py --worlds 8 4096 --stage 1 --steps 50
    python benchmarks/large_worlds.py --worlds 8 4096 --stage 3

One process is rank 0 of a process group of torch's that only pretends (`fake`). Collectives are
counted and left out (the pretended ones copy a piece for every rank), so what is measured is what
the package does on the host. The model is small,
and its buckets too, so that there are as many collectives as in a large one. Worlds take turns,
each in a process of its own with one thread, for several rounds; reported is the fastest, in
processor time.

At stage 3 the model is built under `zero.Init`, nothing stays whole, every block is a unit, and is
gathered anew for backward.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn


class Issued:
    """Remembers collectives, and carries none out."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def run(self, call: Any, proceed: Any) -> Any:
        """Called for every operation."""
        self.names.append(call.name)
        if call.name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
            # What was allocated may hold anything; not finite, no step would be taken.
            for tensor in call.writes:
                tensor.zero_()
        return self if call.async_op else None

    def wait(self) -> None:
        """A handle's."""


def measure(world: int, stage: int, blocks: int, width: int, buckets: int, steps: int) -> Any:
    """Of this process as rank 0 of `world`: milliseconds to build and per step, and the collectives
    of a step.
    """
    import torch.distributed as torch_dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import deepspeed
    from deepspeed.comm.watch.observation import add_observer

    torch_dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    issued = Issued()
    add_observer(issued)
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def built() -> nn.Module:
        layers = (nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0) for _ in range(blocks))
        return nn.Sequential(*layers)

    numel = sum(param.numel() for param in built().parameters())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": numel // buckets},
    }
    if stage == 3:
        config["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_unit_fusion_size": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 2 * numel // blocks,
        }
    model = None if stage == 3 else built()
    start = time.process_time()
    if model is None:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = built()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    building = time.process_time() - start
    inputs = torch.randn(2, 1, width, dtype=torch.bfloat16)

    def step() -> None:
        engine.backward(engine(inputs).float().square().mean())
        engine.step()

    step()
    issued.names.clear()
    step()
    counts = {name: issued.names.count(name) for name in sorted(set(issued.names))}
    times = []
    for _ in range(steps):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return {"build": 1e3 * building, "step": 1e3 * min(times), "counts": counts}


def main() -> None:
    """Measure every world in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3])
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--buckets", type=int, default=14)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = (arguments.stage, arguments.blocks, arguments.width, arguments.buckets, arguments.steps)
    if arguments.one is not None:
        print("RESULT " + json.dumps(measure(arguments.one, *sizes)))
        return
    found: dict[int, list[Any]] = {world: [] for world in arguments.worlds}
    for _ in range(arguments.rounds):
        for world, results in found.items():
            command = [sys.executable, *sys.argv, "--one", str(world)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                sys.exit(f"world of {world}: {run.stderr[-2000:]}")
            results.append(json.loads(lines[0].removeprefix("RESULT ")))
    first = min(result["step"] for result in found[arguments.worlds[0]])
    print("| ranks | building, ms | step, ms | of the first | collectives of a step |")
    print("|---|---|---|---|---|")
    for world, results in found.items():
        build, step = (min(result[key] for result in results) for key in ("build", "step"))
        counts = ", ".join(f"{count} {name}" for name, count in results[0]["counts"].items())
        print(f"| {world:,} | {build:.0f} | {step:.1f} | {step / first:.2f} | {counts} |")


if __name__ == "__main__":
    main()
