"""Which bits systems come to on other numbers of ranks: a GPT is trained on the same micro-batches
by one, two, three and four ranks, and its parameters are hashed.

Micro-batch t of rank r has number t * N + r. The order of sums is each system's own; everything
else is equal. This file is also what each rank runs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turns import UPSTREAM_PREFIX, free_port

MICRO_BATCHES, OF_EACH, CLIP, LEARNING_RATE = 12, 4, 0.5, 1e-3
OURS = [f"zero{stage}" for stage in range(4)]
UPSTREAMS = [UPSTREAM_PREFIX + name for name in OURS]
SYSTEMS = [*(f"{name}-bits" for name in OURS), *OURS, *UPSTREAMS, "ddp", "fsdp2"]
WORLDS = (1, 2, 3, 4)


def train(system: str, steps: int) -> str:
    """Train on this rank; returns the SHA-256 of the parameters by name, in fp32."""
    import torch
    import torch.distributed as dist
    from systems import GPT, GPTConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=64, heads=2, context=32))
    if system in ("ddp", "fsdp2"):
        dist.init_process_group("gloo")
        step = _of_torch(system, model)
    else:
        step = _of_deepspeed(system, model)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for number in range(steps):
        draw = torch.Generator().manual_seed(number)
        tokens = torch.randint(256, (MICRO_BATCHES, OF_EACH, 33), generator=draw)
        step(tokens[rank::num_ranks])
    digest = hashlib.sha256()
    for name, value in _whole(system, model):
        digest.update(name.encode() + value.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _of_deepspeed(system: str, model: Any) -> Any:
    import torch
    import torch.distributed as dist

    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    accumulation = MICRO_BATCHES // dist.get_world_size()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": OF_EACH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": int(system.split("zero")[1][0])},
        "zero_allow_untested_optimizer": True,
    }
    if system.endswith("-bits"):
        config["reproducibility"] = {"world_size_invariant": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(batches: Any) -> None:
        for tokens in batches:
            engine.backward(engine(tokens))
            engine.step()

    return step


def _of_torch(system: str, model: Any) -> Any:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if system == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        runs = fully_shard(model)
    else:
        runs = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(batches: Any) -> None:
        for number, tokens in enumerate(batches):
            is_last = number == len(batches) - 1
            if system == "fsdp2":
                runs.set_requires_gradient_sync(is_last)
            else:
                runs.require_backward_grad_sync = is_last
            (runs(tokens) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _whole(system: str, model: Any) -> Iterator[tuple[str, Any]]:
    for name, param in model.named_parameters():
        if hasattr(param, "full_tensor"):
            yield name, param.full_tensor()
        elif "zero3" in system:
            import deepspeed

            with deepspeed.zero.GatheredParameters([param]):
                yield name, param.data.clone()
        else:
            yield name, param


def digest_on(system: str, num_ranks: int, steps: int, python: str) -> str:
    """Start ranks, and return what all of them say; RuntimeError if one fails."""
    port, words = free_port(), [__file__, "--rank-of", system, "--steps", str(steps)]
    path = "" if system.startswith(UPSTREAM_PREFIX) else str(Path(__file__).resolve().parents[1])
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    own |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
    with tempfile.TemporaryFile("w+") as output:
        processes = [
            subprocess.Popen(
                [python, *words],
                env={**os.environ, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=output,
                cwd=tempfile.gettempdir(),  # the checkout's deepspeed must not shadow upstream's
            )
            for rank in range(num_ranks)
        ]
        try:
            codes: list[int | None] = [None]
            while None in codes and not any(codes):  # if one fails the others would wait for it
                time.sleep(0.1)
                codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output.seek(0)
        said = output.read()
    found = {line.split()[1] for line in said.splitlines() if line.startswith("digest ")}
    if any(codes) or len(found) != 1:
        raise RuntimeError(f"{system} on {num_ranks} ranks: {said[-2000:]}")
    return found.pop()


def main() -> None:
    """Print a table of digests' first digits: a row for each system, a column for each world."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="default: %(default)s")
    parser.add_argument("--upstream-python", help="interpreter that has upstream's deepspeed")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        print("digest", train(arguments.rank_of, arguments.steps), flush=True)
        return
    print("| system |", " | ".join(f"{count} ranks" for count in WORLDS), "| digests |")
    print("|---|" + "---|" * len(WORLDS) + "---:|")
    for system in arguments.systems.split(","):
        python = sys.executable
        if system.startswith(UPSTREAM_PREFIX):
            if arguments.upstream_python is None:
                continue
            python = arguments.upstream_python
        found = [digest_on(system, count, arguments.steps, python)[:8] for count in WORLDS]
        print(f"| {system} |", " | ".join(found), f"| {len(set(found))} |", flush=True)


if __name__ == "__main__":
    main()
