"""The command `ds_to_universal`: a universal checkpoint of an ordinary one, for a run with any
other number of ranks of any kind.

The layout is upstream's: `zero/<parameter>/<state>.pt` for every parameter, whole,
`zero/optimizer_state.pt` for what they have in common, the model files, and `latest_universal`
beside the folder. Layers, experts and host states are copied. The output is named when complete.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from deepspeed._lazy import lazy_attributes
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.file_writer import FileRecord
from deepspeed.checkpoint.files import (
    CheckpointError,
    has_weights_in_shards,
    lead_model_file,
    read_file,
    replace_folder,
    sync_folder,
)
from deepspeed.checkpoint.manifest import VERSION as MANIFEST_VERSION
from deepspeed.checkpoint.manifest import merge_parts, read_manifest, write_latest, write_part
from deepspeed.checkpoint.resharding.consolidation import ConsolidatedCheckpoint
from deepspeed.checkpoint.resharding.cuts import ParallelDegrees
from deepspeed.checkpoint.resharding.saved_optimizer import LABELS
from deepspeed.checkpoint.resharding.tensor_parallel import SlicePatterns
from deepspeed.checkpoint.torch_files import write_file
from deepspeed.checkpoint.verification import check_folder, raise_problems
from deepspeed.utils.logging import logger

# Upstream's further names here say what to use instead.
__getattr__ = lazy_attributes(__name__)

# State of one shard, and of a run at stage 0, which is not sharded and lies in the model file: a
# universal checkpoint has it by parameter.
_NOT_COMMON = (
    keys.BASE_OPTIMIZER_STATE,
    keys.SINGLE_PARTITION_OF_FP32_GROUPS,
    keys.PARAM_SLICE_MAPPINGS,
    keys.FP32_FLAT_GROUPS,
    keys.OPTIMIZER_STATE_DICT,
    keys.FP32_GROUPS,
    keys.FP32_GROUPS_FLAT,
    keys.PARAM_SHAPES,
    "state",
    *LABELS,
    keys.EXPERT_GROUP_SIZES,
    keys.DATA_BEFORE_EXPERTS,
)
_TEMPORARY = "tmp"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options; None reads the process's."""
    parser = argparse.ArgumentParser(
        prog="ds_to_universal", description="Make a universal checkpoint of a checkpoint folder."
    )
    parser.add_argument("--input_folder", required=True, help="folder of one checkpoint (a tag)")
    parser.add_argument(
        "--output_folder", required=True, help="folder to make; latest_universal beside it names it"
    )
    parser.add_argument(
        "--num_extract_workers",
        type=int,
        default=4,
        help="threads that read slices; each holds one kind of state of a parameter",
    )
    parser.add_argument(
        "--num_merge_workers", type=int, default=2, help="threads that join and write slices"
    )
    parser.add_argument(
        "--keep_temp_folder", action="store_true", help="also write slices to <output_folder>/tmp"
    )
    parser.add_argument(
        "--no_strict",
        dest="strict",
        action="store_false",
        help="allow patterns of universal_checkpoint_info that match nothing",
    )
    parser.add_argument(
        "--inject_missing_state",
        action="store_true",
        help="go on where tensor-parallel slices are not described: what all ranks have alike is "
        "one parameter, other slices are put together in dimension 0",
    )
    return parser.parse_args(arguments)


def main(args: argparse.Namespace) -> None:
    """Convert a folder.

    Args:
        args: As of `parse_arguments`.

    Raises:
        CheckpointError: The input is incomplete, damaged, holds objects that are not data, or does
            not say what is needed. Then there is no output, and an earlier one is untouched.
        ValueError: An option is out of range.
    """
    for option in ("num_extract_workers", "num_merge_workers"):
        if getattr(args, option) < 1:
            raise ValueError(f"--{option}: {getattr(args, option)} must be at least 1")
    source, output = os.path.abspath(args.input_folder), os.path.abspath(args.output_folder)
    if source == output:
        raise ValueError(f"--output_folder: {output} is the input folder; give another one")
    state = _read(source, args.inject_missing_state)
    names = state.names()
    if args.strict and (unmatched := state.patterns.unmatched(names)):
        raise CheckpointError(
            f"{keys.UNIVERSAL_CHECKPOINT_INFO}: no parameter matches {', '.join(unmatched)}; a "
            "mistyped pattern would slice parameters wrongly. Correct it, or give --no_strict"
        )
    output_dir, tag = os.path.split(output)
    temporary = os.path.join(output_dir, file_names.converting(tag))
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        written = _Output(temporary)
        _write(state, names, written, args)
        written.finish({"tag": tag, "latest": False, "universal": True})
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    replace_folder(temporary, output)
    write_latest(output_dir, tag, keys.LATEST_UNIVERSAL)
    logger.info(f"wrote {len(names)} parameters of {source} to {output}")


def command() -> None:
    """Entry point of the console command."""
    try:
        main(parse_arguments())
    except (CheckpointError, ValueError, OSError) as error:
        raise SystemExit(f"ds_to_universal: {error}") from error


def _read(source: str, inject: bool) -> ConsolidatedCheckpoint:
    model = read_file(lead_model_file(source), mmap=True)
    if os.path.isdir(os.path.join(source, keys.UNIVERSAL_FOLDER)):
        raise CheckpointError(f"{source} is a universal checkpoint already")
    told = model.get(keys.UNIVERSAL_CHECKPOINT_INFO) is not None
    if not (told or inject or ParallelDegrees.of_file(model).tensor == 1):
        raise CheckpointError(
            f"{source} has tensor-parallel slices and no {keys.UNIVERSAL_CHECKPOINT_INFO}, which "
            "says how they are put together. The client saves it by "
            "save_checkpoint(client_state={...}); give --inject_missing_state to go on without"
        )
    manifest = read_manifest(source)
    if manifest is not None:
        raise_problems(source, check_folder(source, manifest))
    if told:
        return ConsolidatedCheckpoint(source)
    return _with_inferred_patterns(ConsolidatedCheckpoint(source, {}))


def _with_inferred_patterns(state: ConsolidatedCheckpoint) -> ConsolidatedCheckpoint:
    """`state`, of whose slices nothing is told: those that are equal in all their state are copies,
    and the others are concatenated in dimension 0, as upstream does with all.
    """
    if state.tensor_size == 1:
        return state

    def is_replicated(name: str) -> bool:
        # Weights alone would not do: slices of a bias all begin as zeros.
        return all(
            torch.equal(part, first)
            for slot in state.slots(name)
            for first, *others in [state.slices(name, slot)]
            for part in others
        )

    names = state.names()
    copies = [name for name in names if is_replicated(name)]
    sliced = [name for name in names if name not in copies]
    logger.warning(
        "%s has no %s: %d parameters that all %d tensor-parallel ranks have alike are taken for "
        "copies, %d (%s, ...) are put together in dimension 0. Where that is wrong (row-parallel "
        "weights, stacked queries, keys and values) save with client_state={%r: ...}",
        state.folder,
        keys.UNIVERSAL_CHECKPOINT_INFO,
        len(copies),
        state.tensor_size,
        len(sliced),
        ", ".join(sliced[:3]),
        keys.UNIVERSAL_CHECKPOINT_INFO,
    )
    patterns = [f"{re.escape(name)}$" for name in copies]
    state.patterns = SlicePatterns({keys.TP_REPLICATED_PARAMETER_PATTERNS: patterns})
    return state


class _Output:
    """The folder being written. Files are summed as they are written, by several threads."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._records: dict[str, FileRecord] = {}

    def write(self, content: object, *path: str) -> None:
        name = os.path.join(*path)
        os.makedirs(os.path.dirname(os.path.join(self.folder, name)), exist_ok=True)
        self._records[name] = write_file(os.path.join(self.folder, name), content)

    def finish(self, head: Mapping[str, Any]) -> None:
        for parent, _, _ in os.walk(self.folder, topdown=False):
            sync_folder(parent)
        # Nothing is in shards here, so no fragments are described: every file is whole.
        write_part(self.folder, 0, self._records, {"part": 0, "files": {}})
        merge_parts(self.folder, [0], head)


def _write(
    state: ConsolidatedCheckpoint, names: Sequence[str], output: _Output, args: argparse.Namespace
) -> None:
    for name in names:
        if os.path.basename(name) != name or name in (os.curdir, os.pardir):
            raise CheckpointError(
                f"parameter {name!r} cannot have a folder of its name; rename it in the model"
            )
        for key, value in state.shared(name).items():
            output.write(value, keys.UNIVERSAL_FOLDER, name, file_names.state_file(key))
    _write_parameters(state, names, output, args)
    output.write(_common_state(state, names), keys.UNIVERSAL_FOLDER, keys.UNIVERSAL_OPTIMIZER_FILE)
    _copy_files(state, output)


def _write_parameters(
    state: ConsolidatedCheckpoint, names: Sequence[str], output: _Output, args: argparse.Namespace
) -> None:
    """Every kind of state of every parameter, few of them at a time, which bounds the memory."""
    tasks = ((name, slot) for name in names for slot in state.slots(name))
    ahead = args.num_extract_workers + args.num_merge_workers
    with (
        ThreadPoolExecutor(args.num_extract_workers) as extract,
        ThreadPoolExecutor(args.num_merge_workers) as merge,
    ):

        def convert(name: str, slot: str) -> Future[None]:
            slices = extract.submit(
                _extract, state, name, slot, output if args.keep_temp_folder else None
            )
            return merge.submit(lambda: _merge(state, name, slot, slices.result(), output))

        for future in _bounded((convert(*task) for task in tasks), ahead):
            future.result()


def _bounded(futures: Iterator[Future[None]], ahead: int) -> Iterator[Future[None]]:
    started: list[Future[None]] = []
    for future in futures:
        started.append(future)
        if len(started) == ahead:
            yield started.pop(0)
    yield from started


def _extract(
    state: ConsolidatedCheckpoint, name: str, slot: str, kept: _Output | None
) -> list[torch.Tensor]:
    slices = [part.clone() for part in state.slices(name, slot)]
    if kept is not None:
        for rank, part in enumerate(slices):
            kept.write(part.reshape(-1), _TEMPORARY, name, str(rank), file_names.slice_file(slot))
    return slices


def _merge(
    state: ConsolidatedCheckpoint, name: str, slot: str, slices: list[torch.Tensor], output: _Output
) -> None:
    file = file_names.state_file(slot)
    output.write(state.patterns.merged(name, slices), keys.UNIVERSAL_FOLDER, name, file)


def _common_state(state: ConsolidatedCheckpoint, names: Sequence[str]) -> dict[str, Any]:
    saved = state.optimizer_content()
    common = {key: value for key, value in saved.items() if key not in _NOT_COMMON}
    members: dict[int, list[str]] = {}
    for name in names:
        index = state.group(name)
        if index is not None:
            members.setdefault(index, []).append(name)
    common[keys.PARAM_GROUPS] = [
        {**state.options[index], "params": [index]} for index in sorted(state.options)
    ]
    common[keys.PARAM_NAMES] = [members.get(index, []) for index in sorted(state.options)]
    return common


def _copy_files(state: ConsolidatedCheckpoint, output: _Output) -> None:
    if has_weights_in_shards(state.folder):
        for part, model, weights in state.weights_of_ranks():
            content = {**model, keys.MODULE: weights, keys.FROZEN_PARAM_FRAGMENTS: None}
            content[keys.MANIFEST_VERSION] = MANIFEST_VERSION
            output.write(content, file_names.model_file(part))
    for name in sorted(os.listdir(state.folder)):
        is_model = file_names.is_model_file(name)
        if not (
            is_model or file_names.is_layer_or_expert_file(name) or file_names.is_host_file(name)
        ):
            continue
        content = read_file(os.path.join(state.folder, name), mmap=True)
        if is_model:
            content |= {keys.OPTIMIZER: None, keys.MANIFEST_VERSION: MANIFEST_VERSION}
        output.write(content, name)
    if os.path.isfile(os.path.join(state.folder, file_names.window_file(0))):
        logger.warning(
            f"{state.folder} was saved inside an accumulation window; a universal checkpoint has "
            "no gradients, so who loads it begins the window anew"
        )


if __name__ == "__main__":
    command()
