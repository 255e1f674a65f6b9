"""Names of a checkpoint's files and folders: how each is made, and how its numbers are read back.

Everyone who writes, finds or sorts such files takes their names from here; `constants` has the
prefixes, which are upstream's names.

In the folder of a tag (MM: model-parallel rank, RR: rank, LL: layer):

    mp_rank_MM_model_states.pt                        a part of the model
    zero_pp_rank_R_mp_rank_MM_model_states.pt         the same of a rank of stage 3, no weights
    [bf16_]zero_pp_rank_R_mp_rank_MM_optim_states.pt  a ZeRO rank's shard of the optimizer
    expp_rank_E_mp_rank_MM_optim_states.pt            an expert rank's whole optimizer, at stage 0
    layer_LL[-model_TT]-model_states.pt               a layer of a pipeline
    layer_L_expert_E_mp_rank_MM_model_states.pt       an expert
    host_state_rank_R.pt                              what a process needs to go on bit-equal
    window_rank_R.pt                                  what a process has summed since the last step,
                                                      saved inside an accumulation window
    manifest.json                                     what is in all of them
    NAME.dcp                                          tensors of NAME.pt, as the writer "dcp" saves
    zero/PARAMETER/STATE.pt                           in universal checkpoints only

Folders and files whose names begin with a dot are not published.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from deepspeed.checkpoint.constants import (
    BF16_ZERO_FILE_PREFIX,
    LAYER_FILE_PREFIX,
    MODEL_FILE_PREFIX,
    MODEL_FILE_SUFFIX,
    OPTIM_FILE_SUFFIX,
    ZERO_FILE_PREFIX,
)

MANIFEST = "manifest.json"
# What makes a file part of a checkpoint: readers take what they find by such names.
CHECKPOINT_SUFFIXES = (".pt", ".distcp")
_EXPERT_OPTIMIZER_FILE_PREFIX = "expp_rank_"
# Not upstream's: random states, and the position in the data.
_HOST_FILE_PREFIX = "host_state_rank_"
# Nor this: the gradients of an accumulation window.
_WINDOW_FILE_PREFIX = "window_rank_"
_MODEL_STATES = "model_states.pt"
_STATE_SUFFIX = ".pt"
_REMOVED = ".removed"

_OF_RANK = rf"(\d+)_{MODEL_FILE_PREFIX}(\d+){re.escape(OPTIM_FILE_SUFFIX)}"
_OPTIMIZER_FILE = re.compile(f"(?:{BF16_ZERO_FILE_PREFIX}|{ZERO_FILE_PREFIX}){_OF_RANK}")
_EXPERT_OPTIMIZER_FILE = re.compile(f"{_EXPERT_OPTIMIZER_FILE_PREFIX}{_OF_RANK}")
_LAYER_FILE = re.compile(
    rf"{LAYER_FILE_PREFIX}(\d+)-(?:.*\bmodel_(\d+)-)?{re.escape(_MODEL_STATES)}"
)
_EXPERT_FILE = re.compile(
    rf"{LAYER_FILE_PREFIX}(\d+)_expert_(\d+)_{MODEL_FILE_PREFIX}(\d+){re.escape(MODEL_FILE_SUFFIX)}"
)


# Parts of the model


def model_file(model_parallel_rank: int) -> str:
    """Name of the model-states file."""
    return f"{MODEL_FILE_PREFIX}{model_parallel_rank:02d}{MODEL_FILE_SUFFIX}"


def stage3_model_file(data_parallel_rank: int, model_parallel_rank: int) -> str:
    """Name of the model-states file that a rank of ZeRO stage 3 writes."""
    return f"{ZERO_FILE_PREFIX}{data_parallel_rank}_{model_file(model_parallel_rank)}"


def is_model_file(name: str) -> bool:
    """Whether it is one of `model_file`."""
    return name.startswith(MODEL_FILE_PREFIX) and name.endswith(MODEL_FILE_SUFFIX)


def is_stage3_model_file(name: str) -> bool:
    """Whether it is one of `stage3_model_file`."""
    return name.startswith(ZERO_FILE_PREFIX) and name.endswith(MODEL_FILE_SUFFIX)


def layer_id(layer: int) -> str:
    """Name's beginning; the layer is numbered in the whole model."""
    return f"{LAYER_FILE_PREFIX}{layer:02d}"


def layer_file(layer_id: str, coordinates: str) -> str:
    """Name of a pipeline layer's file; `coordinates`: the rank's in the topology (`model_00`)."""
    return f"{layer_id}{'-' if coordinates else ''}{coordinates}-{_MODEL_STATES}"


def layer_file_glob(layer: int) -> str:
    """Pattern for `glob` of a layer's files, of all tensor-parallel ranks."""
    return f"{layer_id(layer)}-*{_MODEL_STATES}"


class LayerFile(NamedTuple):
    """What the name of a pipeline layer's file says."""

    layer: int
    tensor_parallel_rank: int


def parse_layer_file(name: str) -> LayerFile | None:
    """What the name says; None if it is another kind of file's."""
    match = _LAYER_FILE.fullmatch(name)
    return None if match is None else LayerFile(int(match[1]), int(match[2] or 0))


def expert_file(moe_layer: int, expert: int, model_parallel_rank: int) -> str:
    """Name of an expert's file; layers with experts and all their experts count from 0."""
    return (
        f"{LAYER_FILE_PREFIX}{moe_layer}_expert_{expert}"
        f"_{MODEL_FILE_PREFIX}{model_parallel_rank:02d}{MODEL_FILE_SUFFIX}"
    )


class ExpertFile(NamedTuple):
    """What the name of an expert's file says."""

    moe_layer: int
    expert: int
    model_parallel_rank: int


def parse_expert_file(name: str) -> ExpertFile | None:
    """What the name says; None if it is another kind of file's."""
    match = _EXPERT_FILE.fullmatch(name)
    return None if match is None else ExpertFile(*map(int, match.groups()))


def is_layer_or_expert_file(name: str) -> bool:
    """Whether it is a file of a pipeline's layer or of an expert."""
    return name.startswith(LAYER_FILE_PREFIX) and name.endswith(_MODEL_STATES)


# The optimizer


def optimizer_file(data_parallel_rank: int, model_parallel_rank: int, bf16: bool) -> str:
    """Name of a ZeRO rank's optimizer-states file."""
    prefix = BF16_ZERO_FILE_PREFIX if bf16 else ZERO_FILE_PREFIX
    return f"{prefix}{_of_rank(data_parallel_rank, model_parallel_rank)}"


def expert_optimizer_file(expert_parallel_rank: int, model_parallel_rank: int) -> str:
    """Name of an expert rank's optimizer-states file, of a model with experts at stage 0."""
    return f"{_EXPERT_OPTIMIZER_FILE_PREFIX}{_of_rank(expert_parallel_rank, model_parallel_rank)}"


def _of_rank(rank: int, model_parallel_rank: int) -> str:
    return f"{rank}_{MODEL_FILE_PREFIX}{model_parallel_rank:02d}{OPTIM_FILE_SUFFIX}"


class OptimizerFile(NamedTuple):
    """Numbers in a name; `rank`: data-parallel of a ZeRO rank, expert-parallel of an expert's."""

    rank: int
    model_parallel_rank: int


def parse_optimizer_file(name: str) -> OptimizerFile | None:
    """What the name says; None if it is not a ZeRO rank's."""
    match = _OPTIMIZER_FILE.fullmatch(name)
    return None if match is None else OptimizerFile(*map(int, match.groups()))


def parse_expert_optimizer_file(name: str) -> OptimizerFile | None:
    """What the name says; None if it is not an expert rank's."""
    match = _EXPERT_OPTIMIZER_FILE.fullmatch(name)
    return None if match is None else OptimizerFile(*map(int, match.groups()))


# The process


def host_file(global_rank: int) -> str:
    """Name of a process's own file."""
    return f"{_HOST_FILE_PREFIX}{global_rank}{_STATE_SUFFIX}"


def is_host_file(name: str) -> bool:
    """Whether it is one of `host_file`."""
    return name.startswith(_HOST_FILE_PREFIX) and name.endswith(_STATE_SUFFIX)


def window_file(global_rank: int) -> str:
    """Name of the file with a process's gradients of an accumulation window."""
    return f"{_WINDOW_FILE_PREFIX}{global_rank}{_STATE_SUFFIX}"


# Parameters of universal checkpoints


def state_file(slot: str) -> str:
    """Name of the file of one kind of a parameter's state, in the parameter's folder."""
    return f"{slot}{_STATE_SUFFIX}"


def parse_state_file(name: str) -> str | None:
    """The kind of state; None if the file is none."""
    return name.removesuffix(_STATE_SUFFIX) if name.endswith(_STATE_SUFFIX) else None


def slice_file(slot: str) -> str:
    """Name of a tensor-parallel slice, which a conversion may leave for who debugs it."""
    return f"{slot}.00"


# Folders, and what is beside and below files


def default_tag(global_steps: int) -> str:
    """Name of the folder of a checkpoint that the client gives no name."""
    return f"global_step{global_steps}"


def dcp_folder(path: str) -> str:
    """Path of the folder with the tensors of a file that the writer "dcp" saved."""
    return f"{os.path.splitext(path)[0]}.dcp"


def manifest_part(rank: int) -> str:
    """Name of what a rank leaves for the manifest."""
    return f".manifest_part_{rank}.json"


def saving(name: str) -> str:
    """Name of a file or folder until all of it is written."""
    return f".{name}.saving"


def converting(tag: str) -> str:
    """Name of a universal checkpoint's folder until all of it is written."""
    return f".{tag}.converting"


def replaced(tag: str) -> str:
    """Name of the older folder while a newer one takes its place."""
    return f".{tag}.replaced"


def removed(tag: str) -> str:
    """Name of a folder that is being removed."""
    return f".{tag}{_REMOVED}"


def is_removed(name: str) -> bool:
    """Whether it is one of `removed`."""
    return name.startswith(".") and name.endswith(_REMOVED)
