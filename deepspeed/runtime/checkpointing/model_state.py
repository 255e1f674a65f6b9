"""What stands in the model file: weights, counters, the schedule, and what tools need to know to
make whole weights of optimizer shards.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import manifest
from deepspeed.checkpoint.parallel_degrees import ParallelDegrees
from deepspeed.git_version_info import version as __version__
from deepspeed.moe.expert_rows import whole_shape
from deepspeed.runtime.checkpointing.model_files import ModelFiles
from deepspeed.runtime.checkpointing.optimizer_files import OptimizerFiles
from deepspeed.runtime.checkpointing.training_state import TrainingState
from deepspeed.runtime.sharding.model_slices import slices_of
from deepspeed.utils.tensor_fragment import own_shard


def model_state(
    state: TrainingState,
    files: ModelFiles,
    optimizer: OptimizerFiles,
    weights: dict[str, Any],
    exclude_frozen_parameters: bool,
) -> dict[str, Any]:
    """Content of this rank's model file, but for what clients add.

    Args:
        state: The engine.
        files, optimizer: Its files.
        weights: The model's state dict.
        exclude_frozen_parameters: Frozen parameters are left out of it.
    """
    layout, degrees = optimizer.layout, ParallelDegrees.of_this_run(state.parallel_map)
    shard, schedule = layout.shard, state.lr_scheduler
    content = {
        keys.MODULE: files.in_model_file(weights),
        keys.BUFFER_NAMES: [name for name, _ in state.module.named_buffers()],
        keys.OPTIMIZER: optimizer.in_model_file(),
        # Offline tools cut the concatenated shards by them.
        keys.PARAM_SHAPES: None if shard is None else optimizer.param_shapes(),
        **_frozen_state(state.module, files, optimizer, exclude_frozen_parameters),
        keys.SHARED_PARAMS: None if shard is None else _shared_params(state.module),
        keys.LR_SCHEDULER: schedule.state_dict() if schedule is not None else None,
        keys.DATA_SAMPLER: None,
        keys.RANDOM_LTD: None,
        keys.SPARSE_TENSOR_MODULE_NAMES: set(),
        keys.SKIPPED_STEPS: state.skipped_steps,
        keys.GLOBAL_STEPS: state.global_steps,
        keys.GLOBAL_SAMPLES: state.global_samples,
        # Readers take it for the number of optimizer files: with optimizer instances those of
        # one instance.
        keys.DP_WORLD_SIZE: state.parallel_map.data.size if shard is None else shard.count,
        keys.MP_WORLD_SIZE: degrees.parts,
        keys.CHECKPOINT_PARALLEL_DIMS: {
            keys.CHECKPOINT_PP_DEGREE: degrees.stages,
            keys.CHECKPOINT_TP_DEGREE: degrees.tensor,
        },
        keys.DS_CONFIG: state.config,
        keys.DS_VERSION: __version__,
        keys.MANIFEST_VERSION: manifest.VERSION,
    }
    slices = slices_of(state.module)
    if slices is not None:
        content[keys.UNIVERSAL_CHECKPOINT_INFO] = slices.info
    if files.experts.layers:
        content[keys.NUM_EXPERTS] = files.experts.counts
        if files.is_sharded:
            content[keys.EXPERT_GROUP_SIZES] = files.experts.group_sizes
    if files.experts.packed:
        content[keys.AUTOEP_LAYERS_KEY] = files.experts.packed_description()
    return content


def _frozen_state(
    module: nn.Module, files: ModelFiles, optimizer: OptimizerFiles, exclude_frozen: bool
) -> dict[str, Any]:
    layout = optimizer.layout
    if not layout.lists_frozen:
        return {keys.FROZEN_PARAM_SHAPES: None, keys.FROZEN_PARAM_FRAGMENTS: None}
    frozen = [
        (name, param)
        for name, param in module.named_parameters()
        if not param.requires_grad and not exclude_frozen
    ]
    if layout.has_weights:
        # What requires a gradient and is not the optimizer's would be nowhere else.
        trained = optimizer.trained
        frozen += [
            (name, param)
            for name, param in module.named_parameters()
            if param.requires_grad and param not in trained
        ]
    return {
        keys.FROZEN_PARAM_SHAPES: OrderedDict((name, whole_shape(param)) for name, param in frozen),
        keys.FROZEN_PARAM_FRAGMENTS: OrderedDict(
            (name, files.gathered.get(name, own_shard(param))) for name, param in frozen
        ),
    }


def _shared_params(module: nn.Module) -> dict[str, str]:
    """Name -> first name, for parameters that occur under several names."""
    first: dict[int, str] = {}
    shared = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if id(param) in first:
            shared[name] = first[id(param)]
        else:
            first[id(param)] = name
    return shared
