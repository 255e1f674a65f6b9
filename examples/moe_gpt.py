"""Train the small byte-level GPT with experts in place of every second feed-forward; each process
holds some of the experts.

    deepspeed --num_gpus 2 examples/moe_gpt.py
    deepspeed --num_gpus 4 examples/moe_gpt.py --experts 8 --top 1

Shows layers with experts, which rank holds which of them, the load-balancing loss, and ZeRO with
experts. For the first steps every process also trains the model with all experts by itself in plain
torch, and losses, gradient norms and weights of both are compared. The configuration is
moe_config.json, the blocks are those of gpt.py.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path

import torch
from gpt import GPT, FeedForward, GPTConfig, initialize
from one_process import OneProcess, Step, random_windows, verdict
from text_data import Windows, load_text
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups

BALANCE_WEIGHT = 0.01
VALIDATION_STEP = 10**6
Batch = list[torch.Tensor]


class RoutedFeed(nn.Module):
    """A mixture of feed-forward experts, in a block's feed-forward's place.

    Args:
        config: Size of an expert.
        experts: Experts over all ranks.
        ranks: Ranks over which they are spread.
        top: Experts per token.
        seed: Of the gate; expert e starts from seed + 1 + e, on whatever rank it is.
    """

    def __init__(self, config: GPTConfig, experts: int, ranks: int, top: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # Nothing random in the gate: one process must route as all do, for the check.
        self.moe = MoE(
            config.width,
            FeedForward(config),
            num_experts=experts,
            ep_size=ranks,
            k=top,
            capacity_factor=1.5,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        # `initialize` does it too; earlier here, to know which experts this rank has.
        self.moe.set_deepspeed_parallelism()
        for number, expert in zip(
            self.moe.global_expert_ids,
            self.moe.deepspeed_moe.experts.deepspeed_experts,
            strict=True,
        ):
            torch.manual_seed(seed + 1 + number)
            expert.apply(initialize)
        self.balance: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x [batch, positions, width]
        """Return what is added to `x`, of its shape; zeros where a token found all its experts
        full.
        """
        output, self.balance, _counts = self.moe(x)
        return output

    def take_balance(self) -> torch.Tensor:
        """The last forward's load-balancing loss, once: it holds the graph, which must not outlive
        the step.
        """
        balance, self.balance = self.balance, None
        if balance is None:
            raise RuntimeError("take_balance() needs a forward before it")
        return balance


class MoEGPT(GPT):
    """A GPT whose every second block has experts."""

    def __init__(self, config: GPTConfig, experts: int, ranks: int, top: int, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(config)
        for index in range(1, config.layers, 2):
            self.blocks[index].feed = RoutedFeed(config, experts, ranks, top, seed + 1000 * index)

    def routed(self) -> dict[str, RoutedFeed]:
        """The layers with experts, by name."""
        return {
            name: module for name, module in self.named_modules() if isinstance(module, RoutedFeed)
        }

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Mean loss in nats per byte; in training with what keeps the experts equally busy."""
        loss = super().forward(text)
        balance = torch.stack([feed.take_balance() for feed in self.routed().values()]).sum()
        return loss + BALANCE_WEIGHT * balance if self.training else loss

    def described_load(self) -> str:
        """How many of this rank's bytes the last forward routed to each expert, layer by layer."""
        return "; ".join(
            " ".join(map(str, feed.moe.deepspeed_moe.exp_counts.tolist()))
            for feed in self.routed().values()
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters by name, each expert by its number among all experts."""
        found: dict[str, torch.Tensor] = dict(self.named_parameters())
        for layer, feed in self.routed().items():
            first = feed.moe.global_expert_ids.start
            prefix = re.compile(rf"({re.escape(layer)}\..*deepspeed_experts\.)(\d+)(.*)")
            own = {name: match for name in found if (match := prefix.fullmatch(name))}
            # Together: an expert's new name may be another's old one.
            renamed = {
                f"{match[1]}{int(match[2]) + first}{match[3]}": found.pop(name)
                for name, match in own.items()
            }
            found.update(renamed)
        return found


def batches_of(step: int, engine: deepspeed.DeepSpeedEngine, windows: Windows) -> list[Batch]:
    """A step's micro-batches of each rank, each [size, context + 1]: drawn from their number, so
    that all processes know all.
    """
    size, count = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    first = step * dist.get_world_size() * count
    numbers = [
        range(first + rank * count, first + (rank + 1) * count)
        for rank in range(dist.get_world_size())
    ]
    return [
        [random_windows(windows, size, number).to(engine.device) for number in of_rank]
        for of_rank in numbers
    ]


def all_mean(losses: list[torch.Tensor]) -> float:
    """Mean over this list and all ranks."""
    value = torch.stack(losses).mean()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train_step(engine: deepspeed.DeepSpeedEngine, batch: Batch) -> Step:
    """One optimizer step on this rank's micro-batches. The numbers are the same on all ranks."""
    losses = []
    for text in batch:
        loss = engine(text)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return Step(all_mean(losses), float(engine.get_global_grad_norm() or 0.0))


def check(
    engine: deepspeed.DeepSpeedEngine, alone: OneProcess, windows: Windows, steps: int
) -> float:
    """Train all ranks and one process side by side; returns the largest relative difference, the
    same on all ranks.
    """
    largest = 0.0
    say("step     loss: all ranks   one process     gradient norm: all ranks   one process")
    for step in range(steps):
        batches = batches_of(step, engine, windows)
        ours = train_step(engine, batches[dist.get_rank()])
        theirs = alone.step([text for of_rank in batches for text in of_rank], alone.model)
        say(
            f"{step + 1:4}  {ours.loss:19.6f} {theirs.loss:13.6f} {ours.grad_norm:28.6f} "
            f"{theirs.grad_norm:13.6f}"
        )
        largest = max(largest, ours.difference(theirs))
    # Each rank compares the experts that it holds.
    worst = torch.tensor(
        max(largest, alone.difference(engine.module.weights())), device=engine.device
    )
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


@torch.no_grad()
def validate(engine: deepspeed.DeepSpeedEngine, windows: Windows) -> float:
    """Mean loss over one batch of the validation text."""
    engine.eval()
    losses = [
        engine(text) for text in batches_of(VALIDATION_STEP, engine, windows)[dist.get_rank()]
    ]
    engine.train()
    return all_mean(losses)


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def show_places(model: MoEGPT) -> None:
    """Which rank holds which experts, and over which ranks their gradients are reduced."""
    (layer, feed), *_ = model.routed().items()
    name = feed.moe.expert_group_name
    same = dist.get_all_ranks_from_group(groups._get_expert_data_parallel_group(name))
    line = (
        f"experts {list(feed.moe.global_expert_ids)}, gradients averaged with those of ranks {same}"
    )
    lines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    say(f"layers with experts: {', '.join(model.routed())}; in each")
    say("\n".join(f"  rank {rank}: {each}" for rank, each in enumerate(lines)) + "\n")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the launcher adds --local_rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config",
        default=str(Path(__file__).parent / "moe_config.json"),
        help="deepspeed's configuration",
    )
    parser.add_argument(
        "--experts", type=int, default=4, help="experts of a layer, over all processes"
    )
    parser.add_argument(
        "--ranks", type=int, help="processes that share them (default: as many as divide both)"
    )
    parser.add_argument("--top", type=int, default=2, help="experts per byte")
    parser.add_argument(
        "--data", help="file or folder to train on (default: the Python standard library's sources)"
    )
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument(
        "--check", type=int, default=5, help="first steps that are compared with one process"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--width", type=int, default=128, help="features per position, a multiple of 32"
    )
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.check <= arguments.steps:
        parser.error(f"--check {arguments.check} must be between 1 and --steps {arguments.steps}")
    if arguments.layers < 2:
        parser.error(f"--layers {arguments.layers}: every second layer has experts, so at least 2")
    return arguments


def main() -> None:
    """Run the example on this rank."""
    arguments = parse_arguments()
    deepspeed.init_distributed()
    config = json.loads(Path(arguments.config).read_text())
    size = GPTConfig(arguments.layers, arguments.width, arguments.width // 32, arguments.context)
    ranks = arguments.ranks or math.gcd(arguments.experts, dist.get_world_size())
    model = MoEGPT(size, arguments.experts, ranks, arguments.top, arguments.seed)
    engine, *_ = deepspeed.initialize(
        args=arguments, model=model, model_parameters=model.parameters(), config=config
    )
    show_places(model)

    text = load_text(arguments.data)
    windows, held_out = (
        Windows(text.train, arguments.context),
        Windows(text.validation, arguments.context),
    )
    before = validate(engine, held_out)
    # All experts in every process: an exchange with nobody.
    alone = OneProcess(
        MoEGPT(size, arguments.experts, 1, arguments.top, arguments.seed).to(engine.device), config
    )
    difference = check(engine, alone, windows, arguments.check)
    say(verdict(difference, next(model.parameters()).dtype) + "\n")
    for step in range(arguments.check, arguments.steps):
        loss = train_step(engine, batches_of(step, engine, windows)[dist.get_rank()]).loss
        if (step + 1) % 5 == 0:
            say(
                f"step {step + 1:3}: loss {loss:.3f}, bytes of rank 0 per expert: "
                f"{model.described_load()}"
            )
    after = validate(engine, held_out)
    say(
        f"validation loss {before:.3f} before, {after:.3f} after {engine.global_steps} steps (nats "
        "per byte)"
    )
    # The others must not leave while rank 0, which hosts the rendezvous, still works.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
