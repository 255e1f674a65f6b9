"""Cut a model: ranks that share its layers start from the same weights, and each keeps its part.

Of parameters that `zero.Init` has sharded over all ranks a few are whole at a time, and each slice
is sharded over the ranks that hold it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.resharding.tensor_parallel import Share, own_slice
from deepspeed.comm import group_store, rank_lists
from deepspeed.comm.parallel_map import OptimizerInstances, ParallelMap
from deepspeed.runtime.checkpointing.model_files import LayeredModule
from deepspeed.runtime.config_utils import DeepSpeedConfigError, parse_dtype
from deepspeed.runtime.engine_parts.model_setup import broadcast_tensors, model_dtype
from deepspeed.runtime.sharding.flattening import lies_on_host
from deepspeed.runtime.sharding.model_slices import ModelSlices, slices_of
from deepspeed.runtime.tensor_parallel.families import counts_of
from deepspeed.runtime.tensor_parallel.layers import (
    LinearAllreduce,
    LinearLayer,
    SliceGroup,
    become,
    is_transposed,
)
from deepspeed.runtime.tensor_parallel.partition_config import PartitionConfig
from deepspeed.runtime.tensor_parallel.structure import LayerCut, Plan, plan_of
from deepspeed.runtime.zero.gathering.gathered_parameters import hold_whole, let_go
from deepspeed.runtime.zero.parameters.shards import ShardMemory
from deepspeed.runtime.zero.parameters.zero_parameter import (
    become_plain,
    cut_parameters,
    is_zero_param,
    record_of,
)
from deepspeed.utils.tensor_fragment import logical_shape

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.config_models.features import TPTrainingConfig


# Elements that are whole at once.
WHOLE_NUMEL = 1 << 24


@dataclass(frozen=True, eq=False)
class TensorRanks:
    """An mpu: rank = data rank * size + tensor rank. `data_group` holds the same slices;
    `cuts_models`: the engine has cut the layers, and an uncut model is not for these ranks.
    """

    size: int
    tensor_group: Any
    data_group: Any
    cuts_models: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorRanks:
        return self

    def get_tensor_model_parallel_group(self) -> Any:
        return self.tensor_group

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(group=self.tensor_group)

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.size

    get_model_parallel_group = get_tensor_model_parallel_group
    get_model_parallel_rank = get_tensor_model_parallel_rank
    get_model_parallel_world_size = get_tensor_model_parallel_world_size

    def get_data_parallel_group(self) -> Any:
        return self.data_group

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(group=self.data_group)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(group=self.data_group)


def tensor_ranks(size: int) -> TensorRanks:
    """Make the mpu of `size` ranks per model, once. Collective over the world when first asked."""
    world = dist.get_world_size()
    if world % size:
        raise DeepSpeedConfigError(
            f"tensor_parallel.autotp_size: {size} does not divide the {world} ranks; use a size "
            "that does"
        )
    lists = rank_lists.optimizer_instances([tuple(range(world))], world // size)
    return group_store.made_once(
        ("autotp", size),
        lambda: TensorRanks(
            size, group_store.shared_group(lists.rows), group_store.shared_group(lists.columns)
        ),
    )


def mpu_of(model: nn.Module, block: TPTrainingConfig | None, mpu: object) -> Any:
    """Find who shares a model's layers: as it was cut, the client's mpu, neighbours, or None."""
    own, size = slices_of(model), 0 if block is None else block.autotp_size
    if own is not None:
        if mpu not in (None, own.mpu):
            raise DeepSpeedConfigError(
                f"mpu={type(mpu).__name__}: the model was cut for other ranks, by "
                "deepspeed.tp_model_init or an engine before; leave the mpu out"
            )
        mpu = own.mpu
    elif mpu is None and size > 1:
        return tensor_ranks(size)
    there = ParallelMap(mpu).tensor.size
    if size > 1 and there != size:
        raise DeepSpeedConfigError(
            f"tensor_parallel.autotp_size: {size}, but the "
            f"{'mpu' if own is None else 'model was cut for, or the mpu,'} has {there} "
            "tensor-parallel ranks; make them equal, or leave the mpu out"
        )
    return mpu


def cut_model(model: nn.Module, config: DeepSpeedConfig, mpu: object, device: torch.device) -> None:
    """Cut a model as the configuration of its engine says; see `cut_by`."""
    cut_by(model, config.tree.tensor_parallel, mpu, device, model_dtype(config))


def cut_by(
    model: nn.Module,
    block: TPTrainingConfig,
    mpu: Any,
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    """Cut a whole model over the tensor-parallel ranks in place and mark its slices, if the block
    says so and it is not cut yet. Parameters stay the same objects where they are. If something
    cannot be cut, nothing was changed.
    """
    if block.autotp_size < 2:
        return
    own = slices_of(model)
    if own is not None:
        own.check_same(_settings(block))
        return
    if isinstance(model, LayeredModule):
        raise DeepSpeedConfigError(
            f"tensor_parallel.autotp_size: {block.autotp_size} with a PipelineModule: its layers "
            "are not cut; write tensor-parallel layers and give the topology a model axis"
        )
    _check_dtype(block, dtype)
    refuse_trained(model, block.autotp_size)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    partition = None
    if block.partition_config is not None:
        partition = PartitionConfig(block.partition_config, model_type)
    plan = plan_of(model, block.autotp_size, block.preset_model, partition)
    ranks = SliceGroup(ParallelMap(mpu).tensor.group)
    whole = [param for param in model.parameters() if not is_zero_param(param)]
    broadcast_tensors((*whole, *model.buffers()), ranks.group, device)
    _apply(model, plan, ranks, block.tp_overlap_comm, mpu)
    ModelSlices(mpu, ranks.group, _slicing(model, plan), _settings(block)).put_on(model)


def _settings(block: TPTrainingConfig) -> dict[str, Any]:
    return {"preset_model": block.preset_model, "partition_config": block.partition_config}


def _check_dtype(block: TPTrainingConfig, dtype: torch.dtype | None) -> None:
    if dtype is None or "dtype" not in block.model_fields_set:
        return
    if parse_dtype(str(block.dtype), "tensor_parallel.dtype") != dtype:
        raise DeepSpeedConfigError(
            f"tensor_parallel.dtype: {block.dtype!r} conflicts with the model's {dtype}; enable "
            '"bf16" or "fp16", and leave the key out'
        )


@torch.no_grad()
def _apply(model: nn.Module, plan: Plan, ranks: SliceGroup, overlaps: bool, mpu: object) -> None:
    _keep_own(model, _cuts(plan), ranks, mpu)
    layers = {cut.module: cut for cut in plan.layers}  # one layer may have two names
    for cut in layers.values():
        kind = LinearAllreduce if cut.is_row else LinearLayer
        become(cut.module, kind, ranks, overlaps, _widths(cut, ranks.size))
    for embedding in plan.embeddings.values():
        embedding.embedding_dim = logical_shape(embedding.weight)[1]
    for name, scope in plan.scopes.items():
        share = Share.of_rank(plan.pieces[name], ranks.rank, ranks.size)
        for attribute, count in counts_of(scope).items():
            setattr(scope, attribute, share.of(count))
        if name in plan.attentions:
            plan.family.prepare(scope, share)
    for name in plan.partial:
        # Their gradients are parts, as those of Megatron's layer norms are.
        model.get_parameter(name).sequence_parallel = True  # type: ignore[attr-defined]  # a mark


def _widths(cut: LayerCut, size: int) -> tuple[int, ...] | None:
    if not cut.is_alone:
        return None
    return tuple(Share.of_rank(cut.pieces, rank, size).of(sum(cut.sizes)) for rank in range(size))


def _cut_parameters(cut: LayerCut) -> list[tuple[nn.Parameter, int]]:
    module: Any = cut.module
    found = [(module.weight, int(cut.is_row is not is_transposed(module)))]
    if module.bias is not None and not cut.is_row:
        found.append((module.bias, 0))
    return found


class _ParameterCut(NamedTuple):
    """The dimension, sizes of what lies behind one another in it, and pieces of each of these."""

    dim: int
    sizes: tuple[int, ...]
    pieces: int


def _cuts(plan: Plan) -> dict[nn.Parameter, _ParameterCut]:
    found: dict[nn.Parameter, _ParameterCut] = {}
    for cut in plan.layers:
        for param, dim in _cut_parameters(cut):
            found.setdefault(param, _ParameterCut(dim, cut.sizes, cut.pieces))
    for name, embedding in plan.embeddings.items():
        pieces = plan.pieces[name.rpartition(".")[0]]
        weight = cast(nn.Parameter, embedding.weight)
        found.setdefault(weight, _ParameterCut(1, (embedding.embedding_dim,), pieces))
    return found


def _keep_own(
    model: nn.Module, cuts: Mapping[nn.Parameter, _ParameterCut], ranks: SliceGroup, mpu: Any
) -> None:
    def own_part(param: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        if param not in cuts:
            return whole
        dim, sizes, pieces = cuts[param]
        share = Share.of_rank(pieces, ranks.rank, ranks.size)
        # A copy: the whole is to be let go.
        return torch.clone(
            own_slice("", whole, sizes, dim, share), memory_format=torch.contiguous_format
        )

    for param in cuts:
        if not is_zero_param(param):
            param.data = own_part(param, param.data)
            param.grad = None
    shard_anew(model, own_part, ranks.group, OptimizerInstances(ParallelMap(mpu).replicas.group))
    for param in cuts:
        param.tensor_model_parallel = True  # type: ignore[attr-defined]  # a mark


def _slicing(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """How the parameters are sliced, as checkpoints say it (`universal_checkpoint_info`)."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(f"{re.escape(name)}$")
    second: list[str] = []  # cut in dimension 1
    stacked: list[Mapping[str, Any]] = []
    dealt: dict[int, list[str]] = {}
    sliced: list[str] = []
    for param, (dim, sizes, pieces) in _cuts(plan).items():
        own = names[id(param)]
        sliced += own
        if pieces % plan.size:
            dealt.setdefault(pieces, []).extend(own)
        if len(sizes) > 1:
            shape = tuple(sizes if at == dim else -1 for at in range(len(logical_shape(param))))
            stacked.append({"patterns": own, "shape": shape, "partition_dim": dim})
        elif dim == 1:
            second += own
    # All others are whole on every rank.
    whole = f"(?!(?:{'|'.join(dict.fromkeys(sliced))}))"
    info: dict[str, Any] = {
        keys.UNIVERSAL_CHECKPOINT_VERSION_KEY: keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        keys.TP_REPLICATED_PARAMETER_PATTERNS: [whole],
        keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: list(dict.fromkeys(second)),
        keys.PARAMETER_WITH_SUB_PARAMS: stacked,
    }
    if dealt:
        info[keys.PARAMETER_WITH_PIECES] = [
            {"patterns": patterns, keys.PIECES: pieces} for pieces, patterns in dealt.items()
        ]
    return info


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
