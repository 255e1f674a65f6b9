"""What is checked: model, batches and loss (docs/ds_verify.md), the same in every process; and
cutting one global batch into micro-batches in different ways.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeGuard

import numpy
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_map_only, tree_unflatten
from torch.utils.data import Dataset, IterableDataset, default_collate

from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine_parts.model_setup import cast_module
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.verify.oracle import UsageError
from deepspeed.verify.oracle.hugging_face import build_model, turn_off
from deepspeed.verify.oracle.parts import Parts, on_this_rank_alone, take_weights, whole_models

HUGGING_FACE = "hf:"
Batch = Any
"""One batch, as the user's function or loader makes it: tensors in any nesting."""
Batches = Any
"""A function of (step, micro_batch, rank), a dataset, or an iterable of batches."""
Output = Any
"""What the user's module returns."""


@dataclass(frozen=True)
class Shape:
    """How one global batch is cut."""

    world: int  # data-parallel ranks
    accumulation: int  # micro-batches per rank and step
    rows: int  # samples per micro-batch

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step over all ranks."""
        return self.world * self.accumulation

    def place(self, rank: int, micro: int) -> int:
        """Position of a rank's micro-batch in the global batch."""
        return micro * self.world + rank

    def splits(self) -> list[Shape]:
        """Cut the same global batch otherwise: all at once, and into as many (at most 8) as fit."""
        samples = self.accumulation * self.rows
        finest = next(a for a in range(min(samples, 8), 0, -1) if samples % a == 0)
        wanted = {1, finest} - {self.accumulation}
        return [Shape(self.world, a, samples // a) for a in sorted(wanted)]


@dataclass
class Workload:
    """A model with its data."""

    # As the user's function made it, dropout off; never trained, copied for every run.
    module: nn.Module
    batches: Batches
    # None: the module returns it.
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    # What was changed or cannot be compared, for the report.
    notes: list[str] = field(default_factory=list)
    parts: Parts = field(default_factory=Parts)
    # What was random, by module and attribute, and is turned off.
    random: dict[tuple[str, str], float] = field(default_factory=dict)
    # Loads this rank's part of a model that has several.
    part: Callable[[], Workload] | None = None

    def copy_module(
        self, dtype: torch.dtype | None = None, buffers: torch.dtype | None = None
    ) -> nn.Module:
        """Copy the module with initial weights, in training mode, cast as the engine casts it."""
        module = copy.deepcopy(self.module, on_this_rank_alone(self.module)).train()
        cast_module(module, dtype, buffers)
        return module

    def own_part(
        self, data_first: bool, is_whole: bool, draws: bool
    ) -> tuple[nn.Module, dict[str, str]]:
        """What this rank trains, with initial weights, and its names in the whole model; `is_whole`
        all of it, and if it `draws`, with dropout.
        """
        if is_whole or self.part is None or self.parts == Parts():
            module, random = self.copy_module(), self.random
            names = {name: name for name in module.state_dict()}
        else:
            part = self.part()
            module, random = part.module.train(), part.random
            names = take_weights(module, self.module, data_first)
        for (place, key), value in random.items() if draws else ():
            setattr(module.get_submodule(place), key, value)
        return module, names

    def batch_norms(self) -> list[str]:
        """Name modules whose output for a sample depends on the rest of its micro-batch."""
        modules = self.module.named_modules()
        return [name for name, module in modules if isinstance(module, (_BatchNorm, MoE))]

    def loss_of(
        self, forward: Callable[..., Any], batch: Batch, dtype: torch.dtype
    ) -> torch.Tensor:
        """Compute the scalar loss of one batch under `forward`, whose weights have `dtype`."""
        if isinstance(self.module, PipelineModule):
            inputs, labels = self.fed(batch, dtype)
            output, loss = forward(inputs), self.module.loss_fn
            return _scalar(output if loss is None else loss(output, labels))
        pair = self.loss is not None and isinstance(batch, (tuple, list)) and len(batch) == 2
        output = _call(forward, _cast(batch[0] if pair else batch, dtype))
        if self.loss is None:
            return _scalar(output)
        wide = torch.promote_types(dtype, torch.float32)
        value = self.loss(_cast(output, wide), _cast(batch, wide))
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise UsageError(
                f"--model: loss(output, batch) returned {_kind(value)}; return a scalar tensor, "
                "the batch's mean"
            )
        return value

    def fed(self, batch: Batch, dtype: torch.dtype) -> tuple[Any, Any]:
        """What a pipeline whose weights have `dtype` is given of a batch: inputs and labels."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            text = f"a PipelineModule takes batches (inputs, labels), but one is {_kind(batch)}"
            raise UsageError(f"--model: {text}")
        inputs = tuple(batch[0]) if isinstance(batch[0], list) else batch[0]
        return _cast(inputs, dtype), _cast(batch[1], torch.promote_types(dtype, torch.float32))


def _cast(value: Batch, dtype: torch.dtype) -> Batch:
    def cast(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    return tree_map_only(torch.Tensor, cast, value)


def _call(forward: Callable[..., Output], inputs: Batch) -> Output:
    if isinstance(inputs, Mapping):
        return forward(**inputs)
    return forward(*inputs) if isinstance(inputs, (tuple, list)) else forward(inputs)


def _scalar(output: Output) -> torch.Tensor:
    found = output
    if isinstance(output, Mapping) and "loss" in output:
        found = output["loss"]
    elif getattr(output, "loss", None) is not None:
        found = output.loss
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.is_floating_point():
        raise UsageError(
            "--model: without a loss function the module must return its scalar loss, but it "
            f"returned {_kind(output)}; return (module, batches, loss) with loss(output, batch)"
        )
    return found


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


# Loading


def load_workload(
    model: str, data: str | None, seed: int, rows: int, whole: bool = True
) -> Workload:
    """Load what `--model` and `--data` name, dropout off; not `whole`: this rank's part of it."""
    seed_everything(seed)
    with whole_models() if whole else nullcontext(Parts()) as parts:
        if model.startswith(HUGGING_FACE):
            made: Any = build_model(model.removeprefix(HUGGING_FACE), seed, rows)
        else:
            made = _function("--model", model)()
    given = list(made) if isinstance(made, (tuple, list)) else [made]
    module, batches, loss = (*given, None, None)[:3]
    if data is not None:
        batches = _data(data)
    wrong = ""
    if not 1 <= len(given) <= 3 or not isinstance(module, nn.Module):
        wrong = (
            f"returned {_kind(made)}; return a torch.nn.Module, (module, batches) or (module, "
            "batches, loss)"
        )
    elif loss is not None and not callable(loss):
        wrong = f"loss is {_kind(loss)}; give a function loss(output, batch) or leave it out"
    elif loss is not None and isinstance(module, PipelineModule):
        wrong = "a PipelineModule's loss is its loss_fn; return (module, batches)"
    elif batches is None:
        wrong = "there are no batches; return (module, batches) or give --data"
    elif whole and not any(param.requires_grad for param in module.parameters()):
        wrong = "no parameter of the module requires a gradient, so there is nothing to check"
    if wrong:
        raise UsageError(f"--model {model}: {wrong}")
    part = partial(load_workload, model, data, seed, rows, whole=False)
    random = without_randomness(module)
    return Workload(module, batches, loss, _told(random), parts, random, part)


def _function(argument: str, spec: str) -> Callable[..., Any]:
    """Find the function that `module:function` or `file.py:function` names."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UsageError(f"{argument} {spec}: expected package.module:function or file.py:function")
    folder = os.getcwd()
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise UsageError(f"{argument} {spec}: there is no file {path}")
        # A script's folder is on the path when the script runs; its own imports count on that.
        folder, place = str(path.parent), path.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        remedy = f"give a module that Python finds from {os.getcwd()}, or file.py"
        raise UsageError(f"{argument} {spec}: {error}; {remedy}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{argument} {spec}: {place} has no function {name!r}")
    return function


def _data(spec: str) -> Batches:
    if ":" in spec and not Path(spec).exists():
        made = _function("--data", spec)
        # `batches(step, micro_batch, rank)` itself, or a function that makes the batches.
        return made if len(inspect.signature(made).parameters) == 3 else made()
    if not Path(spec).is_file():
        raise UsageError(f"--data {spec}: neither a file nor package.module:function")
    leaves, structure = tree_flatten(torch.load(spec, weights_only=True))
    sizes = {leaf.shape[0] if _has_rows(leaf) else -1 for leaf in leaves}
    if len(sizes) != 1 or min(sizes) < 1:
        raise UsageError(
            f"--data {spec}: expected a tensor, or a dict or tuple of tensors, with one number of "
            "samples in front"
        )
    return _TensorRows(leaves, structure)


class _TensorRows(Dataset[Any]):
    """Tensors whose first dimension counts samples, as a dataset."""

    def __init__(self, leaves: list[torch.Tensor], structure: TreeSpec) -> None:
        self.leaves = leaves
        self.structure = structure

    def __len__(self) -> int:
        return int(self.leaves[0].shape[0])

    def __getitem__(self, index: int) -> Batch:
        return tree_unflatten([leaf[index] for leaf in self.leaves], self.structure)


# What is random in a run


def seed_everything(seed: int) -> None:
    """Make the user's functions draw the same numbers in every process."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def without_randomness(module: nn.Module) -> dict[tuple[str, str], float]:
    """Turn dropout off in place: a run that draws other masks cannot equal the whole batch. Returns
    what it was, by module and attribute.
    """
    found = {}
    for name, part in module.named_modules():
        before = dict(vars(part))
        keys = turn_off(part, before)
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            part.p = 0.0
            keys.append("p")
        found.update({(name, key): before[key] for key in keys})
    return found


def _told(random: Iterable[tuple[str, str]]) -> list[str]:
    places = [name if key == "p" else f"{name}.{key}" for name, key in random]
    many = f"{len(places)} places ({', '.join(places[:3])}{', ...' * (len(places) > 3)})"
    return [f"dropout is set to 0 for the check in {many}"] if places else []


# Batches


class GlobalBatches:
    """The global batch of every step, cut as asked."""

    def __init__(self, workload: Workload, shape: Shape, steps: int) -> None:
        self.shape = shape
        # Why micro-batches cannot be joined to a whole batch; None if they can.
        self.whole_reason: str | None = None
        self._steps = _micro_batches(workload.batches, shape, steps)
        self._all = [batch for step in self._steps for batch in step]
        self._whole: dict[int, Any] = {}
        self._check_sizes()

    def _check_sizes(self) -> None:
        rows = self.shape.rows
        for number, batch in enumerate(self._all):
            sizes = {leaf.shape[0] for leaf in _tensors(batch) if leaf.dim()}
            if len(sizes) != 1:
                self.whole_reason = (
                    "the tensors of a batch have no common number of samples in front "
                    f"({sorted(sizes)}); a loader gives micro-batches of "
                    f"{rows} samples, a Dataset single ones"
                )
                return
            if sizes != {rows}:
                raise UsageError(
                    f"batch {number} has {sizes.pop()} samples, but the configuration's "
                    f"train_micro_batch_size_per_gpu is {rows}; make them agree"
                )
        kinds = [
            (tree_flatten(batch)[1], [leaf.shape[1:] for leaf in _tensors(batch) if leaf.dim()])
            for batch in self._all
        ]
        if any(kind != kinds[0] for kind in kinds):
            self.whole_reason = "batches differ in structure or shape"

    def micro_batches(self, step: int, shape: Shape | None = None) -> list[Batch]:
        """The micro-batches of a step in the order of `Shape.place`."""
        own = (self.shape.micro_batches, self.shape.rows)
        if shape is None or (shape.micro_batches, shape.rows) == own:
            return self._steps[step]
        whole, rows = self.whole(step), shape.rows
        return [_rows(whole, place * rows, rows) for place in range(shape.micro_batches)]

    def whole(self, step: int) -> Batch:
        """The global batch of a step as one batch; `whole_reason` must be None."""
        if step not in self._whole:
            flat = [tree_flatten(batch)[0] for batch in self._steps[step]]
            structure = tree_flatten(self._steps[step][0])[1]
            leaves = [_joined(parts) for parts in zip(*flat, strict=True)]
            self._whole[step] = tree_unflatten(leaves, structure)
        return self._whole[step]

    def checksum(self) -> float:
        """Return a number that differs when batches differ, for comparison between ranks."""
        total = 0.0
        for number, batch in enumerate(self._all, start=1):
            for leaf in _tensors(batch):
                flat = leaf.detach().double().reshape(-1)
                weights = torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64)
                total += number * float((flat * weights).sum())
        return total


def _tensors(batch: Batch) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]


def _has_rows(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _joined(leaves: Sequence[object]) -> object:
    tensors = [leaf for leaf in leaves if _has_rows(leaf)]
    return torch.cat(tensors) if tensors else leaves[0]


def _rows(batch: Batch, start: int, count: int) -> Batch:
    return tree_map(lambda leaf: leaf[start : start + count] if _has_rows(leaf) else leaf, batch)


def _micro_batches(batches: Batches, shape: Shape, steps: int) -> list[list[Any]]:
    sizes = (range(steps), range(shape.accumulation), range(shape.world))
    places = list(product(*sizes))  # (step, micro, rank)
    if callable(batches) and not isinstance(batches, (Dataset, Iterable)):
        found = [batches(*place) for place in places]
    elif _is_map_style(batches):
        found = list(_collated(batches, len(places), shape.rows))
    elif isinstance(batches, Iterable):
        found = list(islice(iter(batches), len(places)))
    else:
        raise UsageError(
            f"batches is {_kind(batches)}; give a function of (step, micro_batch, rank), a dataset "
            "or an iterable"
        )
    if len(found) < len(places):
        raise UsageError(
            f"batches ended after {len(found)} micro-batches; {steps} steps x {shape.accumulation} "
            f"micro-batches x {shape.world} ranks need {len(places)}. Give more, or lower --steps"
        )
    return [found[i : i + shape.micro_batches] for i in range(0, len(found), shape.micro_batches)]


def _is_map_style(batches: Batches) -> bool:
    is_dataset = isinstance(batches, Dataset) and not isinstance(batches, IterableDataset)
    return is_dataset and hasattr(batches, "__getitem__")


def _collated(dataset: Batches, count: int, rows: int) -> Iterator[Any]:
    size = len(dataset)
    if size < 1:
        raise UsageError("batches: the dataset is empty")
    for number in range(count):
        # A small dataset is gone through again: every step still has one well-defined global batch.
        yield default_collate([dataset[(number * rows + row) % size] for row in range(rows)])
