"""Training on a Ray cluster: Ray places the workers, deepspeed trains in them.

    python examples/ray_train.py --workers 2
    python examples/ray_train.py --workers 8 --address auto --gpus 1

on a cluster that it starts on this machine, and on the one that this node belongs to.

Needs `pip install ray`. Each worker gets what the `deepspeed` command would give it: RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Prints the losses, which do not depend on the
number of workers but for rounding.
"""

import argparse
import json
import os
import socket

import ray
import torch

import deepspeed

BATCH = 16
CONFIG = {
    "train_batch_size": BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
}


@ray.remote
class Worker:
    """One rank. An actor, and not a task: its process stays the same, as a process group needs
    it.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))

    def node(self) -> str:
        """Where Ray has placed this worker."""
        return ray.get_runtime_context().get_node_id()

    def meeting_point(self) -> tuple[str, int]:
        """An address of this worker's node, and a port that was free a moment ago."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def train(
        self, local_rank: int, local_size: int, address: str, port: int, steps: int
    ) -> list[float]:
        """Train; the loss of each step, over the whole batch."""
        os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size))
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        return train(steps)


def train(steps: int) -> list[float]:
    """What every worker runs: nothing in it is Ray's."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    engine, *_ = deepspeed.initialize(
        model=model, config=CONFIG, model_parameters=model.parameters()
    )
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(BATCH, 8, generator=generator)
        mine = inputs[rank::ranks].to(engine.device)
        loss = torch.nn.functional.mse_loss(engine(mine), mine.sum(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / ranks
        deepspeed.comm.all_reduce(mean)
        losses.append(mean.item())
    deepspeed.comm.destroy_process_group()
    return losses


def places(nodes: list[str]) -> list[tuple[int, int]]:
    """(local rank, workers on the same node) of each worker, from the nodes that Ray has placed
    them on.
    """
    return [(nodes[:rank].count(node), nodes.count(node)) for rank, node in enumerate(nodes)]


def main() -> None:
    """Start the workers, train, and print the losses as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--address", default=None, help="of a cluster; default: start one here")
    parser.add_argument("--gpus", type=float, default=0, help="devices per worker")
    args = parser.parse_args()
    if args.address is None:
        ray.init(num_cpus=args.workers, include_dashboard=False)
    else:
        ray.init(address=args.address)
    workers = [
        Worker.options(num_cpus=1, num_gpus=args.gpus).remote(rank, args.workers)
        for rank in range(args.workers)
    ]
    address, port = ray.get(workers[0].meeting_point.remote())
    located = places(ray.get([worker.node.remote() for worker in workers]))
    # A worker that dies makes ray.get raise; ray.shutdown then ends the others.
    try:
        losses = ray.get(
            [
                worker.train.remote(*place, address, port, args.steps)
                for worker, place in zip(workers, located, strict=True)
            ]
        )
    finally:
        ray.shutdown()
    print(json.dumps({"workers": args.workers, "losses": losses}))


if __name__ == "__main__":
    main()
