"""Random batches of the shapes that `--data` writes (docs/ds_verify.md), and the shapes that would
suit a model or a batch, written so.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from deepspeed.verify.oracle import UsageError

FLOATS = {name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16")}
INTEGERS = {name: getattr(torch, name) for name in ("int64", "int32", "int16", "int8", "uint8")}
DTYPES: dict[str, torch.dtype] = {**FLOATS, **INTEGERS, "bool": torch.bool}
_COMMA = re.compile(r",(?![^\[]*\])")  # not one between sizes
_NUMBER = r"-?\d+(?:\.\d+)?"
_INPUT = re.compile(
    r"(?:(?P<name>[^\W\d]\w*)\s*=\s*)?(?P<dtype>\w+)\s*\[(?P<sizes>[\d\s,]*)\]"
    rf"(?:\s*:\s*(?P<low>{_NUMBER})\s*\.\.\s*(?P<high>{_NUMBER}))?"
)
LARGEST = 2**53
"""Up to this a range is read without rounding."""
# Sizes that a suggestion has where a model does not tell them.
_LENGTH, _WIDTH, _PIXELS = 16, 8, 32
# Arguments of language models that need a value, though they have a default.
_TOKENS = ("input_ids", "labels")


@dataclass(frozen=True)
class Input:
    """One tensor of a batch. Floating-point numbers without a range are standard normal."""

    dtype: str
    sizes: tuple[int, ...]
    ends: tuple[float, float] | None = None  # of the range, both drawn too
    name: str = ""  # keyword of forward; empty: by position

    def __str__(self) -> str:
        """Write the tensor as `--data` does."""
        name = f"{self.name}=" if self.name else ""
        values = "" if self.ends is None else f":{'..'.join(map(_number, self.ends))}"
        return f"{name}{self.dtype}[{','.join(map(str, self.sizes))}]{values}"

    def code(self) -> str:
        """Write the tensor as Python does."""
        sizes = f"({', '.join(map(str, self.sizes))}{',' * (len(self.sizes) == 1)})"
        if self.dtype == "bool":
            return f"torch.rand({sizes}) < 0.5"
        if self.dtype in INTEGERS and self.ends is not None:
            low, high = self.ends
            kind = "" if self.dtype == "int64" else f", dtype=torch.{self.dtype}"
            return f"torch.randint({_number(low)}, {_number(high + 1)}, {sizes}{kind})"
        return f"torch.randn({sizes})"

    def mistakes(self) -> list[str]:
        """Say what cannot be drawn so."""
        given, found = str(self), []
        if self.dtype not in DTYPES:
            found.append(f"{given}: the dtype is one of {', '.join(DTYPES)}")
        if self.dtype == "bool" and self.ends is not None:
            found.append(f"{given}: bool has no range; leave it out")
        if not self.sizes or 0 in self.sizes:
            found.append(f"{given}: sizes are positive, and the first one counts samples")
        if self.ends is not None and self.ends[0] > self.ends[1]:
            found.append(f"{given}: the range is empty; write LOWEST..HIGHEST")
        if self.dtype not in INTEGERS:
            return found
        limits = torch.iinfo(INTEGERS[self.dtype])
        if self.ends is None:
            ranged = replace(self, ends=(0, 99))
            found.append(f"{given}: integers need a range, both ends drawn too, such as {ranged}")
        elif any(end != int(end) for end in self.ends):
            found.append(f"{given}: the range of integers has integers as its ends")
        elif self.ends[0] < limits.min or self.ends[1] > min(limits.max, LARGEST):
            found.append(f"{given}: {self.dtype} holds no such number")
        return found

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Draw the tensor."""
        dtype = DTYPES[self.dtype]
        if self.dtype in FLOATS and self.ends is None:
            return torch.randn(self.sizes, generator=generator).to(dtype)
        low, high = self.ends or (0, 1)
        if self.dtype in FLOATS:
            share = torch.rand(self.sizes, generator=generator, dtype=torch.float64)
            return (low + share * (high - low)).to(dtype)
        return torch.randint(int(low), int(high) + 1, self.sizes, generator=generator).to(dtype)


class DrawnBatches:
    """A function `batch(rank, step)` that draws its tensors, the same ones in every process."""

    def __init__(self, inputs: Sequence[Input], seed: int) -> None:
        self.inputs = inputs
        self._seed = seed

    def __call__(self, rank: int, step: int) -> Any:
        """One batch of a rank."""
        generator = torch.Generator().manual_seed((self._seed * 1009 + step) * 1009 + rank)
        tensors = [one.draw(generator) for one in self.inputs]
        names = [one.name for one in self.inputs]
        if all(names):
            return dict(zip(names, tensors, strict=True))
        return tuple(tensors) if len(tensors) > 1 else tensors[0]


def read_inputs(spec: str) -> list[Input]:
    """Read what `--data` writes; UsageError with all that is wrong."""
    inputs, wrong = [], []
    for text in (part.strip() for part in _COMMA.split(spec)):
        found = _INPUT.fullmatch(text)
        if found is None:
            wrong.append(f"{text!r} is no [NAME=]DTYPE[SIZES][:LOWEST..HIGHEST]")
            continue
        sizes = tuple(int(size) for size in found["sizes"].split(",") if size.strip())
        ends = None if found["low"] is None else (float(found["low"]), float(found["high"]))
        inputs.append(Input(found["dtype"], sizes, ends, found["name"] or ""))
        wrong += inputs[-1].mistakes()
    names = [one.name for one in inputs]
    if any(names) and not all(names):
        wrong.append("give a name to each tensor or to none")
    wrong += [f"{name} is there twice" for name in set(names) - {""} if names.count(name) > 1]
    if wrong:
        good = "'float32[8,16], int64[8]:0..9' or 'x=float32[8,16], y=int64[8]:0..9'"
        raise UsageError(f"--data '{spec}': {'; '.join(wrong)}. Write it like {good}")
    return inputs


def listed(inputs: Sequence[Input]) -> str:
    """Write the tensors of a batch as `--data` does."""
    return ", ".join(map(str, inputs))


def code_of(inputs: Sequence[Input]) -> str:
    """Write a batch as Python does."""
    tensors = [one.code() for one in inputs]
    if all(one.name for one in inputs):
        pairs = zip(inputs, tensors, strict=True)
        return f"{{{', '.join(f'{one.name!r}: {tensor}' for one, tensor in pairs)}}}"
    return ", ".join(tensors)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def of_rows(inputs: Sequence[Input], rows: int) -> list[Input]:
    """Return the same tensors with this number of samples."""
    return [replace(one, sizes=(rows, *one.sizes[1:])) for one in inputs]


def inputs_like(batch: Any) -> list[Input]:
    """Describe a batch; empty if it has other things than tensors that `--data` can name."""
    if isinstance(batch, Mapping):
        given = [(str(name), leaf) for name, leaf in batch.items()]
    else:
        given = [("", leaf) for leaf in (batch if isinstance(batch, (tuple, list)) else [batch])]
    found = []
    for name, leaf in given:
        dtype = str(getattr(leaf, "dtype", "")).removeprefix("torch.")
        if not isinstance(leaf, torch.Tensor) or not leaf.numel() or dtype not in DTYPES:
            return []
        ends = (float(leaf.min()), float(leaf.max())) if dtype in INTEGERS else None
        found.append(Input(dtype, tuple(leaf.shape), ends, name))
    return found


def inputs_for(module: nn.Module, rows: int, paired: bool) -> list[Input]:
    """Guess batches from the module's layers and what its forward must be given; `paired` ones are
    of inputs and targets.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [
        one.name
        for one in parameters
        if one.kind not in variadic and (one.default is one.empty or one.name in _TOKENS)
    ]
    if len(names) < 2:
        names = ["", ""] if paired else [""]
    layers = [layer for layer in module.modules() if not any(layer.children())]
    first = next((guess for layer in layers if (guess := _taken_by(layer, rows))), None)
    first = first or Input("float32", (rows, _WIDTH))
    outlet = next((one for one in reversed(layers) if isinstance(one, nn.Linear)), None)
    other = first
    if outlet is not None and first.dtype not in INTEGERS:
        other = Input("float32", (rows, outlet.out_features))
    return [replace(other if place else first, name=name) for place, name in enumerate(names)]


def _taken_by(layer: nn.Module, rows: int) -> Input | None:
    """What a layer takes, if it is one that tells."""
    if isinstance(layer, nn.Embedding):
        return Input("int64", (rows, _LENGTH), (0, layer.num_embeddings - 1))
    if isinstance(layer, nn.Linear):
        return Input("float32", (rows, layer.in_features))
    if isinstance(layer, _ConvNd):
        return Input("float32", (rows, layer.in_channels, *[_PIXELS] * len(layer.kernel_size)))
    return None
