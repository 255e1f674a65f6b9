"""Base class and value types of every configuration model.

Owns how a JSON value becomes a Python value. The types are stricter than pydantic's own where
leniency hides a mistake (``"8"`` is no integer, ``1`` is no boolean) and looser where clients rely
on it (``2e8`` is an integer).
"""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


class DeepSpeedConfigModel(BaseModel):
    """A block of the configuration; unknown keys are refused, fields are known by name and by
    alias.
    """

    model_config = ConfigDict(
        extra="forbid",
        populate_by_name=True,
        validate_assignment=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        # startup: only the blocks that are read get their validators built.
        defer_build=True,
    )


def option(default: Any, doc: str, **limits: Any) -> Any:
    """Return a pydantic field: default, one-sentence documentation, and limits such as ``ge=0`` or
    ``alias=``.
    """
    if isinstance(default, (dict, list)) or (
        isinstance(default, type) and issubclass(default, BaseModel)
    ):
        factory = default if isinstance(default, type) else default.copy
        return Field(default_factory=factory, description=doc, **limits)
    return Field(default=default, description=doc, **limits)


def _wrong(expected: str) -> PydanticCustomError:
    return PydanticCustomError("wrong_type", "{expected}", {"expected": expected})


def _integer(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong("an integer")
    return value


def _size(value: Any) -> Any:
    # Clients compute sizes (0.9 * hidden * hidden); the fraction of an element means nothing.
    if isinstance(value, float) and not math.isnan(value):
        return sys.maxsize if value == math.inf else int(value)
    return _integer(value)


def _interval(value: Any) -> Any:
    # accelerate writes infinity for "never".
    return None if value is None or value == math.inf else _integer(value)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong("a number")
    return float(value)


def _boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise _wrong("true or false")
    return value


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise _wrong("a string")
    return value


Int = Annotated[int, BeforeValidator(_integer)]
Size = Annotated[int, BeforeValidator(_size)]
Interval = Annotated[int | None, BeforeValidator(_interval)]
Float = Annotated[float, BeforeValidator(_number)]
Bool = Annotated[bool, BeforeValidator(_boolean)]
Text = Annotated[str, BeforeValidator(_text)]
