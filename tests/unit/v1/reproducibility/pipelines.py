"""Trains one pipeline, and tells what bits it has come to."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from unit.models import seeded, tokens
from unit.v1.contract.matrix import pairwise
from unit.v1.reproducibility.cases import OPTIMIZERS, PRECISIONS

WORDS, WIDTH, MICRO_BATCHES = 61, 24, 6


class Net(NamedTuple):
    """What a model is made of: layers that share the embedding's weight with it, if any."""

    uses: int
    dropout: float
    optimizer: str


# Stages and data-parallel ranks.
GRIDS = ((2, 1), (4, 1), (1, 3), (2, 2))
# Schedule and layers per recomputed segment.
PLANS = (("1f1b", 0), ("interleaved", 2), ("zero_bubble", 0), ("1f1b", 1))
NETS = (Net(0, 0.1, "adam"), Net(2, 0.0, "adam"), Net(3, 0.0, "muon"))


@dataclass(frozen=True)
class PipeCase:
    """One configuration; `is_plain`: one engine of the same layers, without a pipeline."""

    grid: tuple[int, int] = (1, 1)
    plan: tuple[str, int] = ("1f1b", 0)
    net: Net = NETS[1]
    precision: str = "fp32"
    stage: int = 0
    overlap: bool = False
    small_buckets: bool = False
    is_plain: bool = False

    @property
    def ranks(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def name(self) -> str:
        """For reports."""
        return " ".join(f"{key}={value}" for key, value in vars(self).items())

    @property
    def kind(self) -> str:
        """All of one kind give one digest."""
        return f"{self.precision} {self.net}"

    @property
    def alone(self) -> "PipeCase":
        """The plainest of its kind. In a pipeline each layer draws random numbers of its own."""
        return PipeCase(net=self.net, precision=self.precision, is_plain=not self.net.dropout)


FACTORS: dict[str, tuple[Any, ...]] = {
    "grid": GRIDS,
    "plan": PLANS,
    "net": NETS,
    "precision": tuple(PRECISIONS),
    "stage": (0, 1),
    "overlap": (False, True),
    "small_buckets": (False, True),
}


def pipe_cases() -> list[PipeCase]:
    """All pairs of values."""
    return [PipeCase(**row) for row in pairwise(FACTORS, [9])]


def pipe_product() -> list[PipeCase]:
    """The whole product, on up to 6 ranks."""
    grids = ((1, 1), (1, 2), *GRIDS, (3, 1), (2, 3), (3, 2), (1, 6))
    factors = {**FACTORS, "grid": grids}
    return [
        PipeCase(**dict(zip(factors, values, strict=True)))
        for values in itertools.product(*factors.values())
    ]


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed = self.down(self.dropout(torch.tanh(self.up(self.norm(hidden)))))
        return hidden + changed


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(WORDS, WIDTH))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return F.embedding(batch, self.weight)


def mixed(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    weight: Any = layer.weight
    return hidden + torch.tanh(hidden @ weight[:WIDTH])


def project(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    weight: Any = layer.weight
    return hidden @ weight.T


class Head(Embed):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return project(self, hidden)


def layers_of(case: PipeCase) -> list[Any]:
    """Eight, of which the last stage has the last tied ones."""
    first, last = (
        (TiedLayerSpec("embed", Embed), TiedLayerSpec("embed", Embed, forward_fn=project))
        if case.net.uses
        else (seeded(Embed), seeded(Head))
    )
    blocks = [seeded(Block, width, case.net.dropout) for width in (53, 31, 16, 9, 24)]
    middle = TiedLayerSpec("embed", Embed, forward_fn=mixed) if case.net.uses == 3 else torch.sin
    return [first, *blocks, middle, last]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Whole(nn.Module):
    """The layers of a pipeline of one stage, as a model."""

    def __init__(self, pipeline: PipelineModule) -> None:
        super().__init__()
        self.run = [pipeline.forward]
        for name, child in pipeline.named_children():
            self.add_module(name, child)

    def forward(self, batch: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(self.run[0](batch), labels)


def batches(step: int, replica: int, replicas: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in range(replica, MICRO_BATCHES, replicas):
        batch = tokens(1000 * step + number, WORDS, 2, 11)
        yield batch, batch.roll(-1, 1)


def config_of(case: PipeCase, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case.stage, "overlap_comm": case.overlap}
    if case.small_buckets:
        zero |= {"reduce_bucket_size": 700, "allgather_bucket_size": 700}
    precision = PRECISIONS[case.precision]
    if "fp16" in precision:  # some steps are skipped
        precision = {"fp16": {**precision["fp16"], "initial_scale_power": 17}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES // case.grid[1],
        "gradient_clipping": 0.4,
        "zero_optimization": zero,
        "optimizer": OPTIMIZERS[case.net.optimizer],
        "pipeline": {"schedule": case.plan[0], "activation_checkpoint_interval": case.plan[1]},
        "reproducibility": {"world_size_invariant": True},
        **precision,
        **more,
    }


def engine_of(case: PipeCase, **more: Any) -> Any:
    """An engine that has taken no step."""
    stages, _ = case.grid
    torch.manual_seed(3)
    module = PipelineModule(
        layers_of(case),
        num_stages=stages,
        loss_fn=loss_of,
        partition_method="uniform",
        num_model_chunks=2 if case.plan[0] == "interleaved" else 1,
    )
    model = Whole(module) if case.is_plain else module
    config = config_of(case, **more)
    if case.is_plain:
        del config["pipeline"]
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine: Any, first: int = 0, steps: int = 2) -> list[float]:
    """The mean losses of steps."""
    losses = []
    for step in range(first, first + steps):
        place = engine.parallel_map.data
        data = batches(step, place.rank, place.size)
        if hasattr(engine, "train_batch"):
            losses.append(float(engine.train_batch(data)))
            continue
        found = []
        for batch, labels in data:
            loss = engine(batch, labels)
            engine.backward(loss)
            engine.step()
            found.append(loss.detach())
        losses.append(float(torch.stack(found).mean()))
    return losses


def bits_of(case: PipeCase, steps: int = 0) -> list[Any]:
    """The digest after some steps, losses, norm, skipped steps; alike on all ranks."""
    engine = engine_of(case)
    steps = steps or (4 if case.precision == "fp16" else 2)
    losses = train(engine, steps=steps)
    assert engine.skipped_steps < steps
    norm = float(engine.get_global_grad_norm())
    found = [engine.state_digest(), losses, norm, engine.skipped_steps]
    engine.destroy()
    dist.barrier()
    return found
