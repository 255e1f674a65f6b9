"""How a value of tensors becomes bytes on a channel, and back; nothing here communicates.

A value is a tensor, None, a constant (bool, int, float, str), or a tuple or list of values.
`MessageSpec` says what one looks like, `Layout` how its tensors are packed, alike at both ends.

Pieces are bytes: backends need not know dtypes then. Small tensors share a piece; large ones travel
alone, from and into their own memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

# Up to this size a copy into a shared piece costs less than a transfer of its own.
SMALL_BYTES = 32 * 1024
# Offsets in a shared piece suit every dtype.
_ALIGNMENT = 16
# One transfer for usual descriptions: 8 bytes of length, then text. Longer ones go on in a second.
HEADER_BYTES = 1024
_LENGTH_BYTES = 8
_CONSTANTS: dict[str, Any] = {
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
    "str": str,
}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

# None, "tensor", ("const", type, text), or ("tuple", ...) or ("list", ...) of structures.
Structure = Any


class TensorSpec(NamedTuple):
    """What a tensor looks like, and whether its gradient will come back."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool = False

    @property
    def num_bytes(self) -> int:
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)}{' with gradient' if self.requires_grad else ''}"


class MessageSpec(NamedTuple):
    """What a message looks like: the nesting, with constants in it, and its tensors in order."""

    structure: Structure
    tensors: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        shapes = ", ".join(map(str, self.tensors))
        constants = "".join(f", constant {text}" for text in _constants(self.structure))
        return f"{len(self.tensors)} tensor{'s' * (len(self.tensors) != 1)} ({shapes}{constants})"


def specs_of(tensors: Sequence[torch.Tensor]) -> tuple[TensorSpec, ...]:
    """Say what these tensors look like, gradients aside."""
    return tuple(TensorSpec(tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


def take_apart(value: object) -> tuple[MessageSpec, list[torch.Tensor]]:
    """Say what a value looks like, and list its tensors; a TypeError names what cannot be sent."""
    tensors: list[torch.Tensor] = []
    structure = _take_apart(value, tensors)
    specs = tuple(
        TensorSpec(tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors
    )
    return MessageSpec(structure, specs), tensors


def _take_apart(value: Any, tensors: list[torch.Tensor]) -> Structure:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError(
                f"a {value.layout} tensor of {value.dtype} cannot be sent between pipeline stages; "
                "send a dense one"
            )
        tensors.append(value)
        return "tensor"
    kind = type(value)
    if value is None:
        return None
    if kind in (tuple, list):
        return (kind.__name__, *(_take_apart(item, tensors) for item in value))
    if kind.__name__ in _CONSTANTS and kind.__module__ == "builtins":
        # As text: nan would differ from itself, and True would equal 1.
        return ("const", kind.__name__, str(value))
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent between pipeline stages: only "
        "tensors, None, bool, int, float, str, and tuples and lists of these; let the layer return "
        "these"
    )


def put_together(spec: MessageSpec, tensors: Sequence[torch.Tensor]) -> Any:
    """Put these tensors into the value that the spec describes."""
    return _put_together(spec.structure, iter(tensors))


def _put_together(structure: Structure, tensors: Iterator[torch.Tensor]) -> Any:
    if structure is None:
        return None
    if structure == "tensor":
        return next(tensors)
    kind, *parts = structure
    if kind == "const":
        name, text = parts
        return _CONSTANTS[name](text)
    items = [_put_together(part, tensors) for part in parts]
    return tuple(items) if kind == "tuple" else items


def _constants(structure: Structure) -> Iterator[str]:
    if isinstance(structure, tuple):
        if structure[0] == "const":
            yield structure[2]
            return
        for part in structure[1:]:
            yield from _constants(part)


# -- descriptions ----------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def encode(spec: MessageSpec) -> bytes:
    """Write a description as text, behind its length."""
    tensors = [[str(tensor.dtype), tensor.shape, tensor.requires_grad] for tensor in spec.tensors]
    text = json.dumps([spec.structure, tensors], separators=(",", ":")).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def bytes_after_header(header: bytes) -> int:
    """Tell how much of the description is not in its first `HEADER_BYTES`."""
    length = int.from_bytes(header[:_LENGTH_BYTES], "little")
    return max(0, _LENGTH_BYTES + length - HEADER_BYTES)


@lru_cache(maxsize=256)
def decode(data: bytes) -> MessageSpec:
    """Read the description in these bytes; what follows it is padding."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    structure, tensors = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    specs = tuple(
        TensorSpec(_DTYPES[dtype], tuple(shape), requires_grad)
        for dtype, shape, requires_grad in tensors
    )
    return MessageSpec(_tuples(structure), specs)


def _tuples(structure: object) -> Structure:
    return tuple(_tuples(part) for part in structure) if isinstance(structure, list) else structure


# -- pieces ----------------------------------------------------------------------------------------


class Layout:
    """The pieces in which tensors travel: one, or above `SMALL_BYTES`, alone; others joined."""

    def __init__(self, specs: tuple[TensorSpec, ...]) -> None:
        self.specs = specs
        filled = [index for index, spec in enumerate(specs) if spec.num_bytes]
        shared = [index for index in filled if specs[index].num_bytes <= SMALL_BYTES]
        if len(shared) == 1:
            shared = []
        self._alone = [index for index in filled if index not in shared]
        self._shared: list[tuple[int, int]] = []
        self._shared_bytes = 0
        for index in shared:
            self._shared.append((index, self._shared_bytes))
            self._shared_bytes += -(-specs[index].num_bytes // _ALIGNMENT) * _ALIGNMENT

    def pieces(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """What to send: bytes on `device`. A lone contiguous tensor there is not copied."""
        pieces = [_as_bytes(tensors[index].detach().to(device)) for index in self._alone]
        if self._shared:
            piece = torch.empty(self._shared_bytes, dtype=torch.uint8, device=device)
            for index, start in self._shared:
                data = _as_bytes(tensors[index].detach().to(device))
                piece[start : start + data.numel()].copy_(data)
            pieces.append(piece)
        return pieces

    def allocate(self, device: torch.device) -> Arrival:
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in self.specs]
        pieces = [_as_bytes(tensors[index]) for index in self._alone]
        if self._shared:
            pieces.append(torch.empty(self._shared_bytes, dtype=torch.uint8, device=device))
        return Arrival(self, tensors, pieces)

    def spread(self, arrival: Arrival) -> None:
        """Copy what came in the shared piece to where it belongs.

        Copies: as views of one piece the tensors would share autograd's count of changes, and live
        as long as the last of them.
        """
        for index, start in self._shared:
            target = _as_bytes(arrival.tensors[index])
            target.copy_(arrival.pieces[-1][start : start + target.numel()])


class Arrival(NamedTuple):
    """Memory that a message is received into: tensors, complete after `take`, and pieces."""

    layout: Layout
    tensors: list[torch.Tensor]
    pieces: list[torch.Tensor]

    def take(self) -> list[torch.Tensor]:
        self.layout.spread(self)
        return self.tensors


@lru_cache(maxsize=256)
def layout_of(specs: tuple[TensorSpec, ...]) -> Layout:
    """Find the layout of tensors that look like this."""
    return Layout(specs)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)
