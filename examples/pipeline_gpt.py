"""Train the small byte-level GPT as a pipeline; each process holds some of its layers.

    deepspeed --num_gpus 2 examples/pipeline_gpt.py
    deepspeed --num_gpus 4 examples/pipeline_gpt.py --stages 2 --schedule zero_bubble

Shows the model as a list of layers, where each rank is, the schedule, training and evaluation. For
the first steps every process also trains the whole model by itself in plain torch, and losses,
gradient norms and weights of both are compared. The configuration is pipeline_config.json, the
blocks are those of gpt.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpt import NUM_BYTES, Block, GPTConfig, Linear, initialize, rotations
from one_process import OneProcess, Step, random_windows, verdict
from text_data import Windows, load_text
from torch import nn
from torch.nn import functional as F

import deepspeed
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.schedule import make_schedule
from deepspeed.runtime.pipe.schedule_text import render_grid, render_summary
from deepspeed.runtime.pipe.simulator import simulate

SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
CHUNKS_OF_INTERLEAVED = 2
MICRO_BATCHES_SHOWN = 8
VALIDATION_SEED = 10**9


# The model: a layer gets the one value that the layer before returned.


class ByteLayer(nn.Embedding):
    """Bytes [batch, positions] -> features [batch, positions, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(NUM_BYTES, config.width)
        self.apply(initialize)


class BlockLayer(nn.Module):
    """A block of gpt.py that makes its angles itself, since they would travel between stages
    otherwise.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.features = config.width // config.heads
        self.block = Block(config)
        self.apply(initialize)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x [batch, positions, width]
        return self.block(x, rotations(x.shape[1], self.features, x.device))


class ScoreLayer(nn.Module):
    """Features [batch, positions, width] -> fp32 scores of the next byte [batch, positions, 256],
    all equal at first.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.head = Linear(config.width, NUM_BYTES, config.wide_products)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x)).float()


def layer_specs(config: GPTConfig) -> list[LayerSpec]:
    """The model; nothing is built yet."""
    blocks = [LayerSpec(BlockLayer, config) for _ in range(config.layers)]
    return [LayerSpec(ByteLayer, config), *blocks, LayerSpec(ScoreLayer, config)]


def loss_of_scores(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats per byte."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def whole_model(specs: list[LayerSpec], seed: int) -> nn.Sequential:
    """All layers in this process, with the weights that `PipelineModule(seed_layers=True,
    base_seed=seed)` gives to its stages.
    """
    layers = []
    for index, spec in enumerate(specs):
        torch.manual_seed(seed + index)
        layers.append(spec.build())
    return nn.Sequential(*layers)


# The data: first and last stage draw the same micro-batches, the first takes the inputs, the last
# the targets.


class Data:
    """Micro-batches of random windows, known by their number: nothing has to be sent for all to
    agree on them.
    """

    def __init__(
        self, windows: Windows, size: int, num_micro_batches: int, num_replicas: int
    ) -> None:
        self.windows = windows
        self.size = size
        self.num_micro_batches = num_micro_batches
        self.num_replicas = num_replicas

    def of_replica(self, step: int, replica: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One batch's micro-batches of one data-parallel replica, as (bytes, next bytes), each
        [size, context].
        """
        for number in range(self.num_micro_batches):
            seed = (step * self.num_replicas + replica) * self.num_micro_batches + number
            text = random_windows(self.windows, self.size, seed)
            yield text[:, :-1], text[:, 1:]

    def of_all(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The whole batch."""
        for replica in range(self.num_replicas):
            yield from self.of_replica(step, replica)


# Training.


def train_step(engine: deepspeed.PipelineEngine, data: Data, step: int) -> Step:
    """One optimizer step of the pipeline. The loss is the same on all ranks, and so is the norm."""
    loss = engine.train_batch(data_iter=data.of_replica(step, engine.grid.get_data_parallel_rank()))
    return Step(loss.item(), float(engine.get_global_grad_norm() or 0.0))


def check(engine: deepspeed.PipelineEngine, alone: OneProcess, data: Data, steps: int) -> float:
    """Train the pipeline and one process side by side; returns the largest relative difference, the
    same on all ranks.
    """

    def loss_alone(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = (each.to(engine.device) for each in batch)
        return loss_of_scores(alone.model(inputs), targets)

    largest = 0.0
    say("step     loss: pipeline   one process     gradient norm: pipeline   one process")
    for step in range(steps):
        ours, theirs = train_step(engine, data, step), alone.step(data.of_all(step), loss_alone)
        say(
            f"{step + 1:4}  {ours.loss:18.6f} {theirs.loss:13.6f} {ours.grad_norm:27.6f} "
            f"{theirs.grad_norm:13.6f}"
        )
        largest = max(largest, ours.difference(theirs))
    # Each rank compares the layers that it holds.
    worst = torch.tensor(
        max(largest, alone.difference(dict(engine.module.named_parameters()))), device=engine.device
    )
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def validate(engine: deepspeed.PipelineEngine, data: Data) -> float:
    """Mean loss over one batch of the validation text."""
    replica = engine.grid.get_data_parallel_rank()
    return engine.eval_batch(data.of_replica(VALIDATION_SEED, replica)).item()


# What is shown.


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def show_places(module: PipelineModule, schedule: str, micro_batches: int) -> None:
    """Where each rank is, what it holds, and who computes when."""
    say(f"{module.grid.describe()}\n\n{module.extra_repr()}\n")
    stages = range(module.num_stages)
    shown = min(micro_batches, MICRO_BATCHES_SHOWN)
    schedules = [
        make_schedule(schedule, shown, len(stages), stage, module.num_model_chunks)
        for stage in stages
    ]
    simulation = simulate(schedules, record=True)
    say(f"schedule {schedule!r} (F forward, B backward, I and W its halves; .1: second chunk):")
    say(render_grid(simulation.spans))
    say(render_summary(simulation, schedules))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the launcher adds --local_rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config",
        default=str(Path(__file__).parent / "pipeline_config.json"),
        help="deepspeed's configuration",
    )
    parser.add_argument("--schedule", choices=SCHEDULES, help="instead of the configuration's")
    parser.add_argument(
        "--stages", type=int, help="stages of the pipeline (default: all processes)"
    )
    parser.add_argument(
        "--data", help="file or folder to train on (default: the Python standard library's sources)"
    )
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument(
        "--check", type=int, default=5, help="first steps that are compared with one process"
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--width", type=int, default=128, help="features per position, a multiple of 32"
    )
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.check <= arguments.steps:
        parser.error(f"--check {arguments.check} must be between 1 and --steps {arguments.steps}")
    return arguments


def read_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration file, with the schedule of the command line."""
    config: dict[str, Any] = json.loads(Path(arguments.config).read_text())
    if arguments.schedule is not None:
        config["pipeline"] = {**config.get("pipeline", {}), "schedule": arguments.schedule}
    return config


def main() -> None:
    """Run the example on this rank."""
    arguments = parse_arguments()
    deepspeed.init_distributed()
    config = read_config(arguments)
    schedule = config.get("pipeline", {}).get("schedule", SCHEDULES[0])
    specs = layer_specs(
        GPTConfig(arguments.layers, arguments.width, arguments.width // 32, arguments.context)
    )
    module = PipelineModule(
        specs,
        num_stages=arguments.stages or dist.get_world_size(),
        loss_fn=loss_of_scores,
        seed_layers=True,  # weights then do not depend on the number of stages
        base_seed=arguments.seed,
        num_model_chunks=CHUNKS_OF_INTERLEAVED if schedule == "interleaved" else 1,
    )
    engine, *_ = deepspeed.initialize(
        args=arguments, model=module, model_parameters=module.parameters(), config=config
    )
    show_places(module, schedule, engine.micro_batches)

    text = load_text(arguments.data)
    size, replicas = (
        engine.train_micro_batch_size_per_gpu(),
        module.grid.get_data_parallel_world_size(),
    )
    data = Data(Windows(text.train, arguments.context), size, engine.micro_batches, replicas)
    held_out = Data(
        Windows(text.validation, arguments.context), size, engine.micro_batches, replicas
    )
    before = validate(engine, held_out)
    alone = OneProcess(whole_model(specs, arguments.seed).to(engine.device), config)
    difference = check(engine, alone, data, arguments.check)
    say(verdict(difference, next(module.parameters()).dtype) + "\n")
    for step in range(arguments.check, arguments.steps):
        loss = train_step(engine, data, step).loss
        if (step + 1) % 5 == 0:
            say(f"step {step + 1:3}: loss {loss:.3f}")
    say(
        f"validation loss {before:.3f} before, {validate(engine, held_out):.3f} after "
        f"{engine.global_steps} steps (nats per byte)"
    )
    # The others must not leave while rank 0, which hosts the rendezvous, still works.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
