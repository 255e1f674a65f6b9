"""Models that `zero.Init` has sharded over all ranks, a few whole parameters at a time: each slice
is sharded over the ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.parallel_map import OptimizerInstances
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.engine_parts.model_setup import broadcast_tensors
from deepspeed.runtime.sharding.flattening import lies_on_host
from deepspeed.runtime.zero.gathering.gathered_parameters import hold_whole, let_go
from deepspeed.runtime.zero.parameters.shards import ShardMemory
from deepspeed.runtime.zero.parameters.zero_parameter import (
    become_plain,
    cut_parameters,
    is_zero_param,
    record_of,
)

# Elements that are whole at once.
WHOLE_NUMEL = 1 << 24


def refuse_trained(model: nn.Module, size: int) -> None:
    """Refuse a model whose engine of stage 3 has an optimizer with shards of whole parameters."""
    for param in model.parameters():
        if is_zero_param(param) and record_of(param).unit is not None:
            raise DeepSpeedConfigError(
                f"tensor_parallel.autotp_size: {size} with a model that an engine at "
                "zero_optimization.stage: 3 has: cut it before, by deepspeed.tp_model_init or that "
                "engine's configuration, or destroy() the engine first"
            )


@torch.no_grad()
def shard_anew(
    model: nn.Module,
    own_part: Callable[[nn.Parameter, torch.Tensor], torch.Tensor],
    slice_group: dist.Group,
    instances: OptimizerInstances,
) -> None:
    """Shard what `own_part` says this rank keeps of each sharded parameter. Collective."""
    for piece in _pieces(model):
        hold_whole(piece)
        whole = [param.data for param in piece]
        # Of ranks that are not sharded together each has drawn its own numbers.
        broadcast_tensors(whole, slice_group)
        own = [own_part(param, value).clone() for param, value in zip(piece, whole, strict=True)]
        shard = record_of(piece[0]).shard
        memory = ShardMemory(lies_on_host(shard), get_accelerator().is_pinned(shard))
        let_go(piece)
        for param, value in zip(piece, own, strict=True):
            become_plain(param, value)
        cut_parameters(piece, instances, memory=memory)


def _pieces(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    piece: list[nn.Parameter] = []
    held = 0
    for param in filter(is_zero_param, model.parameters()):
        record = record_of(param)
        is_alike = not piece or record.shard.device == record_of(piece[0]).shard.device
        if piece and (not is_alike or held + record.numel > WHOLE_NUMEL):
            yield piece
            piece, held = [], 0
        piece.append(param)
        held += record.numel
    if piece:
        yield piece
