"""Every parameter of an ordinary checkpoint as a whole, whatever ranks, stages and tensor-parallel
slices it was saved by.

`WholeState` maps the files and notes where the pieces of each parameter lie; elements are read when
one parameter is asked for, so memory is bounded by that parameter. `UniversalState` is the same of
a universal checkpoint. What asks, and for what, is `ds_to_universal`'s (all of it) and
`runtime.checkpointing.weight_resharding`'s (a rank's share).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.experts import expert_number, expert_prefix, experts_per_rank, renumbered
from deepspeed.checkpoint.files import CheckpointError, read_file
from deepspeed.checkpoint.resharding.saved_optimizer import (
    FP32,
    LABELS,
    SavedOptimizer,
    SavedPiece,
    scaler_state,
    tensor_degree,
)
from deepspeed.checkpoint.resharding.tensor_parallel import SlicePatterns
from deepspeed.checkpoint.universal_checkpoint import own_slice, slots_in


class Parameters(Protocol):
    """Whole parameters by name.

    Attributes:
        folder: The checkpoint.
        options: Hyper-parameters by number of parameter group.
        scaler: State of the loss scale; empty if there is none.
        tensor_size: Tensor-parallel ranks of the run that saved it.
    """

    folder: str
    tensor_size: int
    options: Mapping[int, Mapping[str, Any]]
    scaler: Mapping[str, Any]

    def names(self) -> list[str]:
        """The parameters."""

    def slots(self, name: str) -> list[str]:
        """Kinds of per-element state: `fp32`, and the optimizer's if it is trained."""

    def entry(self, name: str, slot: str) -> Mapping[str, Any]:
        """The whole tensor and how it is cut, as in a file of a universal checkpoint."""

    def shared(self, name: str) -> Mapping[str, Any]:
        """State that is not per element."""

    def group(self, name: str) -> int | None:
        """Number of its parameter group; None if it is in none, or that is not known."""

    def weight(self, name: str) -> torch.Tensor | None:
        """What files of weights have by that name, of the first tensor-parallel rank; for buffers,
        which are in no optimizer.
        """


class WholeState:
    """`Parameters` of an ordinary checkpoint.

    Args:
        folder: The tag's folder.
        info: How parameters are sliced; None for what the checkpoint says.

    Attributes:
        model: Content of the first model file.
        patterns: How parameters are sliced.

    Raises:
        CheckpointError: A file is missing or damaged, or slices are there and nothing says how they
            are cut.
    """

    def __init__(self, folder: str, info: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.model: Mapping[str, Any] = read_file(
            os.path.join(folder, file_names.model_file(0)), mmap=True
        )
        self.options: Mapping[int, Mapping[str, Any]] = {}
        self.scaler: Mapping[str, Any] = {}
        info = self.model.get(keys.UNIVERSAL_CHECKPOINT_INFO) if info is None else info
        self.tensor_size = slices = tensor_degree(self.model)
        if info is None and slices > 1:
            raise CheckpointError(
                f"{folder} was saved by {slices} tensor-parallel ranks, and "
                f"{keys.UNIVERSAL_CHECKPOINT_INFO} is not in it: only the client knows how the "
                "parameters are sliced. Give it to save_checkpoint(client_state={...})"
            )
        self.patterns = SlicePatterns(info or {})
        self._slices = [_Slice(folder, rank) for rank in range(slices)]
        for part in self._slices:
            self.options = {**part.saved.options, **self.options}
            self.scaler = self.scaler or part.saved.scaler
        self._check_slices()

    def _check_slices(self) -> None:
        first = self._slices[0]
        for rank, part in enumerate(self._slices):
            differing = sorted(first.pieces.keys() ^ part.pieces.keys())
            if differing:
                raise CheckpointError(
                    f"{self.folder}: tensor-parallel ranks 0 and {rank} do not both have "
                    f"{differing[0]}"
                )

    def names(self) -> list[str]:
        return [*self._slices[0].pieces, *self._slices[0].frozen]

    def slots(self, name: str) -> list[str]:
        return self._slices[0].slots(name)

    def shared(self, name: str) -> Mapping[str, Any]:
        pieces = [piece for part in self._slices for piece in part.pieces.get(name, ())]
        for piece in pieces:
            for key, value in piece.shared.items():
                if not bool(torch.as_tensor(value == pieces[0].shared[key]).all()):
                    raise CheckpointError(
                        f"{self.folder}: pieces of {name} have state {key!r} {value} and "
                        f"{pieces[0].shared[key]}"
                    )
        return pieces[0].shared if pieces else {}

    def group(self, name: str) -> int | None:
        return self._slices[0].groups.get(self._slices[0].local(name))

    def weight(self, name: str) -> torch.Tensor | None:
        return self._slices[0].weights.values.get(name)

    def optimizer_content(self) -> Mapping[str, Any]:
        """The optimizer's state in the first file that has any; empty if there is none."""
        of_shards = [
            os.path.join(self.folder, file_names.optimizer_file(0, 0, bf16))
            for bf16 in (False, True)
        ]
        for path in of_shards:
            if os.path.isfile(path):
                content: Mapping[str, Any] = read_file(path, mmap=True)[keys.OPTIMIZER_STATE_DICT]
                return content
        of_experts = os.path.join(self.folder, file_names.expert_optimizer_file(0, 0))
        whole = read_file(of_experts, mmap=True) if os.path.isfile(of_experts) else self.model
        return whole.get(keys.OPTIMIZER) or {}

    def slices(self, name: str, slot: str) -> list[torch.Tensor]:
        """What each tensor-parallel rank has of a parameter, in the parameter's shape."""
        return [part.tensor(name, slot) for part in self._slices]

    def entry(self, name: str, slot: str) -> Mapping[str, Any]:
        return self.patterns.merged(name, self.slices(name, slot))


class _Weights:
    """Weights in the files of the stages of one tensor-parallel rank, by name; experts are numbered
    over all ranks.

    Attributes:
        values: Name -> weight; files are mapped.
        buffers: Which of them are buffers.
        models: Contents of the model files.
    """

    def __init__(self, folder: str, rank: int, parts: Sequence[int], slices: int) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.buffers: set[str] = set()
        self.models: list[Mapping[str, Any]] = []
        for part in parts:
            model = read_file(os.path.join(folder, file_names.model_file(part)), mmap=True)
            self.models.append(model)
            self.buffers.update(model.get(keys.BUFFER_NAMES) or ())
            self._add(model.get(keys.MODULE) or {})
        for name in sorted(os.listdir(folder)):
            layer = file_names.parse_layer_file(name)
            expert = file_names.parse_expert_file(name)
            if layer is not None and layer.tensor_parallel_rank == rank:
                self._add(read_file(os.path.join(folder, name), mmap=True), f"{layer.layer}.")
            elif expert is not None and expert.model_parallel_rank % slices == rank:
                self._add(read_file(os.path.join(folder, name), mmap=True))

    def _add(self, state: Mapping[str, Any], prefix: str = "") -> None:
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                self.values.setdefault(prefix + name, value)


class _Slice:
    """What the stages of one tensor-parallel rank hold."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder = folder
        self.saved = SavedOptimizer(folder, rank)
        self.weights = _Weights(folder, rank, self.saved.model_parts, self.saved.tensor_size)
        self.shapes: dict[str, torch.Size] = {}
        self.groups: dict[str, int] = {}
        self.pieces: dict[str, list[SavedPiece]] = {}
        for model in self.weights.models:
            self._note_shapes(
                model.get(keys.PARAM_SHAPES)
                or (model.get(keys.OPTIMIZER) or {}).get(keys.PARAM_SHAPES)
            )
        for name in sorted(os.listdir(folder)):
            if file_names.parse_expert_optimizer_file(name) is not None:
                optimizer = (
                    read_file(os.path.join(folder, name), mmap=True).get(keys.OPTIMIZER) or {}
                )
                self._note_shapes(optimizer.get(keys.PARAM_SHAPES))
        for piece in self.saved.pieces() if self.saved.has_state else ():
            self.pieces.setdefault(piece.name, []).append(piece)
        self._held = experts_per_rank(self.shapes)
        weights = self.weights.values
        # A tied weight's second name has the first one's memory.
        trained = {weights[name].data_ptr() for name in self.pieces if name in weights}
        untrained = {
            name: weights[name]
            for name in weights
            if name not in self.pieces and name not in self.weights.buffers
        }
        self.frozen = {
            name: value for name, value in untrained.items() if value.data_ptr() not in trained
        }

    def _note_shapes(self, groups: Any) -> None:
        for index, shapes in enumerate(parameter_groups(groups)):
            for name, shape in shapes.items():
                self.shapes.setdefault(name, shape)
                self.groups.setdefault(name, index)

    def local(self, name: str) -> str:
        """The name that a rank has for it: files number all experts, a rank its own."""
        prefix, number = expert_prefix(name), expert_number(name)
        if prefix is None or number is None or not self._held.get(prefix):
            return name
        return renumbered(name, {prefix: number % self._held[prefix] - number})

    def slots(self, name: str) -> list[str]:
        if name in self.frozen:
            return [FP32]
        has_weight = FP32 in self.pieces[name][0].values or name in self.weights.values
        return [
            *([FP32] if has_weight else []),
            *(key for key in self.pieces[name][0].values if key != FP32),
        ]

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """State of a parameter in its shape.

        Raises:
            CheckpointError: Elements are missing or there twice.
        """
        if name not in self.pieces:
            return _widened(self.frozen[name])
        pieces = sorted(self.pieces[name], key=lambda piece: piece.start)
        if slot == FP32 and FP32 not in pieces[0].values:
            return _widened(self.weights.values[name])
        shape, end = self.shapes[self.local(name)], 0
        for piece in pieces:
            if piece.start != end or slot not in piece.values:
                raise CheckpointError(
                    f"{self.folder}: {name} {slot} lacks elements {end} to {piece.start}, or has "
                    "some twice"
                )
            end += piece.numel
        if end != shape.numel():
            raise CheckpointError(
                f"{self.folder}: {name} {slot} has {end} elements, its shape {tuple(shape)} has "
                f"{shape.numel()}"
            )
        flat = (
            pieces[0].values[slot]
            if len(pieces) == 1
            else torch.cat([piece.values[slot] for piece in pieces])
        )
        return flat.reshape(shape)


def parameter_groups(shapes: Any) -> Sequence[Mapping[str, torch.Size]]:
    """`param_shapes` of a model file, per group; older ones have no groups, and some have none."""
    return [shapes] if isinstance(shapes, Mapping) else shapes or ()


def _widened(value: torch.Tensor) -> torch.Tensor:
    """Weights without a master, in fp32; rounding them back gives the same."""
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


class UniversalState:
    """`Parameters` of a universal checkpoint.

    Args:
        folder: The tag's folder.

    Raises:
        CheckpointError: It is no universal checkpoint, or damaged.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._zero = os.path.join(folder, keys.UNIVERSAL_FOLDER)
        if not os.path.isdir(self._zero):
            raise CheckpointError(
                f"{folder} is no universal checkpoint, it has no folder {keys.UNIVERSAL_FOLDER!r}: "
                f"make one by ds_to_universal --input_folder {folder} --output_folder "
                f"{folder}_universal"
            )
        common = read_file(os.path.join(self._zero, keys.UNIVERSAL_OPTIMIZER_FILE))
        self.options: Mapping[int, Mapping[str, Any]] = {
            index: {key: value for key, value in group.items() if key not in LABELS}
            for index, group in enumerate(common.get(keys.PARAM_GROUPS) or ())
        }
        self.scaler: Mapping[str, Any] = scaler_state(common)
        self._groups = {
            name: index
            for index, members in enumerate(common.get(keys.PARAM_NAMES) or ())
            for name in members
        }
        if not self._groups:
            self._note_groups_of_upstream()
        self._first = read_file(os.path.join(folder, file_names.model_file(0)), mmap=True)
        self.tensor_size = tensor_degree(self._first)
        self._weights: _Weights | None = None

    def _note_groups_of_upstream(self) -> None:
        """Upstream's files say in the model files which parameters are in which group."""
        for name in sorted(os.listdir(self.folder)):
            if file_names.is_model_file(name):
                model = read_file(os.path.join(self.folder, name), mmap=True)
                for index, group in enumerate(parameter_groups(model.get(keys.PARAM_SHAPES))):
                    self._groups.update((param, index) for param in group)

    def names(self) -> list[str]:
        return sorted(
            name for name in os.listdir(self._zero) if os.path.isdir(os.path.join(self._zero, name))
        )

    def slots(self, name: str) -> list[str]:
        return [slot for slot, content in self._contents(name) if isinstance(content, Mapping)]

    def shared(self, name: str) -> Mapping[str, Any]:
        return {
            slot: content
            for slot, content in self._contents(name)
            if not isinstance(content, Mapping)
        }

    def entry(self, name: str, slot: str) -> Mapping[str, Any]:
        content: Mapping[str, Any] = read_file(
            os.path.join(self._zero, name, file_names.state_file(slot)), mmap=True
        )
        return content

    def group(self, name: str) -> int | None:
        return self._groups.get(name)

    def weight(self, name: str) -> torch.Tensor | None:
        if self._weights is None:
            parts = range(0, self._first.get(keys.MP_WORLD_SIZE, 1), self.tensor_size)
            self._weights = _Weights(self.folder, 0, parts, self.tensor_size)
        return self._weights.values.get(name)

    def _contents(self, name: str) -> Iterator[tuple[str, Any]]:
        for slot in slots_in(os.path.join(self._zero, name)):
            yield (
                slot,
                read_file(os.path.join(self._zero, name, file_names.state_file(slot)), mmap=True),
            )


class OwnSlices:
    """What one rank takes of whole parameters, in the form in which `reshape.SavedOptimizer` gives
    saved pieces.

    Args:
        parameters: The whole ones.
        shapes: Name -> shape, of the rank's parameters.
        rank: The rank's number among tensor-parallel ranks.
        size: How many there are.
    """

    def __init__(
        self, parameters: Parameters, shapes: Mapping[str, Sequence[int]], rank: int, size: int
    ) -> None:
        self.parameters = parameters
        self.options = parameters.options
        self.scaler = parameters.scaler
        self._shapes, self._rank, self._size = shapes, rank, size
        self._known = set(parameters.names())

    @property
    def is_cut_anew(self) -> bool:
        """Whether the run that saved them had another number of tensor-parallel ranks."""
        return self.parameters.tensor_size != self._size

    @property
    def has_state(self) -> bool:
        """Whether the run that saved them had an optimizer."""
        return bool(self.options)

    def weight(self, name: str) -> torch.Tensor | None:
        """The rank's slice of a weight in fp32; None if only files of weights may have it."""
        if name not in self._known or FP32 not in self.parameters.slots(name):
            return None
        return self._own(name, FP32)

    def pieces(self) -> Iterator[SavedPiece]:
        """Each of the rank's parameters that is there, one by one.

        Raises:
            CheckpointError: One is damaged, or of another shape.
        """
        for name, shape in self._shapes.items():
            if name in self._known:
                values = {
                    slot: self._own(name, slot).reshape(-1) for slot in self.parameters.slots(name)
                }
                group = self.parameters.group(name)
                options = {} if group is None else self.options[group]
                yield SavedPiece(
                    name,
                    0,
                    torch.Size(shape).numel(),
                    values,
                    self.parameters.shared(name),
                    options,
                )

    def _own(self, name: str, slot: str) -> torch.Tensor:
        return own_slice(
            name, self.parameters.entry(name, slot), self._shapes[name], self._rank, self._size
        )
