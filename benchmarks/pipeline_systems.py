"""The pipelines that the benchmark compares: one GPT as a list of layers, in this project's engine,
upstream's and torch's.

`build_step` returns a function that trains one batch on this rank's stage. Runs in a worker process
(`pipeline_worker.py`), under this project's interpreter or upstream's; imports deepspeed only for
the systems that use it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import NUM_BYTES, Block, GPTConfig, Linear, rotations  # noqa: E402  the path above is where it lies

LEARNING_RATE = 1e-4
HEADS = 4
DEEPSPEED_SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
TORCH_SCHEDULES = {
    "torch-1f1b": ("Schedule1F1B", 1),
    "torch-interleaved": ("ScheduleInterleaved1F1B", 2),
    "torch-zero_bubble": ("ScheduleInterleavedZeroBubble", 2),
}
Step = Callable[[], None]


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        blocks: Blocks of the GPT, or sleeping layers: a multiple of twice the stages.
        width: Features per position.
        micro_batch: Sequences per micro-batch.
        context: Positions per sequence.
        micro_batches: Micro-batches per step.
        precision: "fp32" or "bf16" (the products stay fp32: see examples/gpt.py).
        groups: Parameter groups of the optimizer; with 3, those without weight decay and the norms'
            weights are apart.
        clip: Largest gradient norm; 0 for no clipping.
        zero_stage: ZeRO stage of the deepspeed systems.
        sleep_ms: If positive, layers sleep so long per forward, gradient of the input and gradient
            of the weights instead of computing: processes that share processors don't slow each
            other then.
    """

    blocks: int = 8
    width: int = 128
    micro_batch: int = 2
    context: int = 64
    micro_batches: int = 8
    precision: str = "fp32"
    groups: int = 1
    clip: float = 0.0
    zero_stage: int = 0
    sleep_ms: float = 0.0


# The model: every layer maps what one channel carries to what the next does.


class Embedding(nn.Module):
    """Bytes to vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)

    def forward(self, text: torch.Tensor) -> torch.Tensor:  # text [batch, positions]
        """[batch, positions, width]."""
        return self.bytes(text)


class PipeBlock(nn.Module):
    """A block that computes the rotations by itself: only the hidden states travel."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.block = Block(config)
        self._features = config.width // config.heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x [batch, positions, width]
        """The block's output, of the shape of `x`."""
        return self.block(x, rotations(x.shape[1], self._features, x.device))


class Head(nn.Module):
    """Scores of the next byte."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.head = Linear(config.width, NUM_BYTES, config.wide_products)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x [batch, positions, width]
        """Logits, [batch, positions, 256]."""
        return self.head(self.norm(x)).float()


class PipeBlockThatSleeps(nn.Module):
    """A layer whose passes each take a fixed time without using a processor.

    Args:
        seconds: Of the forward, of the gradient of the input and of the gradient of the weight
            each.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self.scale = nn.Parameter(torch.ones(1))
        self.scale.register_hook(self._sleep)

    def _sleep(self, _gradient: torch.Tensor) -> None:
        time.sleep(self._seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, later."""
        time.sleep(self._seconds)
        # Of its own node: a backward that leaves weights for later runs it once, and the product's
        # node twice.
        x = x + 0.0
        if x.requires_grad:
            x.register_hook(self._sleep)
        return x * self.scale


class Shift(nn.Module):
    """Makes the first stage's input need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`."""
        return x.float() + self.shift


def build_layers(work: Workload) -> list[nn.Module]:
    """All layers with the same weights in every process."""
    torch.manual_seed(0)
    if work.sleep_ms:
        return [Shift(), *(PipeBlockThatSleeps(work.sleep_ms / 1e3) for _ in range(work.blocks))]
    config = GPTConfig(
        work.blocks, work.width, HEADS, work.context, wide_products=work.precision == "bf16"
    )
    return [Embedding(work.width), *(PipeBlock(config) for _ in range(work.blocks)), Head(config)]


def part_bounds(blocks: int, num_layers: int, parts: int) -> list[int]:
    """Where parts with equally many blocks begin among the layers; the first has the embedding, the
    last the head.
    """
    inner = [1 + blocks * part // parts for part in range(1, parts)]
    return [0, *inner, num_layers]


def loss_fn(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats per byte; of layers that sleep, any scalar."""
    if scores.dim() < 3:
        return scores.mean()
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def build_batch(work: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, int64, [micro_batches * micro_batch, context]; every step uses
    the same.
    """
    text = torch.randint(
        NUM_BYTES,
        (work.micro_batches * work.micro_batch, work.context + 1),
        generator=torch.Generator().manual_seed(1),
    )
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def parameter_groups(module: nn.Module, count: int) -> list[dict[str, Any]]:
    """One group, or three: matrices, the rest of even and of odd number, both without weight
    decay.
    """
    params = list(module.parameters())
    if count == 1:
        return [{"params": params}]
    rest = [param for param in params if param.dim() < 2]
    groups = [
        {"params": [param for param in params if param.dim() >= 2]},
        {"params": rest[::2]},
        {"params": rest[1::2]},
    ]
    return [
        {**group, "weight_decay": 0.01 if number == 0 else 0.0}
        for number, group in enumerate(groups)
        if group["params"]
    ]


def build_optimizer(module: nn.Module, work: Workload) -> torch.optim.Optimizer:
    """The same in all systems."""
    return torch.optim.AdamW(parameter_groups(module, work.groups), lr=LEARNING_RATE, fused=True)


# deepspeed, this project's or upstream's


def deepspeed_config(work: Workload, schedule: str) -> dict[str, Any]:
    """Configuration; `schedule` is "upstream" for an engine that knows one schedule only."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_clipping": work.clip,
        "zero_optimization": {"stage": work.zero_stage},
        "bf16": {"enabled": work.precision == "bf16"},
        # Both engines print every 10 steps by default.
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
    }
    if schedule != "upstream":
        config["pipeline"] = {"schedule": schedule}
    return config


def build_deepspeed(work: Workload, schedule: str) -> Step:
    """A `PipelineEngine`."""
    import deepspeed  # optional: torch's pipelines are built without it
    from deepspeed.pipe import PipelineModule  # optional: as above

    stages, chunks = dist.get_world_size(), 2 if schedule == "interleaved" else 1
    layers = build_layers(work)
    options: dict[str, Any] = {"num_model_chunks": chunks} if chunks > 1 else {}
    # Balances layers of this name: the same parts as `part_bounds`.
    module = PipelineModule(
        layers, num_stages=stages, loss_fn=loss_fn, partition_method="type:PipeBlock", **options
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=build_optimizer(module, work),
        config=deepspeed_config(work, schedule),
    )
    inputs, targets = build_batch(work)
    batches: Iterator[Any] = cycle(
        list(zip(inputs.split(work.micro_batch), targets.split(work.micro_batch), strict=True))
    )

    def step() -> None:
        engine.train_batch(batches)

    return step


# torch's own


def build_torch(work: Workload, system: str) -> Step:
    """`torch.distributed.pipelining`, as its tutorial has it."""
    from torch.distributed import pipelining  # optional: only these systems need it

    name, chunks = TORCH_SCHEDULES[system]
    rank, stages = dist.get_rank(), dist.get_world_size()
    layers = build_layers(work)
    bounds = part_bounds(work.blocks, len(layers), stages * chunks)
    own = [rank + chunk * stages for chunk in range(chunks)]
    parts = nn.ModuleList(nn.Sequential(*layers[bounds[part] : bounds[part + 1]]) for part in own)
    if work.precision == "bf16":
        parts.bfloat16()  # without fp32 masters, which torch has none of
    built = [
        pipelining.PipelineStage(module, part, stages * chunks, torch.device("cpu"))
        for part, module in zip(own, parts, strict=True)
    ]
    schedule_type = getattr(pipelining, name)
    schedule = schedule_type(built if chunks > 1 else built[0], work.micro_batches, loss_fn=loss_fn)
    optimizer = build_optimizer(parts, work)
    inputs, targets = build_batch(work)

    def step() -> None:
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if rank == 0 else ()
        schedule.step(
            *arguments, **({"target": targets, "losses": losses} if rank == stages - 1 else {})
        )
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_step(work: Workload, system: str) -> Step:
    """The training step of the system of this name.

    Raises:
        ValueError: For an unknown name.
    """
    if system in TORCH_SCHEDULES:
        return build_torch(work, system)
    if system in (*DEEPSPEED_SCHEDULES, "upstream"):
        return build_deepspeed(work, system)
    raise ValueError(
        f"system {system!r} is unknown; use one of "
        f"{', '.join([*DEEPSPEED_SCHEDULES, *TORCH_SCHEDULES, 'upstream'])}"
    )
