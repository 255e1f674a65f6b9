"""Layers with experts in a pipeline: what each stage must know of those on other stages.

Making groups of experts is collective over the world, so a stage without experts must make the same
groups in the same order; and checkpoints number the layers with experts by their order in the whole
model. One exchange answers both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from deepspeed import comm as dist
from deepspeed.moe.layer import MoE, make_expert_groups
from deepspeed.moe.utils import named_moe_layers


class _Placed(NamedTuple):
    """A `MoE` of the pipeline: in which layer, and which groups it needs."""

    layer: int
    name: str
    ep_size: int
    is_tensor_parallel: bool


class ExpertLayers:
    """The `MoE`s of a pipeline. Construction is collective over the stages.

    `layers`: of this stage, index in the whole model -> name in the `PipelineModule`, module.
    """

    def __init__(self, layers: Mapping[int, tuple[str, nn.Module]], stages: Any) -> None:
        self._own: dict[str, MoE] = {}
        placed: list[_Placed] = []
        for index, (prefix, module) in layers.items():
            for inner, layer in named_moe_layers(module):
                name = f"{prefix}.{inner}".rstrip(".")
                self._own[name] = layer
                placed.append(
                    _Placed(index, name, layer.ep_size, layer.enable_expert_tensor_parallelism)
                )
        everywhere: list[Any] = [None] * dist.get_world_size(group=stages)
        dist.all_gather_object(everywhere, placed, group=stages)
        in_order = sorted(
            (found for stage in everywhere for found in stage), key=lambda found: found.layer
        )
        # A tied layer has one name on all of its stages, and counts where it is used first.
        self._numbers = {
            name: number
            for number, name in enumerate(dict.fromkeys(found.name for found in in_order))
        }
        self._group_kinds = list(
            dict.fromkeys((found.ep_size, found.is_tensor_parallel) for found in in_order)
        )

    def make_groups(self, data_first: bool) -> None:
        """Make the groups that any stage needs, once. Collective over the world."""
        for ep_size, is_tensor_parallel in self._group_kinds:
            make_expert_groups(ep_size, is_tensor_parallel, data_first)

    def numbered(self) -> list[tuple[int, str, MoE]]:
        """Give each `MoE` of this stage: number in the whole model, name and module, in order."""
        return sorted(
            ((self._numbers[name], name, layer) for name, layer in self._own.items()),
            key=lambda found: found[0],
        )
