"""Models of which each rank makes a part by itself: stages of a `PipelineModule`, experts of `MoE`.

The reference and the names of the report need such a model whole. So the user's function is called
with both made whole, and called again for each engine, whose part gets the whole model's weights.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm import group_store, rank_lists
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import named_moe_layers
from deepspeed.runtime.pipe.module import PipelineModule


@dataclass
class Parts:
    """Into how many parts a model's layers and its experts are divided over ranks."""

    stages: int = 1
    experts: int = 1


@contextmanager
def whole_models() -> Iterator[Parts]:
    """Within it each rank makes all stages and all experts; yields how many ranks were to do so."""
    parts = Parts()
    owners: tuple[Any, ...] = (PipelineModule, MoE)
    originals = [owner.__init__ for owner in owners]

    def make_whole(self: nn.Module, *args: object, **kwargs: object) -> None:
        make = originals[0 if isinstance(self, PipelineModule) else 1]
        given = inspect.signature(make).bind(self, *args, **kwargs).arguments
        if isinstance(self, MoE):
            parts.experts = max(parts.experts, given.get("ep_size", 1))
            given["ep_size"] = 1
        else:
            topology = given.pop("topology", None)
            stages = given.get("num_stages") if topology is None else topology.get_dim("pipe")
            parts.stages = int(stages or 1)
            given |= {"num_stages": 1, "num_model_chunks": 1, "partition_method": "uniform"}
        make(**given)

    for owner in owners:
        owner.__init__ = make_whole
    try:
        yield parts
    finally:
        for owner, original in zip(owners, originals, strict=True):
            owner.__init__ = original


def on_this_rank_alone(module: nn.Module) -> dict[int, Any]:
    """Let whole experts run without an engine; returns, by id, what copies have in common."""
    kept: list[Any] = [module.grid] if isinstance(module, PipelineModule) else []
    for _, layer in named_moe_layers(module):
        if not dist.is_initialized():
            dist.init_distributed(verbose=False)
        kept.append(group_store.group_of_one())
        layer.deepspeed_moe._set_ep_group(kept[-1])
    return {id(one): one for one in kept}


@torch.no_grad()
def take_weights(module: nn.Module, whole: nn.Module, data_first: bool) -> dict[str, str]:
    """Give a rank's part the weights of the whole model; returns what it is called there."""
    names = {name: name for name in module.state_dict()}
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    alike = module.grid.dp_group if isinstance(module, PipelineModule) else ranks
    for prefix, layer in named_moe_layers(module):
        rows = rank_lists.expert_groups([tuple(alike)], layer.ep_size, data_first).rows
        first = rank_lists.holding(rank, rows).index(rank) * layer.num_local_experts
        start = f"{prefix}.deepspeed_moe.experts.deepspeed_experts.".lstrip(".")
        for name in filter(re.compile(re.escape(start)).match, names):
            number, _, rest = name.removeprefix(start).partition(".")
            names[name] = f"{start}{first + int(number)}.{rest}"
    weights = whole.state_dict()
    for name, value in module.state_dict().items():
        value.copy_(weights[names[name]])
    return names
