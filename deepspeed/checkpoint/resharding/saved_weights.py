"""Weights of a checkpoint by parameter name: in model files, in those of layers and in those of
experts; of ZeRO stage 3 in shards.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.files import has_weights_in_shards, lead_model_file, read_file
from deepspeed.checkpoint.parallel_degrees import ParallelDegrees
from deepspeed.checkpoint.resharding.saved_optimizer import (
    FP32,
    SavedOptimizer,
    parameter_shapes,
)


class WeightPiece(NamedTuple):
    """Elements of a weight from `start`: 1-D, in the dtype that is saved."""

    name: str
    start: int
    values: torch.Tensor


class FrozenShards(NamedTuple):
    """A parameter that was not trained: its shape, and what each rank of stage 3 has of it; below
    stage 3 the whole.
    """

    shape: torch.Size
    shards: Sequence[torch.Tensor]

    def pieces(self, name: str, first_rank: int = 0) -> Iterator[WeightPiece]:
        """Its elements in order, without padding; the first shard is that of `first_rank`."""
        for rank, shard in enumerate(self.shards, first_rank):
            at = min(rank * shard.numel(), self.shape.numel())
            count = min(shard.numel(), self.shape.numel() - at)
            yield WeightPiece(name, at, shard.reshape(-1)[:count])

    def whole(self, name: str) -> torch.Tensor:
        """The parameter; a view of the file where it is in one."""
        pieces = [piece.values for piece in self.pieces(name)]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(self.shape)


class SavedWeights:
    """Weights in the files of the stages of one tensor-parallel rank, by name; experts are numbered
    over all ranks.

    Args:
        folder: The tag's folder.
        rank: The tensor-parallel rank.
        degrees: Of the run that saved it.

    Attributes:
        values: Name -> weight; files are mapped. At ZeRO stage 3 only buffers are there whole.
        extra: Name -> what a module keeps by `get_extra_state()` that is no tensor.
        frozen: Name -> shards, of stage 3; masters of trained ones are the optimizer's.
        buffers: Which of the names are buffers.
        models: Contents of the model files.

    Raises:
        CheckpointError: A file is missing or damaged.
    """

    def __init__(self, folder: str, rank: int, degrees: ParallelDegrees) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.extra: dict[str, Any] = {}
        self.frozen: dict[str, FrozenShards] = {}
        self.buffers: set[str] = set()
        self.models: list[Mapping[str, Any]] = []
        for part in degrees.ranks_of_slice(rank):
            path = lead_model_file(folder, part)
            model = read_file(path, mmap=True)
            self.models.append(model)
            self.buffers.update(model.get(keys.BUFFER_NAMES) or ())
            if file_names.is_stage3_model_file(os.path.basename(path)):
                self._add_shards(folder, part, model)
            else:
                self._add(model.get(keys.MODULE) or {})
        for name in sorted(os.listdir(folder)):
            layer = file_names.parse_layer_file(name)
            expert = file_names.parse_expert_file(name)
            if layer is not None and layer.tensor_parallel_rank == rank:
                self._add(read_file(os.path.join(folder, name), mmap=True), f"{layer.layer}.")
            elif expert is not None and expert.model_parallel_rank % degrees.tensor == rank:
                self._add(read_file(os.path.join(folder, name), mmap=True))

    def get(self, name: str) -> Any:
        """What is saved whole by that name; None if nothing is."""
        return self.values.get(name, self.extra.get(name))

    def _add(self, state: Mapping[str, Any], prefix: str = "") -> None:
        for name, value in state.items():
            kept = self.values if isinstance(value, torch.Tensor) else self.extra
            kept.setdefault(prefix + name, value)

    def _add_shards(self, folder: str, part: int, model: Mapping[str, Any]) -> None:
        self._add(
            {
                name: value
                for name, value in model[keys.MODULE].items()
                if name in self.buffers or not isinstance(value, torch.Tensor)
            }
        )
        if model.get(keys.FROZEN_PARAM_SHAPES):
            paths = (
                os.path.join(folder, file_names.stage3_model_file(rank, part))
                for rank in range(int(model[keys.DP_WORLD_SIZE]))
            )
            self.frozen |= _frozen_shards([read_file(path, mmap=True) for path in paths])


def weight_pieces(
    folder: str, names: Container[str], rank: int | None = None
) -> Iterator[WeightPiece]:
    """Elements of parameters and buffers, of a checkpoint without tensor parallelism.

    Of a folder of stage 3 trained parameters come in fp32, rank by rank; otherwise each tensor
    comes as it is in the files of weights, under all of its names.

    Args:
        folder: The tag's folder.
        names: Which.
        rank: Only those of this rank of stage 3, from its own files.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    optimizer = SavedOptimizer(folder)
    if rank is None:
        weights = SavedWeights(folder, 0, optimizer.degrees)
        for name, value in weights.values.items():
            if name in names:
                yield WeightPiece(name, 0, value.reshape(-1))
        frozen, shapes = weights.frozen, parameter_shapes(weights.models[0])
    else:
        path = os.path.join(folder, file_names.stage3_model_file(rank, 0))
        model = read_file(path, mmap=True)
        frozen, shapes = _frozen_shards([model]), parameter_shapes(model)
    for name, shards in frozen.items():
        if name in names:
            yield from shards.pieces(name, rank or 0)
    if has_weights_in_shards(folder) and any(name in names for group in shapes for name in group):
        found = optimizer.fragments() if rank is None else optimizer.fragments_of_rank(rank)
        for fragment in found:
            if fragment.name in names and not fragment.is_state_alone:
                yield WeightPiece(fragment.name, fragment.start, fragment.values[FP32])


def _frozen_shards(models: Sequence[Mapping[str, Any]]) -> dict[str, FrozenShards]:
    """Parameters that were not trained, by name, of the model files of consecutive ranks."""
    return {
        name: FrozenShards(
            torch.Size(shape), [model[keys.FROZEN_PARAM_FRAGMENTS][name] for model in models]
        )
        for name, shape in (models[0].get(keys.FROZEN_PARAM_SHAPES) or {}).items()
    }


def saved_state(model: Mapping[str, Any], in_shards: bool) -> dict[str, Any]:
    """The state dict that a model file is of.

    Args:
        model: Content of the file.
        in_shards: It is of stage 3; parameters are tensors of their shapes on the meta device then,
            those that the checkpoint has only the names of are left out.
    """
    state = dict(model[keys.MODULE])
    if not in_shards:
        return state
    shapes = {name: shape for group in parameter_shapes(model) for name, shape in group.items()}
    shapes |= model.get(keys.FROZEN_PARAM_SHAPES) or {}
    first = tied_names(model)
    for name in set(state) - set(model[keys.BUFFER_NAMES]):
        if isinstance(state[name], torch.Tensor):
            placeholder = state.pop(name)
            shape = shapes.get(first.get(name, name))
            if shape is not None:
                state[name] = torch.empty(shape, dtype=placeholder.dtype, device="meta")
    return state


def tied_names(model: Mapping[str, Any]) -> dict[str, str]:
    """Name -> first name, of the tied weights that a model file lists."""
    return dict(model.get(keys.SHARED_PARAMS) or {})
