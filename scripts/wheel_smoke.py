"""Train a few steps with an installed deepspeed and check that the loss falls; CI runs this against
the wheel.

Run it through a launcher: `deepspeed --num_gpus 2 scripts/wheel_smoke.py`.
"""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

import torch

import deepspeed

NUM_STEPS = 8


def main() -> int:
    """Return 0 if the package is the installed one and trains, 1 otherwise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.parse_args()
    if deepspeed.__version__ != version("deepspeed"):
        print(
            f"deepspeed says {deepspeed.__version__}, its metadata {version('deepspeed')}",
            file=sys.stderr,
        )
        return 1
    if (
        Path(deepspeed.__file__)
        .resolve()
        .is_relative_to(Path(__file__).resolve().parent.parent / "deepspeed")
    ):
        print(f"deepspeed comes from the checkout: {deepspeed.__file__}", file=sys.stderr)
        return 1

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    inputs = torch.randn(4, 8, device=engine.device)
    losses = []
    for _ in range(NUM_STEPS):
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    print(f"deepspeed {deepspeed.__version__}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
