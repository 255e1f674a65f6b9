"""Training that survives lost processes and nodes: the batch stays the same while the number of
ranks changes.

    deepspeed --num_gpus 2 --elastic_training examples/elastic_train.py --checkpoints /tmp/elastic

On several nodes, run on each of them:

    deepspeed --elastic_training --min_elastic_nodes 1 --max_elastic_nodes 4 --master_addr NODE
    --master_port 29500 \
        examples/elastic_train.py --checkpoints /shared/elastic

Every start, the first one and those after a failure, does the same: load the latest checkpoint if
there is one, and go on. Samples follow from the step alone, so that each is seen once, however many
ranks share a batch.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch

import deepspeed

CONFIG = {
    "elasticity": {
        "enabled": True,
        "max_train_batch_size": 48,
        "micro_batch_sizes": [2, 4],
        "min_gpus": 1,
        "max_gpus": 8,
        "version": 0.1,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 1},
}


def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample number `index` of an endless data set."""
    generator = torch.Generator().manual_seed(index)
    inputs = torch.randn(8, generator=generator)
    return inputs, inputs.sum().reshape(1)


def micro_batches(engine: deepspeed.DeepSpeedEngine) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro-batches of the present step."""
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    first = engine.global_steps * engine.train_batch_size()
    mine = [
        sample(index) for index in range(first + rank, first + engine.train_batch_size(), ranks)
    ]
    size = engine.train_micro_batch_size_per_gpu()
    parts = [mine[start : start + size] for start in range(0, len(mine), size)]
    return [
        (torch.stack([x for x, _ in part]), torch.stack([y for _, y in part])) for part in parts
    ]


def step(engine: deepspeed.DeepSpeedEngine) -> float:
    """Train on one batch; the mean loss over this rank's share."""
    losses = []
    for inputs, targets in micro_batches(engine):
        loss = torch.nn.functional.mse_loss(
            engine(inputs.to(engine.device)), targets.to(engine.device)
        )
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def record(folder: Path, **entry: object) -> None:
    """Append one line to the log; by rank 0 only."""
    if deepspeed.comm.get_rank() == 0:
        with open(folder / "log.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")


def wait_while(path: Path) -> None:
    """Wait until a file is gone, so that a test can do something at a known step."""
    while path.exists():
        time.sleep(0.02)


def main() -> None:
    """Train to --steps, through any number of restarts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=int(os.environ.get("STEPS", "8")))
    args = parser.parse_args()
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    engine, *_ = deepspeed.initialize(
        model=model, config=CONFIG, model_parameters=model.parameters()
    )
    if (args.checkpoints / "latest").exists():
        engine.load_checkpoint(str(args.checkpoints))
    world = deepspeed.comm.get_world_size()
    record(
        args.checkpoints, start=engine.global_steps, world=world, batch=engine.train_batch_size()
    )
    while engine.global_steps < args.steps:
        wait_while(args.checkpoints / f"hold{engine.global_steps}")
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        here = f"{engine.global_steps}:{os.environ['RANK']}:{restarts}"
        if os.environ.get("FAIL_AT") == here:
            os.kill(os.getpid(), 9)
        loss = step(engine)
        engine.save_checkpoint(str(args.checkpoints))
        record(args.checkpoints, step=engine.global_steps, world=world, loss=loss)
    deepspeed.comm.barrier()
    if deepspeed.comm.get_rank() == 0:
        torch.save(engine.module.state_dict(), args.checkpoints / "weights.pt")


if __name__ == "__main__":
    main()
