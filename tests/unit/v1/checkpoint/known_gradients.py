"""A model whose gradients are exact in any division over ranks: means of integers and halves.

What an optimizer makes of them elementwise depends on the layout by no more than the last bit, and
a step that is counted twice shows at once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from unit import one_process
from unit.models import config_of, tokens
from unit.one_process import OneProcess

FEATURES, BATCH, MICRO_BATCHES = 3, 8, 2
# A matrix, a vector that no number of ranks divides, one element, and no dimensions at all.
SHAPES = {"0.value": (4, 3), "1.value": (5,), "2.value": (1,), "3.value": ()}
NAMES = list(SHAPES)
# Names in each parameter group; groups without any are what adapters leave of a decay / no-decay
# pair.
GROUPINGS: dict[str, list[list[str]]] = {
    "one": [NAMES],
    "two": [NAMES[:1], NAMES[1:]],
    "lone": [[*NAMES[:2], NAMES[3]], [NAMES[2]]],
    "empty": [NAMES, []],
    "empty-first": [[], NAMES],
    "turned": [[NAMES[3]], [], NAMES[1:3], NAMES[:1]],
}
LR = 2.0**-6
MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Term(nn.Module):
    """Adds a parameter times coefficients of the input to the last column, where the sum is."""

    def __init__(self, name: str) -> None:
        super().__init__()
        shape, number = torch.Size(SHAPES[name]), NAMES.index(name)
        generator = torch.Generator().manual_seed(number)
        self.value = nn.Parameter(torch.randn(shape, generator=generator))
        halves = torch.randint(1, 7, (FEATURES, shape.numel()), generator=generator)
        self.coefficients: torch.Tensor
        self.register_buffer("coefficients", halves / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: (batch, FEATURES + 1)
        factors = x[:, :FEATURES] @ self.coefficients.to(x.dtype)
        term = factors @ self.value.view(-1, 1)
        return torch.cat([x[:, :FEATURES], x[:, FEATURES:] + term], dim=1)


def loss_fn(outputs: torch.Tensor, labels: Any = None) -> torch.Tensor:
    """Mean of the sums."""
    return outputs[:, FEATURES].mean()


def made() -> nn.Module:
    """The same in every run."""
    return nn.Sequential(*(Term(name) for name in NAMES))


def batch(step: int) -> torch.Tensor:
    """Of all ranks; the last column is what terms are added to."""
    return torch.cat([tokens(100 + step, 7, BATCH, FEATURES) - 3.0, torch.zeros(BATCH, 1)], dim=1)


def grouped(module: nn.Module, grouping: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Parameter groups of a module that has all of these parameters, or of a stage, some."""
    own = dict(module.named_parameters())
    return [{"params": [own[name] for name in names if name in own]} for names in grouping]


def reference(make: MakeOptimizer, steps: int) -> list[dict[str, torch.Tensor]]:
    """Values before the first and after each step of one process of plain torch."""
    module = made()
    one = OneProcess(module, make(grouped(module, [NAMES])), lambda m, x: loss_fn(m(x)))
    seen = [one.params()]
    for step in range(steps):
        one.step([batch(step)])
        seen.append(one.params())
    return seen


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter whole, at any stage, on every rank."""
    params = dict(module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(params.values())):
        return {name: param.detach().clone() for name, param in params.items()}


def start(
    grouping: Sequence[Sequence[str]],
    stage: int,
    make: MakeOptimizer | None = None,
    stages: int = 0,
    lr_scheduler: Any = None,
    **keys: Any,
) -> Any:
    """An engine over a fresh model; `make` gives a client's optimizer, or `keys` name one;
    `stages` of a pipeline, or 0.
    """
    module: Any = made()
    if stages:
        layers = [LayerSpec(Term, name) for name in NAMES]
        how = {"loss_fn": loss_fn, "partition_method": "uniform"}
        module = PipelineModule(layers, num_stages=stages, **how)
    groups = grouped(module, grouping)
    given: dict[str, Any] = (
        {"model_parameters": groups} if make is None else {"optimizer": make(groups)}
    )
    if lr_scheduler is not None:
        given["lr_scheduler"] = lr_scheduler(given["optimizer"])
    at_stage_3 = {"stage3_param_persistence_threshold": 3} if stage == 3 else {}
    zero = {"reduce_bucket_size": 20, **at_stage_3, **keys.pop("zero_optimization", {})}
    ranks = dist.get_world_size() // max(stages, 1)
    rows = BATCH // ranks // MICRO_BATCHES
    settings = config_of(stage, rows, MICRO_BATCHES, zero_optimization=zero, **keys)
    return deepspeed.initialize(model=module, config=settings, **given)[0]


def train(engine: Any, steps: int) -> list[dict[str, torch.Tensor]]:
    """Take steps; this rank's values after each."""
    seen = []
    ranks = engine.parallel_map.replicas
    for _ in range(steps):
        own = batch(engine.global_steps).chunk(len(ranks.ranks))[ranks.rank]
        parts = own.chunk(MICRO_BATCHES)
        if isinstance(engine.module, PipelineModule):
            engine.train_batch(iter([(part, part) for part in parts]))
        else:
            one_process.train(engine, parts, lambda model, x: loss_fn(model(x)))
        seen.append(values_of(engine.module))
    return seen
