"""A few real steps of ZeRO on whatever ranks there are; rank 0 saves the weights."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

import deepspeed

GLOBAL_BATCH = 12
STEPS = 4
LEARNING_RATE = 0.01
FAILURE_CODE = 13


def make_model() -> torch.nn.Module:
    """The model, from torch's current random state."""
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def batches() -> Iterator[torch.Tensor]:
    """Global batches without end: (samples, 8 inputs and 4 targets)."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(GLOBAL_BATCH, 12, generator=generator)


def loss_of(model: Any, data: torch.Tensor) -> torch.Tensor:
    """The error of a model, or of its engine, on a batch."""
    return torch.nn.functional.mse_loss(model(data[:, :8]), data[:, 8:])


def fail(rank: int) -> None:
    """Raise, and end with a code that no launcher gives by itself."""
    sys.excepthook = lambda *info: (
        sys.__excepthook__(*info),
        sys.stderr.flush(),
        os._exit(FAILURE_CODE),
    )
    raise ValueError(f"rank {rank} fails on purpose")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--save", required=True)
    parser.add_argument("--fail_rank", type=int, default=-1, help="raises after two steps")
    parser.add_argument("--stay", action="store_true", help="train on for ever")
    parser.add_argument("text", nargs="*", help="printed by each rank")
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = make_model()
    adam = {"type": "Adam", "params": {"lr": LEARNING_RATE}}
    config = {"train_batch_size": GLOBAL_BATCH, "optimizer": adam}
    config["zero_optimization"] = {"stage": 1}
    params = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    share = GLOBAL_BATCH // world
    place = (os.uname().nodename, os.environ["CROSS_RANK"], os.environ["LOCAL_RANK"])
    print("starts", rank, *place, args.text, flush=True)
    step, data_of_all = 0, batches()
    while step < STEPS or args.stay:
        data = next(data_of_all)[rank * share : (rank + 1) * share]
        engine.backward(loss_of(engine, data))
        engine.step()
        step += 1
        if step == 2:
            print("two steps", rank, flush=True)
            if rank == args.fail_rank:
                fail(rank)
        if args.stay:
            time.sleep(0.05)
    if rank == 0:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
