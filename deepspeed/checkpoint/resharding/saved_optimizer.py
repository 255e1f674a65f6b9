"""Optimizer state of a checkpoint by parameter name, however many ranks and stages it is on.

Four layouts are read: shards of ZeRO and BF16_Optimizer, those of ZeRO stage 3, whole state of one
expert rank and whole state in the model file (stage 0). In shards a parameter's elements lie in the
order of the ranks, so its first element in a shard is the sum of what the shards before held.
Experts are numbered over all ranks here; in files each rank numbers its own. A parameter that
several pipeline stages hold (tied weights) is taken from the first of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.experts import (
    PackedExperts,
    expert_prefix,
    expert_rank,
    experts_per_rank,
    renumbered,
)
from deepspeed.checkpoint.files import CheckpointError, lead_model_file, read_file
from deepspeed.checkpoint.resharding.cuts import (
    ParallelDegrees,
    Run,
    comes_data_first,
    cut_runs,
    cuts_of,
    data_ranks,
)
from deepspeed.ops.parameter_runs import STATE_BY_PARAMETER

# The master weight, among the names of per-element state.
FP32 = keys.FP32_WEIGHT_KEY
# State of torch's optimizers that is one number, beside that of a parameter without dimensions too.
NUMBERS = frozenset(("step", "mu_product", "eta", "mu"))
# What stands in a parameter group and is no hyper-parameter: which parameters are in it, and names
# that follow from the division.
LABELS = frozenset(("params", "param_names", "name", "moe"))


def is_per_element(key: str, value: object, sizes: Sequence[int], is_scalar: bool) -> bool:
    """Whether optimizer state has an element for each of a tensor's."""
    if key in NUMBERS or not isinstance(value, torch.Tensor) or value.numel() not in sizes:
        return False
    return value.dim() > 0 or is_scalar


class SavedFragment(NamedTuple):
    """Elements `start` to `start + numel` of parameter `name`, each of `values` 1-D.

    Attributes:
        shared: State that is not per element (`step`).
        options: Hyper-parameters of its parameter group.
        group: Number of that group; None if it is in none, or that is not known.
        is_state_alone: It has no elements: `shared` is what an optimizer of whole parameters keeps.
    """

    name: str
    start: int
    numel: int
    values: Mapping[str, torch.Tensor]
    shared: Mapping[str, Any]
    options: Mapping[str, Any]
    group: int | None = None
    is_state_alone: bool = False

    @property
    def has_state(self) -> bool:
        """Whether there is more than the master: its parameter has taken a step that counts."""
        return bool(self.shared) or bool(self.values.keys() - {FP32})


class _OptimizerTensor(NamedTuple):
    """A tensor that the optimizer updated; per-element state has any of `sizes` elements.

    Attributes:
        is_scalar: It has no dimensions, so its per-element state has none either.
        shape: Of a parameter that it holds whole; None: state is told by `sizes` alone.
    """

    runs: Sequence[Run]
    master: torch.Tensor | None
    state: Mapping[str, Any]
    sizes: tuple[int, ...]
    options: Mapping[str, Any]
    group: int
    is_scalar: bool = False
    shape: torch.Size | None = None

    def is_per_element(self, key: str, value: Any) -> bool:
        """Whether `value` has an element for each of the tensor's; a step count never has."""
        return is_per_element(key, value, self.sizes, self.is_scalar) and (
            self.shape is None or value.shape == self.shape
        )


class SavedOptimizer:
    """The optimizer state in a checkpoint folder.

    Args:
        folder: The tag's folder.
        tensor_rank: Whose slices to read, where the model is tensor parallel.
        masters_only: Read nothing else, which shards of older releases are enough for, and pass
            over state whose parameters have no names.

    Attributes:
        scaler: State of the loss scale; known, as are the options, once `fragments` has ended.
        options: Hyper-parameters by number of parameter group.
    """

    def __init__(self, folder: str, tensor_rank: int = 0, masters_only: bool = False) -> None:
        self.folder = folder
        self._masters_only = masters_only
        first = read_file(lead_model_file(folder), mmap=True)
        self.degrees = ParallelDegrees.of_file(first)
        self._parts = self.degrees.ranks_of_slice(tensor_rank)
        self._packed = PackedExperts(first)
        listing = sorted(os.listdir(folder))
        self._shards = _by_part(folder, listing, file_names.parse_optimizer_file)
        self._expert_ranks = _by_part(folder, listing, file_names.parse_expert_optimizer_file)
        self.has_state = bool(
            self._shards or self._expert_ranks or first.get(keys.OPTIMIZER) is not None
        )
        self.scaler: dict[str, Any] = {}
        self.options: dict[int, Mapping[str, Any]] = {}

    def fragments(self) -> Iterator[SavedFragment]:
        """Every element of every parameter once, file by file."""
        seen: set[str] = set()
        for part in self._parts:
            names: set[str] = set()
            for fragment in self._fragments_of(part):
                # What an earlier stage or rank has whole is a copy here: a tied weight.
                if fragment.name not in seen:
                    names.add(fragment.name)
                    yield fragment
            seen |= names

    def fragments_of_rank(self, rank: int) -> Iterator[SavedFragment]:
        """What is in the file of one data-parallel rank of stage 3; no other rank's is read."""
        part = self._parts[0]
        model = read_file(
            os.path.join(self.folder, file_names.stage3_model_file(rank, part)), mmap=True
        )
        path = self._shards.get(part, {}).get(rank)
        if path is None:
            raise CheckpointError(f"{self.folder} lacks the optimizer states of rank {rank}")
        state = read_file(path, mmap=True)[keys.OPTIMIZER_STATE_DICT]
        yield from self._cut(state, model, rank, data_ranks(model, self.folder), path)

    def _fragments_of(self, part: int) -> Iterator[SavedFragment]:
        model = read_file(lead_model_file(self.folder, part), mmap=True)
        if part in self._shards:
            yield from self._sharded(self._shards[part], model)
        elif part in self._expert_ranks:
            yield from self._whole_of_expert_ranks(self._expert_ranks[part])
        elif model.get(keys.OPTIMIZER) is not None:
            yield from self._whole(model[keys.OPTIMIZER], {}, {})
        else:
            raise CheckpointError(
                f"{self.folder} holds no optimizer state of model-parallel rank {part}"
            )

    # Shards

    def _sharded(
        self, files: Mapping[int, str], model: Mapping[str, Any]
    ) -> Iterator[SavedFragment]:
        count = max(files) + 1
        missing = sorted(set(range(count)) - set(files))
        if missing:
            raise CheckpointError(
                f"{self.folder} lacks optimizer states of data-parallel ranks {missing} of {count}"
            )
        data_first = comes_data_first(model)
        groups = parameter_shapes(model)
        per_rank = experts_per_rank(name for shapes in groups for name in shapes)
        done: dict[tuple[str, int], int] = {}
        for rank, path in sorted(files.items()):
            state = read_file(path, mmap=True)[keys.OPTIMIZER_STATE_DICT]
            self._keep_scaler(state)
            if self._masters_only:
                state = _masters_alone(state, groups, done)
            if keys.FP32_FLAT_GROUPS in state:
                yield from self._cut(state, model, rank, count, path)
                continue
            if state.get(keys.PARAM_SLICE_MAPPINGS) is None:
                raise CheckpointError(
                    f"{path} has no param_slice_mappings, so only equally many ranks can load it"
                )
            for index, owners in enumerate(state[keys.PARTITION_COUNT]):
                has_experts = any(
                    expert_prefix(name) is not None or self._packed.num_ranks(name) > 1
                    for name in groups[index]
                )
                if owners != count and not (has_experts and count % owners == 0):
                    raise CheckpointError(
                        f"{path} is one of {owners} shards, but there are files of {count}: some "
                        "are missing or another's"
                    )
                own = expert_rank(rank, count, count // owners, data_first)
                offsets = {at: held * own for at, held in per_rank.items()} if has_experts else {}
                firsts = {
                    name: self._packed.first_element(name, shape, rank, count, data_first)
                    for name, shape in groups[index].items()
                }
                tensor = _shard(state, index, done, offsets, firsts)
                self.options.setdefault(index, tensor.options)
                yield from _fragments_in(tensor)

    def _cut(
        self, state: Mapping[str, Any], model: Mapping[str, Any], rank: int, count: int, path: str
    ) -> Iterator[SavedFragment]:
        """The shard of a rank of stage 3. Upstream cuts large groups into several buffers."""
        base, buffers = state[keys.OPTIMIZER_STATE_DICT], state[keys.FP32_FLAT_GROUPS]
        numbers = [
            (index, position)
            for index, group in enumerate(base["param_groups"])
            for position in range(len(group["params"]))
        ]
        starts = [0, *accumulate(buffer.numel() for buffer in buffers)]
        data_first = comes_data_first(model)
        counts = state[keys.PARTITION_COUNT]
        cuts = cuts_of(parameter_shapes(model), counts, rank, count, data_first, self._packed)
        runs, end = cut_runs(cuts or [], starts)
        if cuts is None or len(numbers) != len(buffers) or starts[-1] < end:
            raise CheckpointError(
                f"{path} is one of {state[keys.PARTITION_COUNT]} shards, with {starts[-1]} "
                f"elements in {len(buffers)} buffers of {len(numbers)}; the folder has {count}, "
                f"and the parameters {end} elements in each: some files are missing or another's"
            )
        for (index, position), buffer, own in zip(numbers, buffers, runs, strict=True):
            group = base["param_groups"][index]
            options = self.options.setdefault(index, _options(group))
            # Upstream's masters are saved as requiring a gradient.
            yield from _fragments_in(
                _OptimizerTensor(
                    own,
                    buffer.detach(),
                    _state_of(base, group, position),
                    (buffer.numel(),),
                    options,
                    index,
                )
            )

    # Whole state

    def _whole_of_expert_ranks(self, files: Mapping[int, str]) -> Iterator[SavedFragment]:
        """Each rank's whole state; what several ranks hold is taken from the first of them."""
        seen: set[tuple[str, int]] = set()
        for rank, path in sorted(files.items()):
            state = read_file(path, mmap=True)[keys.OPTIMIZER]
            # Files are numbered by the largest expert group of the model.
            sizes = state.get(keys.EXPERT_GROUP_SIZES)
            data_first = bool(state.get(keys.DATA_BEFORE_EXPERTS))
            groups = parameter_shapes(state)
            per_rank = experts_per_rank(name for shapes in groups for name in shapes)
            firsts = {
                name: self._packed.first_element(name, shape, rank, len(files), data_first)
                for shapes in groups
                for name, shape in shapes.items()
            }
            offsets = {
                prefix: held * expert_rank(rank, len(files), sizes[prefix], data_first)
                for prefix, held in per_rank.items()
            }
            found = set()
            for fragment in self._whole(state, offsets, firsts):
                found.add((fragment.name, fragment.start))
                if (fragment.name, fragment.start) not in seen:
                    yield fragment
            seen |= found

    def _whole(
        self, state: Mapping[str, Any], offsets: Mapping[str, int], firsts: Mapping[str, int]
    ) -> Iterator[SavedFragment]:
        if state.get(keys.PARAM_SHAPES) is None:
            if self._masters_only:
                return
            raise CheckpointError(
                f"the optimizer state in {self.folder} has no parameter names: it can be loaded by "
                "the same model with the same parameter groups and pipeline stages only"
            )
        self._keep_scaler(state)
        shapes = parameter_shapes(state)
        base = state.get(keys.OPTIMIZER_STATE_DICT, state)
        for index, (group, named) in enumerate(zip(base["param_groups"], shapes, strict=True)):
            options = self.options.setdefault(index, _options(group))
            runs, at = [], 0
            forms = list(named.values())
            for name, shape in named.items():
                start = firsts.get(name, 0)
                runs.append(Run(renumbered(name, offsets), start, at, shape.numel(), name))
                at += shape.numel()
            if keys.FP32_GROUPS_FLAT in state:
                master = state[keys.FP32_GROUPS_FLAT][index]
                yield from _fragments_in(
                    _OptimizerTensor(
                        runs, master, _state_of(base, group, 0), (master.numel(),), options, index
                    )
                )
                continue
            for position, run in enumerate(runs):
                master = (
                    state[keys.FP32_GROUPS][index][position] if keys.FP32_GROUPS in state else None
                )
                tensor = _OptimizerTensor(
                    [run._replace(at=0)],
                    master,
                    _state_of(base, group, position),
                    (run.numel,),
                    options,
                    index,
                )
                form = forms[position]
                yield from _fragments_in(tensor._replace(is_scalar=len(form) == 0, shape=form))

    def _keep_scaler(self, state: Mapping[str, Any]) -> None:
        self.scaler = self.scaler or scaler_state(state)


def scaler_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """State of the loss scale in saved optimizer state; empty if there is none."""
    scaler = state.get(keys.LOSS_SCALER)
    return (
        dict(vars(scaler))
        if scaler is not None
        else {key: state[key] for key in keys.SCALER_KEYS if key in state}
    )


def parameter_shapes(content: Mapping[str, Any]) -> list[dict[str, torch.Size]]:
    """Name -> shape of the parameters of each group; older files have no groups, or no shapes."""
    shapes = content.get(keys.PARAM_SHAPES) or ()
    groups = [shapes] if isinstance(shapes, Mapping) else shapes
    return [{name: torch.Size(shape) for name, shape in group.items()} for group in groups]


def _by_part(
    folder: str, listing: Sequence[str], parse: Callable[[str], file_names.OptimizerFile | None]
) -> dict[int, dict[int, str]]:
    """Model-parallel rank -> other rank -> path, of the files whose names can be parsed."""
    found: dict[int, dict[int, str]] = {}
    for name in listing:
        file = parse(name)
        if file is not None:
            found.setdefault(file.model_parallel_rank, {})[file.rank] = os.path.join(folder, name)
    return found


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in LABELS}


def _state_of(
    base: Mapping[str, Any], group: Mapping[str, Any], position: int
) -> Mapping[str, Any]:
    return base["state"].get(group["params"][position], {}) if group["params"] else {}


class _Address(NamedTuple):
    start: int
    numel: int


def _masters_alone(
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, torch.Size]],
    done: Mapping[tuple[str, int], int],
) -> Mapping[str, Any]:
    """A shard without what the wrapped optimizer keeps; `done` as in `_shard`. Shards of releases
    that do not say where parameters lie have them in the order of the model file.
    """
    if keys.FP32_FLAT_GROUPS in state:
        one = {"params": range(len(state[keys.FP32_FLAT_GROUPS]))}
        return {**state, keys.OPTIMIZER_STATE_DICT: {"param_groups": [one], "state": {}}}
    masters = state[keys.SINGLE_PARTITION_OF_FP32_GROUPS]
    counts, mappings = state[keys.PARTITION_COUNT], state.get(keys.PARAM_SLICE_MAPPINGS)
    if mappings is None:
        mappings = []
        for shapes, master in zip(groups, masters, strict=True):
            addresses, at = {}, 0
            for name, shape in shapes.items():
                count = min(shape.numel() - done.get((name, 0), 0), master.numel() - at)
                if count > 0:
                    addresses[name] = _Address(at, count)
                    at += count
            mappings.append(addresses)
    return {
        **state,
        keys.PARTITION_COUNT: counts if isinstance(counts, list) else [counts] * len(masters),
        keys.PARAM_SLICE_MAPPINGS: mappings,
        keys.GROUP_PADDINGS: [0] * len(masters),
        keys.BASE_OPTIMIZER_STATE: [{}] * len(masters),
        keys.BASE_OPTIMIZER_PARAM_GROUPS: None,
    }


def _shard(
    state: Mapping[str, Any],
    index: int,
    done: dict[tuple[str, int], int],
    offsets: Mapping[str, int],
    firsts: Mapping[str, int],
) -> _OptimizerTensor:
    """One group's part of a ZeRO rank's file; `done`: elements of parameters in earlier shards."""
    runs = []
    for local_name, address in state[keys.PARAM_SLICE_MAPPINGS][index].items():
        name, first = renumbered(local_name, offsets), firsts.get(local_name, 0)
        before = done.get((name, first), 0)
        runs.append(Run(name, first + before, address.start, address.numel, local_name))
        done[name, first] = before + address.numel
    master = state[keys.SINGLE_PARTITION_OF_FP32_GROUPS][index]
    padded = master.numel() + state[keys.GROUP_PADDINGS][index]
    base = state[keys.BASE_OPTIMIZER_STATE]
    if isinstance(base, Mapping):
        group = base["param_groups"][index]
        own = dict(_state_of(base, group, 0))
        if keys.STATE_OF_PARAMETERS in own:
            own[keys.STATE_OF_PARAMETERS] = {
                renumbered(name, offsets): kept
                for name, kept in own[keys.STATE_OF_PARAMETERS].items()
            }
        return _OptimizerTensor(runs, master, own, (master.numel(), padded), _options(group), index)
    groups = state.get(keys.BASE_OPTIMIZER_PARAM_GROUPS)  # elastic files
    return _OptimizerTensor(
        runs,
        master,
        base[index],
        (master.numel(), padded),
        _options(groups[index]) if groups else {},
        index,
    )


def _fragments_in(tensor: _OptimizerTensor) -> Iterator[SavedFragment]:
    flat = {} if tensor.master is None else {FP32: tensor.master.reshape(-1)}
    shared = {}
    for name, own in tensor.state.get(keys.STATE_OF_PARAMETERS, {}).items():
        yield SavedFragment(name, 0, 0, {}, own, tensor.options, tensor.group, is_state_alone=True)
    by_parameter = tensor.state.get(STATE_BY_PARAMETER, {})
    for key, value in tensor.state.items():
        if key in (keys.STATE_OF_PARAMETERS, STATE_BY_PARAMETER):
            continue
        if tensor.is_per_element(key, value):
            flat[key] = value.reshape(-1)
        else:
            shared[key] = value
    for run in tensor.runs:
        values = {key: value[run.at : run.at + run.numel] for key, value in flat.items()}
        own = by_parameter.get(run.filed_as, shared)
        if run.filed_as in by_parameter and not own:
            # It has taken no step: what lies in its place of others' moments is not its state.
            values = {key: value for key, value in values.items() if key == FP32}
        yield SavedFragment(
            run.name, run.start, run.numel, values, own, tensor.options, tensor.group
        )
