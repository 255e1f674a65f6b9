"""Values of ``optimizer.params`` and ``scheduler.params``, read by the annotations of the
constructor that they are for, as other keys are by those of their models.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic_core import PydanticCustomError

from deepspeed.runtime.config_models.base import read_boolean, read_integer, read_number, read_text
from deepspeed.runtime.config_utils import DeepSpeedConfigError

Kind = Any  # an annotation: a class, or one of `typing`'s forms
_READERS: dict[Kind, Callable[[object], object]] = {
    bool: read_boolean,
    int: read_integer,
    float: read_number,
    str: read_text,
}
_NAMES = dict(zip(_READERS, ("true or false", "an integer", "a number", "a string"), strict=True))
_NAMES[types.NoneType] = "null"
# What else a script's dict may hold is for the class to judge.
_OF_JSON = (str, int, float, list, tuple, dict, types.NoneType)


class _Wrong(ValueError):
    """A value is not of its kind."""


def read_arguments(
    cls: Callable[..., object], given: Mapping[str, Any], path: str
) -> dict[str, Any]:
    """Read ``given``, at ``path``, as keyword arguments of an optimizer or schedule, whose first is
    the engine's to give. DeepSpeedConfigError has a line for each key that the class does not know,
    or needs and has not got, or cannot take the value of.
    """
    _, *accepted = inspect.signature(cls).parameters.values()
    names = [parameter.name for parameter in accepted if parameter.name != "model_params"]
    lines = [
        f"{path}.{key} is no argument of {cls.__name__}; it takes {', '.join(names)}"
        for key in sorted(given.keys() - set(names))
    ]
    kinds = _kinds(cls)
    read: dict[str, Any] = {}
    for parameter in accepted:
        name = parameter.name
        if name in given:
            default = parameter.default
            kind = kinds.get(name, Any if default is None else type(default))
            try:
                read[name] = read_argument(given[name], kind, f"{path}.{name}")
            except DeepSpeedConfigError as error:
                lines.append(str(error))
        elif parameter.default is parameter.empty and name in names:
            lines.append(f"{path}.{name}: is missing, {cls.__name__} needs it; add it")
    if lines:
        raise DeepSpeedConfigError("\n".join(lines))
    return read


def _kinds(cls: Callable[..., object]) -> dict[str, Kind]:
    try:
        # Some of torch's classes import names of annotations for type checkers alone.
        return get_type_hints(cls.__init__, localns=vars(collections.abc))
    except NameError:
        return {}


def read_argument(value: object, kind: Kind, path: str) -> Any:
    """Read ``value`` as an annotation says; numbers and booleans may be spelled as text."""
    try:
        return _read(value, kind)
    except _Wrong:
        raise DeepSpeedConfigError(
            f"{path}: {value!r} ({type(value).__name__}) is of the wrong type or out of range: "
            f"expected {_name(kind)}"
        ) from None


def _read(value: object, kind: Kind) -> object:
    origin, inner = get_origin(kind), get_args(kind)
    if not isinstance(value, _OF_JSON):
        return value
    if kind in _READERS:
        try:
            return _READERS[kind](value)
        except PydanticCustomError as error:
            raise _Wrong from error
    if origin in (Union, types.UnionType):
        return _read_any(value, inner)
    if _is_list(origin):
        return _read_list(value, origin, inner)
    if (origin is Literal and value not in inner) or (kind is types.NoneType and value is not None):
        raise _Wrong
    return value


def _read_any(value: object, kinds: tuple[Kind, ...]) -> object:
    for kind in kinds:
        try:
            if _name(kind):
                return _read(value, kind)
        except _Wrong:
            continue
    raise _Wrong


def _is_list(origin: Kind) -> bool:
    return isinstance(origin, type) and issubclass(origin, Iterable) and origin is not dict


def _read_list(value: object, origin: Kind, inner: tuple[Kind, ...]) -> object:
    if not isinstance(value, (list, tuple)):
        raise _Wrong
    has_length = origin is tuple and ... not in inner
    kinds = inner if has_length else inner[:1] * len(value)
    if len(kinds) != len(value):
        raise _Wrong
    read = [_read(item, kind) for item, kind in zip(value, kinds, strict=True)]
    return tuple(read) if origin is tuple else read


def _name(kind: Kind) -> str:
    """Return what a user is told of it; nothing for what JSON has not."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(filter(None, map(_name, inner)))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if _is_list(origin):
        length = "" if origin is tuple and ... not in inner else ", ..."
        return f"[{', '.join(_name(item) for item in inner if item is not ...)}{length}]"
    return _NAMES.get(kind, "")
