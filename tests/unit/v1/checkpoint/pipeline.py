"""A small pipeline with tied weights, whose batches do not depend on how it is divided."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from unit.v1.gathering import from_all_ranks

from .runs import by_name, differences

WIDTH = 6
MICRO_BATCHES = 2
# Samples per step over all ranks: 1, 2, 3 or 4 of them take equally many per micro-batch.
BATCH = 24


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


def decay_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Weights, biases without weight decay, and a group without parameters, as adapters leave."""
    decayed = [param for param in module.parameters() if param.dim() > 1]
    plain = [param for param in module.parameters() if param.dim() <= 1]
    return [{"params": decayed}, {"params": plain, "weight_decay": 0.0}, {"params": []}]


def configuration(replicas: int, **keys: Any) -> dict[str, Any]:
    """AdamW, a schedule, two micro-batches and clipping; with further keys."""
    return {
        "train_micro_batch_size_per_gpu": BATCH // replicas // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "steps_per_print": 1000,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4},
        },
        **keys,
    }


def make(stages: int, seed: int = 1, grouped: bool = False, **keys: Any) -> Any:
    """An engine over a fresh pipeline of all ranks; `grouped`: biases have a group."""
    torch.manual_seed(seed)
    module = PipelineModule(
        layers(),
        num_stages=stages,
        loss_fn=loss_fn,
        seed_layers=True,
        base_seed=seed,
        partition_method="uniform",
    )
    parameters = decay_groups(module) if grouped else None
    settings = configuration(dist.get_world_size() // stages, **keys)
    return deepspeed.initialize(model=module, model_parameters=parameters, config=settings)[0]


def draw(
    step: int, replicas: int, replica: int, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of a step of one data-parallel rank: its part of one rank's."""
    generator = torch.Generator().manual_seed(100 + step)
    drawn = torch.randn(2, BATCH, WIDTH, generator=generator)
    inputs, labels = (part.view(MICRO_BATCHES, replicas, -1, WIDTH)[:, replica] for part in drawn)
    return [(x.to(dtype), y) for x, y in zip(inputs, labels, strict=True)]


def batches(engine: Any, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro-batches of a step."""
    parameter = next(engine.module.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    return iter(draw(step, engine.grid.data_parallel_size, engine.grid.data_parallel_id, dtype))


def train(engine: Any, steps: int) -> list[tuple[float, float]]:
    """Loss and norm of each of the next steps."""
    seen = []
    for _ in range(steps):
        loss = engine.train_batch(batches(engine, engine.global_steps))
        seen.append((float(loss), float(engine.get_global_grad_norm())))
    return seen


def whole(engine: Any) -> dict[str, Any]:
    """`by_name` of all stages, on every rank; who has something under a name has the same."""
    found = from_all_ranks(by_name(engine))
    merged = {name: value for own in found for name, value in own.items()}
    for rank, own in enumerate(found):
        assert differences(own, {name: merged[name] for name in own}) == [], f"rank {rank} differs"
    return merged
