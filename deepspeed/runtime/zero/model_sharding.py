"""Stage 3 takes a model: cuts what is not cut yet, and makes what gathers it. A plain model on the
host goes piece by piece, so that no device holds more than its shards and one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.parallel_map import OptimizerInstances, split_into_instances
from deepspeed.ops.state_files import StateFiles
from deepspeed.runtime.config_models.features import AioConfig
from deepspeed.runtime.config_models.zero import DeepSpeedZeroConfig, DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.sharding.flattening import in_pieces
from deepspeed.runtime.sharding.model_ranks import ModelRanks
from deepspeed.runtime.zero.gathering.gathered_parameters import hold_whole
from deepspeed.runtime.zero.gathering.shard_files import ReadSettings
from deepspeed.runtime.zero.gathering.units import GatherSettings, fine_grained
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.parameters.agreement import agree_on_parameters, described
from deepspeed.runtime.zero.parameters.shards import ON_DEVICE, ShardMemory
from deepspeed.runtime.zero.parameters.zero_parameter import (
    become_plain,
    cut_parameters,
    hide,
    is_zero_param,
    record_of,
    whole_value,
)
from deepspeed.utils.logging import warn_once
from deepspeed.utils.tensor_fragment import logical_shape
from deepspeed.utils.z3_leaf_module import (
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
)

# Elements that are cut at once.
CUT_NUMEL = 1 << 24


def shard_model(
    model: nn.Module,
    zero: DeepSpeedZeroConfig,
    aio: AioConfig,
    ranks: ModelRanks,
    dtype: torch.dtype,
    buffers: torch.dtype | None,
    device: torch.device | None,
) -> DeepSpeedZeRoOffload:
    """Shard a model for training or evaluation. All ranks call it.

    Args:
        model: The module; parameters may be cut already (`zero.Init`).
        buffers: What floating-point buffers are cast to; None: each keeps its dtype.
        device: Where whole parameters and buffers go; None: they stay where they are. Shards are
            there too, or on the host.
    """
    # As below stage 3: without a precision block parameters keep the dtype that they come with, of
    # which `cast_model` has looked at those that are trained.
    wanted = None if dtype == torch.float32 else dtype
    _refuse_stages(ranks)
    _refuse_beside_slices(zero, ranks)
    _refuse_experts(zero, ranks)
    _refuse_scripted(model)
    instances = ranks.parallel_map.optimizer_instances(zero.num_optimizer_instances)

    def sharers(param: nn.Parameter) -> OptimizerInstances:
        holders = ranks.holders(param)
        return instances if holders is ranks.replicas else OptimizerInstances(holders)

    named = [(name, described(param)) for name, param in model.named_parameters()]
    apart, everyone = "ranks have different models", ranks.everyone
    agree_on_parameters(named, ranks.replicas, "deepspeed.initialize", apart, told_too=everyone)
    _take_from_other_engines(model)
    memory = _shard_memory(zero, aio)
    _mark_leaves(model, zero.leaf_module)
    _mark_fine_grained(model, zero.module_granularity_threshold)
    direct = (dict.values(module._parameters) for module in model.modules())
    params = [param for own in direct for param in own if param is not None]

    def cut(chosen: Iterable[nn.Parameter]) -> None:
        # Experts are shared by fewer ranks than the rest.
        families: dict[OptimizerInstances, dict[nn.Parameter, None]] = {}
        for param in chosen:
            families.setdefault(sharers(param), {})[param] = None
        for shared_by, params in families.items():
            # One exchange for many modules: they are small, and every rank waits in each.
            for piece in in_pieces(params, CUT_NUMEL):
                cut_parameters(piece, shared_by, wanted, device, memory)
                for param in piece:
                    _refuse_other_cut(param, shared_by)
                    _move_shard(param, wanted, device, memory)

    cut(params)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kind = buffers if buffer.is_floating_point() else None
                module._buffers[name] = buffer.to(device=device, dtype=kind)
    names = {param: name for name, param in model.named_parameters()}
    settings = settings_of(zero, ranks.replicas, memory)
    return DeepSpeedZeRoOffload(model, instances, settings, names, cut)


@contextmanager
def cut_anew(params: Sequence[nn.Parameter], sharers: OptimizerInstances) -> Iterator[None]:
    """Have parameters ordinary and whole inside, of which those that `zero.Init` has cut are cut
    for other ranks afterwards, with the elements that they have then. All ranks they are cut for
    enter it.
    """
    cut = [param for param in params if is_zero_param(param)]
    for param in cut:
        if record_of(param).unit is not None:
            raise DeepSpeedConfigError(
                f"expert_parallel: an engine before this one shards {record_of(param).label} (ZeRO "
                "stage 3) over all ranks; call its destroy() first"
            )
    hold_whole(cut)
    for param in cut:
        become_plain(param, whole_value(param))
    yield
    cut_parameters(cut, sharers)


def settings_of(
    zero: DeepSpeedZeroConfig, group: dist.Group, memory: ShardMemory
) -> GatherSettings:
    """Read when parameters are whole, and who keeps copies. Collective the first time."""
    world, size = dist.get_world_size(group=group), zero.zero_hpz_partition_size
    # Where a node is all of them, all have all shards already.
    near = split_into_instances(group, world // size).inside if 1 < size < world else None
    return GatherSettings(
        param_persistence=zero.param_persistence_threshold,
        model_persistence=zero.model_persistence_threshold,
        prefetch=zero.prefetch_bucket_size,
        max_live=zero.max_live_parameters,
        max_reuse=zero.max_reuse_distance,
        by_broadcast=not zero.allgather_partitions,
        overlap=bool(zero.overlap_comm),
        loads=memory.on_host,
        reads=_read_settings(zero, memory),
        fusion=min(
            zero.unit_fusion_size,
            zero.prefetch_bucket_size,
            zero.reduce_bucket_size,
            zero.max_live_parameters,
        ),
        secondary_group=near,
    )


def _mark_leaves(model: nn.Module, leaves: DeepSpeedZeroLeafModuleConfig) -> None:
    """Mark what the configuration names, and warn of what it names that the model has not."""
    classes = [one for one in leaves.classes if not set_z3_leaf_modules(model, [one], False)]
    _, names = set_z3_leaf_modules_by_name(model, leaves.names, raise_if_not_found=False)
    endings = leaves.name_suffixes
    _, suffixes = set_z3_leaf_modules_by_suffix(model, endings, raise_if_not_found=False)
    for key, absent in (("classes", classes), ("names", names), ("name_suffixes", suffixes)):
        if absent and key in leaves.model_fields_set:
            warn_once(f"zero_optimization.leaf_module.{key}: the model has no module of {absent}")


def _mark_fine_grained(model: nn.Module, threshold: int) -> None:
    if not threshold:
        return
    fine = fine_grained(model, lambda param: logical_shape(param).numel(), threshold)
    for module in fine:
        set_z3_leaf_module(module, True)
    if not fine:
        warn_once(
            f"zero_optimization.stage3_module_granularity_threshold: {threshold} has no effect: no "
            "module has so few elements per module in it"
        )


def _shard_memory(zero: DeepSpeedZeroConfig, aio: AioConfig) -> ShardMemory:
    offload = zero.offload_param
    if offload is None or offload.device == OffloadDeviceEnum.none:
        return ON_DEVICE
    in_files = offload.device == OffloadDeviceEnum.nvme
    files = StateFiles.configured(offload.nvme_path, aio) if in_files else None
    return ShardMemory(True, offload.pin_memory, files)


def _read_settings(zero: DeepSpeedZeroConfig, memory: ShardMemory) -> ReadSettings | None:
    offload = zero.offload_param
    if offload is None or memory.files is None:
        return None
    buffers = offload.buffer_count, offload.buffer_size
    return ReadSettings(memory.files.make_handle, *buffers, memory.pinned, offload.max_in_cpu)


def _refuse_stages(ranks: ModelRanks) -> None:
    known = ranks.parallel_map
    if known.pipe.size > 1 or known.model.size != known.tensor.size:
        raise DeepSpeedConfigError(
            "zero_optimization.stage: 3 with a model whose stages are on other ranks (pipeline) is "
            "not supported; use stage 1 or 2"
        )


def _refuse_beside_slices(zero: DeepSpeedZeroConfig, ranks: ModelRanks) -> None:
    """Refuse what would divide the ranks that hold the same slices once more."""
    if ranks.tensor_group is None:
        return
    size = ranks.parallel_map.tensor.size
    if zero.zero_hpz_partition_size > 1:
        raise DeepSpeedConfigError(
            f"zero_optimization.zero_hpz_partition_size: {zero.zero_hpz_partition_size} with "
            f"tensor parallelism over {size} ranks is not supported; leave it out"
        )
    if ranks.experts:
        raise DeepSpeedConfigError(
            f"zero_optimization.stage: 3 with experts (groups {sorted(ranks.experts)}) and tensor "
            f"parallelism over {size} ranks is not supported; use stage 1 or 2"
        )
    if ranks.parallel_map.sequence.size > 1:
        raise DeepSpeedConfigError(
            f"zero_optimization.stage: 3 with sequence parallelism and tensor parallelism over "
            f"{size} ranks is not supported; use stage 1 or 2, or leave one of them out"
        )


def _refuse_experts(zero: DeepSpeedZeroConfig, ranks: ModelRanks) -> None:
    """Refuse what groups anew: experts are on fewer ranks than the rest."""
    grouped = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size,
        "mics_shard_size or num_optimizer_instances, instances": zero.num_optimizer_instances,
    }
    for key, number in grouped.items():
        if number > 1 and ranks.experts:
            raise DeepSpeedConfigError(
                f"zero_optimization.{key}: {number} at stage 3 with experts (groups "
                f"{sorted(ranks.experts)}) is not supported; leave it out"
            )


def _refuse_scripted(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise DeepSpeedConfigError(
                f"zero_optimization.stage: 3 with {name or 'the model'}, which torch.jit has "
                "compiled, is not supported: its forward reads parameters where no hook can gather "
                "them. Give the module as it was before torch.jit.script, and use engine.compile() "
                "or torch.compile; or use stage 1 or 2"
            )


def _refuse_other_cut(param: nn.Parameter, shared_by: OptimizerInstances) -> None:
    """Refuse a parameter that was cut for other ranks: `zero.Init` had another configuration, or
    has cut experts before it was known which ranks share them.
    """
    cut_for = record_of(param).instances
    if cut_for != shared_by and _ranks_of(cut_for) != _ranks_of(shared_by):
        raise DeepSpeedConfigError(
            f"zero.Init (or an engine before this one) has cut {record_of(param).label} for ranks "
            f"{_ranks_of(cut_for)[0]}, but it is shared by {_ranks_of(shared_by)[0]}: give "
            "zero.Init the configuration of deepspeed.initialize, and make experts outside of it"
        )


def _ranks_of(instances: OptimizerInstances) -> tuple[list[int], list[int]]:
    """List who shares a parameter, and who has other copies too."""
    inside, everyone = (
        dist.get_all_ranks_from_group(group) for group in (instances.inside, instances.everyone)
    )
    return inside, everyone


def _take_from_other_engines(model: nn.Module) -> None:
    """Let an engine that has the model let go of it: training goes on in the new one alone."""
    units = (record_of(param).unit for param in model.parameters() if is_zero_param(param))
    for owner in {unit.resources.owner for unit in units if unit is not None}:
        if owner.give_up is None and owner.resources.are_away:
            raise RuntimeError(
                "deepspeed.initialize: an engine without an optimizer keeps the weights of this "
                "model off the device; call its reload_states() first"
            )
        if owner.give_up is not None:
            owner.give_up()
        owner.tell_edits(None)
        owner.detach()
        owner.was_taken = True


def _move_shard(
    param: nn.Parameter, dtype: torch.dtype | None, device: torch.device | None, memory: ShardMemory
) -> None:
    """Bring a shard that `zero.Init` left away to the model's precision, if any, and `memory`."""
    record = record_of(param)
    kind = dtype if record.shard.is_floating_point() else None
    whole_on = device or record.device
    moved = memory.place(record.shard.to(kind or record.shard.dtype), whole_on)
    if moved is not record.shard or record.device != whole_on:
        record.shard, record.device = moved, whole_on
        hide(param)
    record.is_read_by_iteration = False
