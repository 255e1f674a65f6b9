"""What the manifest of a checkpoint says is in the files: every weight, every fragment of the
optimizer's state, random states.

Made from the engine, not from the files, so that the two can be held against each other. Which
ranks write which file is not known here: each rank describes all files whose content it has, and
`checkpoint.manifest.write_part` keeps those that the rank did write. What must be true of
descriptions is `checkpoint.verification`'s.

A rank's description is JSON:

    {"part": 0,
     "files": {
       "mp_rank_00_model_states.pt": {
         "weights": {"a.weight": [[4, 3], "bfloat16", "trained"],
                     "b.weight": [[4, 3], "bfloat16", "trained", "a.weight"]},
         "scheduler": "WarmupLR"},
       "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": {
         "slots": [{"fp32": "float32", "exp_avg": "float32"}],
         "fragments": [["a.weight", 0, 12, 0]],
         "whole": false,
         "loss_scale": 1.0},
       "host_state_rank_0.pt": {"random": ["python", "numpy", "torch"], "dataloader": true}}}

where

    part       the model-parallel rank
    weights    shape, dtype, kind (trained, unused, frozen or buffer) and, of a tied weight, the
               name of the one that it is tied to
    slots      per-element state and its dtype
    fragments  parameter, first element, number of elements, which of the slots
    whole      true: what an earlier file has too is a copy

Experts are numbered over all ranks. "unused" requires gradients, but the optimizer has not got it;
"trained" is what the optimizer trains, also while it is frozen for some steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names, manifest
from deepspeed.checkpoint.experts import expert_number, expert_prefix, renumbered
from deepspeed.checkpoint.resharding.cuts import ParallelDegrees
from deepspeed.checkpoint.resharding.saved_optimizer import FP32, is_per_element
from deepspeed.git_version_info import version as __version__
from deepspeed.moe.expert_rows import first_element, whole_shape
from deepspeed.runtime.checkpointing.model_files import ModelFiles
from deepspeed.runtime.checkpointing.optimizer_files import OptimizerFiles
from deepspeed.runtime.checkpointing.training_state import TrainingState, state_layout
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.sharding.model_slices import slices_of
from deepspeed.utils.tensor_fragment import own_shard


def model_state(
    state: TrainingState,
    files: ModelFiles,
    optimizer: OptimizerFiles,
    weights: dict[str, Any],
    exclude_frozen_parameters: bool,
) -> dict[str, Any]:
    """Content of this rank's model file, but for what clients add."""
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
        # Readers take it for the number of optimizer files: of one optimizer instance.
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
    trained = optimizer.trained  # of which some may be frozen now
    untrained = [pair for pair in module.named_parameters() if pair[1] not in trained]
    frozen = [pair for pair in untrained if not pair[1].requires_grad and not exclude_frozen]
    if layout.has_weights:
        # What requires a gradient and is not the optimizer's would be nowhere else.
        frozen += [pair for pair in untrained if pair[1].requires_grad]
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


TRAINED, UNUSED, FROZEN, BUFFER = "trained", "unused", "frozen", "buffer"


def describe(
    state: TrainingState,
    model: ModelFiles,
    optimizer: OptimizerFiles,
    exclude_frozen_parameters: bool = False,
) -> dict[str, Any]:
    """What this rank knows of the files that are written for it, without a collective."""
    part = state.parallel_map.model.rank
    model_file = optimizer.model_file
    weights = _weights(model, optimizer, model_file, exclude_frozen_parameters)
    files: dict[str, dict[str, Any]] = {name: {"weights": found} for name, found in weights.items()}
    if optimizer.sequence is not None:
        files.setdefault(optimizer.file or model_file, {}).update(
            _state(optimizer.sequence, optimizer)
        )
    scheduler = state.lr_scheduler
    files.setdefault(model_file, {})["scheduler"] = (
        None if scheduler is None else type(scheduler).__name__
    )
    random = ["python", "numpy", "torch"]
    if get_accelerator().device_name() != "cpu":
        random.append("device")
    has_position = hasattr(state.training_dataloader, "state_dict")
    files[file_names.host_file(dist.get_rank())] = {"random": random, "dataloader": has_position}
    return {"part": part, "files": files}


def describe_whole(
    state: TrainingState, tag: str, client_state: Iterable[str], save_latest: bool
) -> dict[str, Any]:
    """What all ranks know alike, for the head of the manifest."""
    shard = state_layout(state).shard
    return {
        "tag": tag,
        "ds_version": __version__,
        "global_steps": state.global_steps,
        "global_samples": state.global_samples,
        "skipped_steps": state.skipped_steps,
        "world_size": dist.get_world_size(),
        "cut": ParallelDegrees.of_this_run(state.parallel_map)._asdict(),
        "shards": 1 if shard is None else shard.count,
        "client_state": sorted(map(str, client_state)),
        "latest": save_latest,
    }


def _weights(
    files: ModelFiles, optimizer: OptimizerFiles, model_file: str, without_frozen: bool
) -> dict[str, Any]:
    """Name of a file -> name of a weight -> shape, dtype, kind and, if it is tied, to which."""
    trained = optimizer.trained
    layers = files.layered.files_of_layers() if files.is_layered else {}
    found: dict[str, dict[str, Any]] = (
        {name: {} for name in layers} if files.is_layered else {model_file: {}}
    )
    names: dict[int, str] = {}
    for local, tensor in files.module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue  # what a module keeps by get_extra_state()
        name = renumbered(local, files.experts.first)
        kind = _kind(tensor, tensor in trained)
        if without_frozen and kind != BUFFER and not tensor.requires_grad:
            continue
        entry = [list(whole_shape(tensor)), str(tensor.dtype).removeprefix("torch."), kind]
        first = names.setdefault(id(tensor), name)
        for file in _files_of(name, files, layers, model_file):
            found.setdefault(file, {})[name] = entry if first == name else [*entry, first]
    return found


def _kind(tensor: torch.Tensor, is_trained: bool) -> str:
    if not isinstance(tensor, torch.nn.Parameter):
        return BUFFER
    if is_trained:
        return TRAINED
    return UNUSED if tensor.requires_grad else FROZEN


def _files_of(
    name: str, files: ModelFiles, layers: Mapping[str, str], model_file: str
) -> list[str]:
    prefix, number = expert_prefix(name), expert_number(name)
    if prefix in files.experts.numbers and number is not None and not files.is_sharded:
        return [
            file_names.expert_file(
                files.experts.numbers[prefix],
                number,
                files.experts.layers[prefix].parallel_map.model.rank,
            )
        ]
    if not files.is_layered:
        return [model_file]
    return [file for file, layer in layers.items() if name.startswith(f"{layer}.")]


def _state(sequence: StepSequence, optimizer: OptimizerFiles) -> dict[str, Any]:
    """Slots and fragments of one optimizer file."""
    slots: list[dict[str, str]] = []
    fragments = []
    for own in sequence.own_tensors():
        if own.beside is not None:
            continue  # its elements are in shards
        sizes, is_scalar = (own.tensor.numel(), own.used), own.tensor.dim() == 0
        found = {FP32: "float32"} if optimizer.layout.has_masters else {}
        for key, value in sequence.state.get(own.tensor, {}).items():
            fits = not own.is_whole or getattr(value, "shape", None) == own.shape
            if fits and is_per_element(key, value, sizes, is_scalar):
                found[key] = str(value.dtype).removeprefix("torch.")
        if found not in slots:
            slots.append(found)
        for run in own.runs:
            name = renumbered(optimizer.names.get(run.param, ""), optimizer.experts.first)
            if name:
                start = first_element(run.param) + run.start
                fragments.append([name, start, run.numel, slots.index(found)])
    return {
        "slots": slots,
        "fragments": fragments,
        "whole": optimizer.layout.shard is None,
        "loss_scale": float(sequence.loss_scale),
    }
