"""What the engine does to a model before training: cast, spread experts, make all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.checkpoint.experts import expert_prefix
from deepspeed.comm.parallel_map import OptimizerInstances, ParallelMap
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigError, parse_dtype
from deepspeed.runtime.sharding.flattening import in_pieces
from deepspeed.runtime.sharding.model_ranks import ModelRanks
from deepspeed.runtime.zero.parameters.zero_parameter import is_zero_param
from deepspeed.utils.logging import warn_once

# Modules whose parameters may travel in the autocast dtype when the configuration does not name
# any.
LOWER_PRECISION_SAFE_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Elements broadcast at once when ranks are made alike.
BROADCAST_NUMEL = 64 * 1024 * 1024


def model_dtype(config: DeepSpeedConfig) -> torch.dtype:
    """Read in which dtype the configuration trains the model."""
    if config.tree.bf16.enabled:
        return torch.bfloat16
    return torch.float16 if config.tree.fp16.enabled else torch.float32


def buffer_dtype(config: DeepSpeedConfig) -> torch.dtype | None:
    """Read what floating-point buffers are cast to; None: each keeps its dtype."""
    return parse_dtype(config.tree.data_types.buffer_dtype)


def cast_module(
    model: nn.Module, dtype: torch.dtype | None, buffers: torch.dtype | None = None
) -> None:
    """Cast floating-point parameters to `dtype` and buffers to `buffers` in place; None leaves
    them.

    Buffers are what was computed once and is only read (rotary frequencies: positions beyond 256
    are not there in bf16), or what is summed up over a run (statistics of batches), so they do not
    follow the parameters.
    """
    kept = {id(buffer) for buffer in model.buffers()}

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        wanted = buffers if id(tensor) in kept else dtype
        return tensor.to(wanted) if wanted is not None and tensor.is_floating_point() else tensor

    # What `Module.to` is made of: gradients follow, and modules that keep views make them anew.
    model._apply(cast)


def cast_model(model: nn.Module, config: DeepSpeedConfig, in_place: bool = True) -> torch.dtype:
    """Cast floating parameters to the configured dtype, and buffers if `data_types.buffer_dtype` is
    given; unless `in_place`, only check, since who cuts the parameters casts them.

    Returns:
        The dtype in which the model is trained: the configuration's, or without a precision block
            that of parameters which are all in one half precision.

    Raises:
        ValueError: If neither fp16 nor bf16 is enabled, ZeRO shards, and trainable parameters are
            of several dtypes.
        DeepSpeedConfigError: For a model that `zero.Init` has cut, below stage 3.
    """
    dtype = model_dtype(config)
    _check_param_dtype(config, dtype)
    if in_place:
        _refuse_shards(model, int(config.tree.zero_optimization.stage))
        cast_module(model, dtype if dtype != torch.float32 else None, buffer_dtype(config))
    return dtype if dtype != torch.float32 else _given_dtype(model, config)


def _refuse_shards(model: nn.Module, stage: int) -> None:
    cut = next((name for name, param in model.named_parameters() if is_zero_param(param)), None)
    if cut is not None:
        raise DeepSpeedConfigError(
            f"zero_optimization.stage: {stage}, but {cut} is sharded, as deepspeed.zero.Init makes "
            "it: use stage 3, or give zero.Init this configuration (below stage 3 it shards "
            "nothing)"
        )


def _given_dtype(model: nn.Module, config: DeepSpeedConfig) -> torch.dtype:
    """The dtype of the trainable parameters, which no precision block asks to change."""
    by_dtype: dict[torch.dtype, str] = {}
    for name, param in model.named_parameters():
        if param.requires_grad and param.is_floating_point():
            by_dtype.setdefault(param.dtype, name)
    half = next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in by_dtype), None)
    if half is None:
        return torch.float32
    stage = int(config.tree.zero_optimization.stage)
    if len(by_dtype) > 1 and stage > 0:
        raise ValueError(
            f"neither bf16 nor fp16 is enabled, and trainable parameters are of {len(by_dtype)} "
            f"dtypes ({', '.join(by_dtype.values())}, ...), which zero_optimization.stage {stage} "
            'does not shard together: set "bf16": {"enabled": true} (or fp16), or pass the model '
            "in one dtype"
        )
    block = "bf16" if half == torch.bfloat16 else "fp16"
    lacks = ["fp32 master weights"] * (stage == 0) + ["a loss scale"] * (block == "fp16")
    warn_once(
        f"{by_dtype[half]} is in {half} and no precision block is enabled: parameters are trained "
        + (f"without {' and '.join(lacks)}" if lacks else "with fp32 master weights")
        + f'. Set "{block}": {{"enabled": true}} {"for these" if lacks else "to say so"}, or pass '
        "the model in fp32"
    )
    return half if len(by_dtype) == 1 else torch.float32


def _check_param_dtype(config: DeepSpeedConfig, dtype: torch.dtype) -> None:
    """Refuse `data_types.param_dtype` beside a precision block that says otherwise."""
    name = config.tree.data_types.param_dtype
    if parse_dtype(name, "data_types.param_dtype") in (None, dtype):
        return
    raise DeepSpeedConfigError(
        f"data_types.param_dtype: {name!r} conflicts with the enabled precision ({dtype}); set the "
        'matching "fp16" or "bf16" block, or leave the key out'
    )


def make_parallel_groups(model: nn.Module, config: DeepSpeedConfig) -> None:
    """Have modules that spread their work over ranks make groups. Collective over the world."""
    for module in model.modules():
        make = getattr(module, "set_deepspeed_parallelism", None)
        if make is not None:
            make(config.tree.use_data_before_expert_parallelism)


def spread_experts(
    model: nn.Module, config: DeepSpeedConfig, parallel_map: ParallelMap, device: torch.device
) -> None:
    """Spread the model's own experts over ranks as `expert_parallel` says, in place: each rank
    keeps some of those that the first rank has. What `zero.Init` has cut over all ranks is whole
    module by module, and cut over those that hold the same experts. Collective over the world.
    """
    block = config.tree.expert_parallel
    if not block.enabled or block.autoep_size == 1:
        return
    # optional: only a model with experts needs them
    from deepspeed.moe import auto_ep
    from deepspeed.runtime.zero.model_sharding import cut_anew

    size = block.autoep_size
    auto_ep.check_spread(model, size, parallel_map)
    parallel_map.make_experts(size, config.tree.use_data_before_expert_parallelism)
    for module in auto_ep.spreadable(model):
        params = list(module.parameters())
        sharers = OptimizerInstances(parallel_map.experts(f"ep_size_{size}").data.group)
        with cut_anew(params, sharers):
            broadcast_tensors(params, parallel_map.replicas.group, device)
            auto_ep.spread(module, size, parallel_map)


def broadcast_model(model: nn.Module, ranks: ModelRanks) -> None:
    """Give all ranks that hold a parameter or buffer the value of the first of them. Who holds an
    expert's buffers its parameters say. Those of ZeRO stage 3 have had it since they were cut.
    """
    families: dict[Any, list[torch.Tensor]] = {}
    of_experts: dict[str | None, dist.Group] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        holders, layer = ranks.holders(tensor), expert_prefix(name)
        if layer is not None:
            holders = of_experts.setdefault(layer, holders)
        if not is_zero_param(tensor):
            families.setdefault(holders, []).append(tensor)
    for group, tensors in families.items():
        broadcast_tensors(tensors, group)


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor], group: dist.Group, device: torch.device | None = None
) -> None:
    """Give all ranks of a group the values that its first rank has, in flat pieces per dtype, from
    `device`; tensors on the meta device are left out.
    """
    if dist.get_world_size(group=group) < 2:
        return
    families: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and tensor.device.type != "meta":
            families.setdefault(tensor.dtype, []).append(tensor.data)
    source = dist.get_global_rank(group, 0)
    for family in families.values():
        for piece in in_pieces(family, BROADCAST_NUMEL):
            flat = torch.cat([tensor.reshape(-1).to(device) for tensor in piece])
            # gloo of torch 2.6 sends no complex numbers.
            sent = torch.view_as_real(flat) if flat.is_complex() else flat
            dist.broadcast(sent, src=source, group=group)
            parts = flat.split([tensor.numel() for tensor in piece])
            for tensor, value in zip(piece, parts, strict=True):
                tensor.copy_(value.view(tensor.shape))


def comm_dtype_lookup(
    model: nn.Module, config: DeepSpeedConfig
) -> Callable[[nn.Parameter], torch.dtype | None] | None:
    """Find whose gradients travel in torch_autocast's dtype: those of precision-safe modules."""
    if not config.torch_autocast_enabled or config.communication_data_type is not None:
        return None
    named = config.torch_autocast_lower_precision_safe_modules
    dtype = config.torch_autocast_dtype
    safe: set[int] = set()
    for module in model.modules():
        cls = type(module)
        is_safe = isinstance(module, LOWER_PRECISION_SAFE_MODULES)
        if named is not None:
            is_safe = f"{cls.__module__}.{cls.__qualname__}" in named
        if is_safe:
            safe.update(id(param) for param in module.parameters(recurse=False))

    def lookup(param: nn.Parameter) -> torch.dtype | None:
        return dtype if id(param) in safe else None

    return lookup
