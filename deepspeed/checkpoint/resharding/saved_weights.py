"""Weights of a checkpoint by parameter name: in files of models, layers, experts and shards."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.experts import (
    PackedExperts,
    expert_number,
    expert_prefix,
    experts_per_rank,
    of_first_expert,
    renumbered,
)
from deepspeed.checkpoint.files import (
    CheckpointError,
    has_weights_in_shards,
    lead_model_file,
    read_file,
)
from deepspeed.checkpoint.resharding.cuts import HeldExperts, ParallelDegrees, data_ranks
from deepspeed.checkpoint.resharding.saved_optimizer import (
    FP32,
    SavedFragment,
    SavedOptimizer,
    parameter_shapes,
)


class WeightPiece(NamedTuple):
    """Elements of a weight from `start`: 1-D, in the dtype that is saved."""

    name: str
    start: int
    values: torch.Tensor


class FrozenShards(NamedTuple):
    """A parameter that was not trained: its shape, and its elements in order, without padding."""

    shape: torch.Size
    pieces: Sequence[WeightPiece]

    def whole(self) -> torch.Tensor:
        """The parameter; a view of the file where it is in one."""
        values = [piece.values for piece in self.pieces]
        whole = values[0] if len(values) == 1 else torch.cat(values)
        if whole.numel() != self.shape.numel():
            raise CheckpointError(
                f"{self.pieces[0].name}, which was not trained, has {whole.numel()} elements in "
                f"its files, its shape {tuple(self.shape)} has {self.shape.numel()}"
            )
        return whole.view(self.shape)


class SavedWeights:
    """Weights of one tensor-parallel rank by name; experts are numbered over all ranks.

    Attributes:
        values: Name -> weight; files are mapped. At ZeRO stage 3 only buffers are there whole.
        extra: Name -> what a module keeps by `get_extra_state()` that is no tensor.
        frozen: Name -> shards, of stage 3; masters of trained ones are the optimizer's.
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
        return self.values.get(name, self.extra.get(name))

    def is_buffer(self, name: str) -> bool:
        """Whether a name is a buffer's; of experts model files name those of one rank."""
        return name in self.buffers or of_first_expert(name) in self.buffers

    def _add(self, state: Mapping[str, Any], prefix: str = "") -> None:
        for name, value in state.items():
            kept = self.values if isinstance(value, torch.Tensor) else self.extra
            kept.setdefault(prefix + name, value)

    def _add_shards(self, folder: str, part: int, model: Mapping[str, Any]) -> None:
        models = {0: model}
        if model.get(keys.FROZEN_PARAM_SHAPES) or model.get(keys.EXPERT_GROUP_SIZES):
            for rank in range(1, data_ranks(model, folder)):
                path = os.path.join(folder, file_names.stage3_model_file(rank, part))
                models[rank] = read_file(path, mmap=True)
        for rank, own in models.items():
            held = HeldExperts(own, rank, folder)
            self._add(
                {
                    held.of_all(name): value
                    for name, value in own[keys.MODULE].items()
                    if self.is_buffer(name) or not isinstance(value, torch.Tensor)
                }
            )
        self.frozen |= _frozen_shards(models, folder)


def weight_pieces(
    folder: str, names: Container[str], rank: int | None = None, tensor_rank: int = 0
) -> Iterator[WeightPiece]:
    """Elements of parameters and buffers, as one tensor-parallel rank has them.

    Of a folder of stage 3 trained parameters come in fp32; `rank`: those of this rank alone, from
    its own files.
    """
    optimizer = SavedOptimizer(folder, tensor_rank)
    if rank is None:
        weights = SavedWeights(folder, tensor_rank, optimizer.degrees)
        for name, value in weights.values.items():
            if name in names:
                yield WeightPiece(name, 0, value.reshape(-1))
        frozen, shapes = weights.frozen, parameter_shapes(weights.models[0])
    else:
        path = os.path.join(folder, file_names.stage3_model_file(rank, tensor_rank))
        model = read_file(path, mmap=True)
        frozen, shapes = _frozen_shards({rank: model}, folder), parameter_shapes(model)
    for name, shards in frozen.items():
        if name in names:
            yield from shards.pieces
    if has_weights_in_shards(folder) and any(name in names for group in shapes for name in group):
        found = optimizer.fragments() if rank is None else optimizer.fragments_of_rank(rank)
        for fragment in found:
            if fragment.name in names and not fragment.is_state_alone:
                yield WeightPiece(fragment.name, fragment.start, fragment.values[FP32])


def _frozen_shards(models: Mapping[int, Mapping[str, Any]], folder: str) -> dict[str, FrozenShards]:
    """Untrained parameters by name, of model files of stage 3 by rank."""
    shapes: dict[str, torch.Size] = {}
    pieces: dict[str, list[WeightPiece]] = {}
    for rank, model in models.items():
        held = HeldExperts(model, rank, folder)
        for local, saved_shape in (model.get(keys.FROZEN_PARAM_SHAPES) or {}).items():
            shape, name = torch.Size(saved_shape), held.of_all(local)
            rows = held.packed.num_ranks(local)
            share, place = held.share_and_place(local)
            shard = model[keys.FROZEN_PARAM_FRAGMENTS][local].reshape(-1)
            numel = shape.numel() // rows
            first = min(place * shard.numel(), numel)
            start = first + (share * numel if rows > 1 else 0)
            shapes[name] = shape
            piece = WeightPiece(name, start, shard[: numel - first])
            pieces.setdefault(name, []).append(piece)
    return {
        name: FrozenShards(shape, sorted(pieces[name], key=lambda piece: piece.start))
        for name, shape in shapes.items()
    }


def saved_state(model: Mapping[str, Any], in_shards: bool) -> dict[str, Any]:
    """The state dict that a model file is of; in shards, trained parameters are on meta."""
    state = dict(model[keys.MODULE])
    if not in_shards:
        return state
    packed = PackedExperts(model)
    shapes = {
        name: packed.whole_shape(name, shape)
        for group in parameter_shapes(model)
        for name, shape in group.items()
    }
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


class SavedRank:
    """What the stages of one tensor-parallel rank hold, by parameter; `frozen`: all untrained."""

    def __init__(self, folder: str, rank: int, masters_only: bool = False) -> None:
        self.folder = folder
        self.saved = SavedOptimizer(folder, rank, masters_only)
        self.weights = SavedWeights(folder, rank, self.saved.degrees)
        self.shapes: dict[str, torch.Size] = {}
        self.groups: dict[str, int] = {}
        self.fragments: dict[str, list[SavedFragment]] = {}
        self._alone: dict[str, Mapping[str, Any]] = {}
        self._packed = PackedExperts(self.weights.models[0])
        for model in self.weights.models:
            self._note_shapes(
                parameter_shapes(model) or parameter_shapes(model.get(keys.OPTIMIZER) or {})
            )
        for name in sorted(os.listdir(folder)):
            if file_names.parse_expert_optimizer_file(name) is not None:
                optimizer = (
                    read_file(os.path.join(folder, name), mmap=True).get(keys.OPTIMIZER) or {}
                )
                self._note_shapes(parameter_shapes(optimizer))
        for fragment in self.saved.fragments() if self.saved.has_state else ():
            if fragment.is_state_alone:
                self._alone[fragment.name] = fragment.shared
                continue
            self.fragments.setdefault(fragment.name, []).append(fragment)
            if fragment.group is not None:
                self.groups[fragment.name] = fragment.group
        held = [*self.shapes, *(self.weights.models[0].get(keys.MODULE) or ())]
        self._held = experts_per_rank(held)
        weights = self.weights.values
        # A tied weight's second name has the first one's memory.
        trained = {weights[name].data_ptr() for name in self.fragments if name in weights}
        untrained = {
            name: weights[name]
            for name in weights
            if name not in self.fragments and not self.weights.is_buffer(name)
        }
        self.frozen = dict(self.weights.frozen)
        self.frozen |= {
            name: FrozenShards(value.shape, [WeightPiece(name, 0, value.reshape(-1))])
            for name, value in untrained.items()
            if value.data_ptr() not in trained
        }

    def _note_shapes(self, groups: Sequence[Mapping[str, torch.Size]]) -> None:
        for shapes in groups:
            for name, shape in shapes.items():
                self.shapes.setdefault(name, self._packed.whole_shape(name, shape))

    def local(self, name: str) -> str:
        """The name that a rank has for it: files number all experts, a rank its own."""
        prefix, number = expert_prefix(name), expert_number(name)
        if prefix is None or number is None or not self._held.get(prefix):
            return name
        return renumbered(name, {prefix: number % self._held[prefix] - number})

    def alone(self, name: str) -> Mapping[str, Any]:
        return self._alone.get(name, {})

    def slots(self, name: str) -> list[str]:
        if name in self.frozen:
            return [FP32]
        has_weight = FP32 in self.fragments[name][0].values or name in self.weights.values
        return [
            *([FP32] if has_weight else []),
            *(key for key in self.fragments[name][0].values if key != FP32),
        ]

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """State of a parameter in its shape."""
        if name not in self.fragments:
            return _widened(self.frozen[name].whole())
        if slot == FP32 and FP32 not in self.fragments[name][0].values:
            return _widened(self.weights.values[name])
        pieces = self.pieces(name, slot)
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return flat.reshape(self.shape(name))

    def shape(self, name: str) -> torch.Size:
        return self.shapes[self.local(name)]

    def pieces(self, name: str, slot: str) -> list[torch.Tensor]:
        """State of what is trained in order, each piece 1-D."""
        shape, end = self.shape(name), 0
        fragments = sorted(self.fragments[name], key=lambda fragment: fragment.start)
        for fragment in fragments:
            if fragment.start != end or slot not in fragment.values:
                raise CheckpointError(
                    f"{self.folder}: {name} {slot} lacks elements {end} to {fragment.start}, or "
                    "has some twice"
                )
            end += fragment.numel
        if end != shape.numel():
            raise CheckpointError(
                f"{self.folder}: {name} {slot} has {end} elements, its shape {tuple(shape)} has "
                f"{shape.numel()}"
            )
        return [fragment.values[slot] for fragment in fragments]


def _widened(value: torch.Tensor) -> torch.Tensor:
    """Weights without a master, in fp32; rounding them back gives the same."""
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
