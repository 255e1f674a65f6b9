"""What is checked: model, batches and loss (docs/ds_verify.md), the same in every process."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

import numpy
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten
from torch.utils.data import Dataset

from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine_parts.model_setup import cast_module
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.verify.oracle import UsageError
from deepspeed.verify.oracle.drawn import DrawnBatches, read_inputs
from deepspeed.verify.oracle.hugging_face import build_model, turn_off
from deepspeed.verify.oracle.parts import Parts, on_this_rank_alone, take_weights, whole_models

HUGGING_FACE = "hf:"
Batch = Any
"""One batch, as the user's function or loader makes it: tensors in any nesting."""
Batches = Any
"""A function of (rank, step) or of (step, micro_batch, rank), a dataset, or an iterable of batches;
None if there are none.
"""
Output = Any
"""What the user's module returns."""


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
                f"--model: loss(output, batch) returned {kind_of(value)}; return a scalar tensor, "
                "the batch's mean"
            )
        return value

    def fed(self, batch: Batch, dtype: torch.dtype) -> tuple[Any, Any]:
        """What a pipeline whose weights have `dtype` is given of a batch: inputs and labels."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            text = f"a PipelineModule takes batches (inputs, labels), but one is {kind_of(batch)}"
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
            f"returned {kind_of(output)}; return (module, batches, loss) with loss(output, batch), "
            "batches None where --data or a function batch(rank, step) gives them"
        )
    return found


def kind_of(value: object) -> str:
    """Name what was given in the place of something else."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def has_rows(leaf: object) -> TypeGuard[torch.Tensor]:
    """Whether a part of a batch is a tensor with a sample in each row."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


# Loading


def load_workload(
    model: str, data: str | None, seed: int, rows: int, whole: bool = True
) -> Workload:
    """Load what `--model` and `--data` name, dropout off; not `whole`: this rank's part of it."""
    seed_everything(seed)
    with whole_models() if whole else nullcontext(Parts()) as parts:
        if model.startswith(HUGGING_FACE):
            made: Any = build_model(model.removeprefix(HUGGING_FACE), seed, rows)
            beside = None
        else:
            file, function = _named("--model", model)
            made, beside = function(), getattr(file, "batch", None)
    given = list(made) if isinstance(made, (tuple, list)) else [made]
    module, batches, loss = (*given, None, None)[:3]
    if data is not None:
        batches = _data(data, seed)
    elif batches is None and callable(beside) and is_by_rank(beside):
        batches = beside
    wrong = ""
    if not 1 <= len(given) <= 3 or not isinstance(module, nn.Module):
        wrong = (
            f"returned {kind_of(made)}; return a torch.nn.Module, (module, batches) or (module, "
            "batches, loss)"
        )
    elif loss is not None and not callable(loss):
        wrong = f"loss is {kind_of(loss)}; give a function loss(output, batch) or leave it out"
    elif loss is not None and isinstance(module, PipelineModule):
        wrong = "a PipelineModule's loss is its loss_fn; return (module, batches)"
    elif whole and not any(param.requires_grad for param in module.parameters()):
        wrong = "no parameter of the module requires a gradient, so there is nothing to check"
    if wrong:
        raise UsageError(f"--model {model}: {wrong}")
    part = partial(load_workload, model, data, seed, rows, whole=False)
    random = without_randomness(module)
    return Workload(module, batches, loss, _told(random), parts, random, part)


def is_by_rank(function: Callable[..., Any]) -> bool:
    """Whether a function is a `batch(rank, step)`, which its parameters' names say."""
    return set(inspect.signature(function).parameters) == {"rank", "step"}


def _named(argument: str, spec: str) -> tuple[ModuleType, Callable[..., Any]]:
    """Find the function that `module:function` or `file.py:function` names, and where it stands."""
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
    return module, function


def _data(spec: str, seed: int) -> Batches:
    exists = Path(spec).exists()
    if "[" in spec and not exists and not Path(spec.rpartition(":")[0]).is_file():
        return DrawnBatches(read_inputs(spec), seed)
    if ":" in spec and not exists:
        _, made = _named("--data", spec)
        # The function of batches itself, or one that makes the batches.
        is_function = is_by_rank(made) or len(inspect.signature(made).parameters) == 3
        return made if is_function else made()
    if not Path(spec).is_file():
        kinds = "neither a file nor package.module:function nor shapes such as 'float32[8,16]'"
        raise UsageError(f"--data {spec}: {kinds}")
    leaves, structure = tree_flatten(torch.load(spec, weights_only=True))
    sizes = {leaf.shape[0] if has_rows(leaf) else -1 for leaf in leaves}
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
