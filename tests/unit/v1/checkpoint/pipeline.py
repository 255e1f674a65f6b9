"""A small pipeline with tied weights, whose batches do not depend on how it is divided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

from .runs import by_name

WIDTH = 6
MICRO_BATCHES = 2
BATCH = 8  # samples per step over all ranks


def transposed(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The other use of the tied weight."""
    return nn.functional.linear(hidden, module.get_parameter("weight").T)


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean squared error in fp32."""
    return (outputs.float() - labels.float()).pow(2).mean()


def layers() -> list[Any]:
    """Seven layers, one without parameters; the first and the last share a weight."""
    return [
        TiedLayerSpec("tied", nn.Linear, WIDTH, 5, bias=False),
        LayerSpec(nn.Linear, 5, 7),
        LayerSpec(nn.Tanh),
        LayerSpec(nn.Linear, 7, 3),
        LayerSpec(nn.Linear, 3, 7),
        LayerSpec(nn.Linear, 7, 5),
        TiedLayerSpec("tied", nn.Linear, WIDTH, 5, bias=False, forward_fn=transposed),
    ]


def make(stages: int, seed: int = 1, decay_groups: bool = False, **keys: Any) -> Any:
    """An engine over a fresh pipeline of all ranks."""
    torch.manual_seed(seed)
    module = PipelineModule(
        layers(), num_stages=stages, loss_fn=loss_fn, seed_layers=True, base_seed=seed, partition_method="uniform"
    )
    parameters = None
    if decay_groups:
        decayed = [param for param in module.parameters() if param.dim() > 1]
        plain = [param for param in module.parameters() if param.dim() <= 1]
        parameters = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    configuration = {
        "train_micro_batch_size_per_gpu": BATCH * stages // dist.get_world_size() // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        **keys,
    }
    return deepspeed.initialize(model=module, model_parameters=parameters, config=configuration)[0]


def batches(engine: Any, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro-batches of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    whole = torch.randn(2, BATCH, WIDTH, generator=generator)
    replicas, replica = engine.grid.data_parallel_size, engine.grid.data_parallel_id
    inputs, labels = (part.view(MICRO_BATCHES, replicas, -1, WIDTH)[:, replica] for part in whole)
    dtype = next(engine.module.parameters(), whole).dtype
    return iter([(x.to(dtype), y) for x, y in zip(inputs, labels, strict=True)])


def train(engine: Any, steps: int) -> list[tuple[float, float]]:
    """Loss and norm of each of the next steps."""
    seen = []
    for _ in range(steps):
        loss = engine.train_batch(batches(engine, engine.global_steps))
        seen.append((float(loss), float(engine.get_global_grad_norm())))
    return seen


def whole(engine: Any) -> dict[str, Any]:
    """`by_name` of all stages, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, by_name(engine))
    return {name: value for own in reversed(found) for name, value in own.items()}
