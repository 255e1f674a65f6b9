"""A few real steps of ZeRO on whatever ranks there are; rank 0 saves the weights. Called by the tests on each node."""

import argparse
import os
import time

import torch

import deepspeed

GLOBAL_BATCH = 12
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--save", required=True)
    parser.add_argument("--fail_rank", type=int, default=-1, help="this rank raises after two steps")
    parser.add_argument("--stay", action="store_true", help="train on for ever")
    parser.add_argument("text", nargs="*", help="printed by each rank")
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(1)
    share = GLOBAL_BATCH // world
    host = os.uname().nodename
    print("starts", rank, os.getpid(), host, os.environ["CROSS_RANK"], os.environ["LOCAL_RANK"], args.text, flush=True)
    step = 0
    while step < STEPS or args.stay:
        data = torch.randn(GLOBAL_BATCH, 12, generator=generator)[rank * share : (rank + 1) * share]
        loss = torch.nn.functional.mse_loss(engine(data[:, :8]), data[:, 8:])
        engine.backward(loss)
        engine.step()
        step += 1
        if step == 2:
            print("two steps", rank, flush=True)
            if rank == args.fail_rank:
                raise ValueError(f"rank {rank} fails on purpose")
        if args.stay:
            time.sleep(0.05)
    if rank == 0:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
