"""Models and runs of the tests of stage 3."""

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm as dist
from unit import models
from unit.models import seeded, tokens
from unit.one_process import OneProcess, go_through

VOCABULARY = 11
LR = 0.5
STEPS = 2
Tensors = dict[str, torch.Tensor]
# Weights of blocks are sharded, biases and norms stay whole.
MIXED: dict[str, Any] = {"stage3_param_persistence_threshold": 11, "stage3_unit_fusion_size": 0}
# Nothing stays whole, and every small module is a unit: the models here have nothing else.
SHARDED: dict[str, Any] = {"stage3_param_persistence_threshold": 0, "stage3_unit_fusion_size": 0}
# And units go as soon as nobody uses them, so backward gathers all of them again.
BOUNDED: dict[str, Any] = {**SHARDED, "stage3_max_reuse_distance": 0}


class Block(nn.Module):
    """Odd sizes, so that cuts end in padding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.up(self.norm(x)).relu())
        return result


class Net(nn.Module):
    """Tied, unused and frozen parameters, and one that is read outside its module. `recompute`:
    `use_reentrant` of torch's checkpointing of each block.
    """

    def __init__(self, width: int = 5, depth: int = 2, recompute: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.scale = nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.recompute = recompute
        for param in self.blocks[0].parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
        x = self.frozen(x) * (1.0 + self.scale.weight)
        logits: torch.Tensor = self.head(self.blocks[0](x))
        return logits


def make_net(**kwargs: Any) -> Net:
    return seeded(Net, **kwargs)


def tokens_of(index: int, rank: int) -> torch.Tensor:
    return tokens(100 * index + rank, VOCABULARY, 4, 6)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)[:, :-1].reshape(-1, VOCABULARY).float()
    return nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))


def config_of(stage: int, accumulation: int = 2, **zero: Any) -> dict[str, Any]:
    return models.config_of(stage, 4, accumulation, zero_optimization=zero)


def engine_of(model: nn.Module, config: dict[str, Any]) -> Any:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def started(accumulation: int = 2, **zero: Any) -> tuple[Any, Net]:
    """An engine at stage 3, and its net."""
    model = make_net()
    return engine_of(model, config_of(3, accumulation, **zero)), model


def train(engine: Any, steps: int = STEPS, accumulation: int = 2, first: int = 0) -> None:
    numbers = range(first * accumulation, (first + steps) * accumulation)
    go_through(engine, (tokens_of(index, dist.get_rank()) for index in numbers), loss_of)


def trained(
    stage: int, model: nn.Module | None = None, accumulation: int = 2, **zero: Any
) -> Tensors:
    """Parameters after training; `destroy` has given them back whole."""
    model = make_net() if model is None else model
    engine = engine_of(model, config_of(stage, accumulation, **zero))
    train(engine, accumulation=accumulation)
    engine.destroy()
    return values_of(model)


def values_of(model: nn.Module) -> Tensors:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@functools.cache
def reference(steps: int = STEPS, accumulation: int = 2) -> Tensors:
    return OneProcess(make_net(), LR, loss_of).train(tokens_of, steps, accumulation)


def distance(found: Tensors, wanted: Tensors) -> float:
    assert found.keys() == wanted.keys()
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


def same(found: Tensors, wanted: Tensors) -> bool:
    keys = found.keys() == wanted.keys()
    return keys and all(torch.equal(found[name], wanted[name]) for name in wanted)


def check_as_one_process(model: nn.Module) -> None:
    assert distance(values_of(model), reference()) < 1e-5


def end_as_one_process(engine: Any) -> None:
    engine.destroy()
    check_as_one_process(engine.module)
