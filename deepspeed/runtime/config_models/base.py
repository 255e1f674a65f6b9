"""Base class and value types of every configuration model.

JSON values are read as upstream does where they have one meaning (``"8"`` is 8, ``1`` true), looser
where clients rely on it (``2e8`` is an integer), and stricter where leniency hides a mistake
(``true`` is no number).
"""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUseDefault

from deepspeed.utils.logging import logger

Default = TypeVar("Default")
Block = TypeVar("Block", bound=BaseModel)
T = TypeVar("T")

# Filled in by client libraries.
AUTO = "auto"
TAKES_AUTO = object()  # marks the types whose fields may be left at it
# What upstream's models take for a boolean, in any case; numbers are compared as such.
_SPELLINGS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}


class DeepSpeedConfigModel(BaseModel):
    """A block of the configuration, which refuses unknown keys; fields have names and aliases."""

    model_config = ConfigDict(
        extra="forbid",
        populate_by_name=True,
        validate_assignment=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        # startup: only the blocks that are read get their validators built.
        defer_build=True,
    )


def option(
    default: Default,
    doc: str,
    *,
    needs: str | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    alias: str | None = None,
) -> Default:
    """Return the field of a key; `needs` is what this release lacks for it to have an effect."""
    extra: JsonDict | None = None if needs is None else {"needs": needs}
    field: Default = Field(
        default, description=doc, ge=ge, gt=gt, le=le, alias=alias, json_schema_extra=extra
    )
    return field


def block(
    model: type[Block],
    doc: str | None = None,
    *,
    needs: str | None = None,
    alias: str | None = None,
) -> Block:
    """Return the field of a block whose keys have defaults, described by its model."""
    doc = doc or " ".join((model.__doc__ or "").split())
    extra: JsonDict | None = None if needs is None else {"needs": needs}
    field: Block = Field(
        default_factory=model, description=doc, alias=alias, json_schema_extra=extra
    )
    return field


def needs(field: FieldInfo) -> str | None:
    """Return what this release lacks for a key to have an effect."""
    extra = field.json_schema_extra
    return str(extra["needs"]) if isinstance(extra, dict) and "needs" in extra else None


def nested_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a block, possibly an optional one."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _wrong(expected: str) -> PydanticCustomError:
    return PydanticCustomError("wrong_type", "{expected}", {"expected": expected})


def _read_as(value: object, meant: T) -> T:
    logger.debug("configuration: %r is read as %r", value, meant)
    return meant


def plain_number(value: object) -> Any:
    """Read numbers that strings spell, in lists too; everything else stays."""
    if isinstance(value, list):
        return [plain_number(item) for item in value]
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return _read_as(value, kind(value))
        except ValueError:
            continue
    return value


def read_integer(value: object) -> int:
    """Read what is an integer, or spells one."""
    value = plain_number(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong("an integer")
    return value


def _size(value: object) -> int:
    if value == AUTO:
        # Clients fill sizes in at some stages and leave them at others (trl's reference models).
        raise PydanticUseDefault
    value = plain_number(value)
    # Clients compute sizes (0.9 * hidden * hidden); the fraction of an element means nothing.
    if isinstance(value, float) and not math.isnan(value):
        return sys.maxsize if value == math.inf else int(value)
    return read_integer(value)


def _interval(value: object) -> int | None:
    value = plain_number(value)
    # accelerate writes infinity for "never".
    return None if value is None or value == math.inf else read_integer(value)


def read_number(value: object) -> float:
    """Read what is a number, or spells one."""
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong("a number")
    return float(value)


def _whole_or_not(value: object) -> int | float:
    number = read_number(value)
    return int(number) if number.is_integer() else number


def read_boolean(value: object) -> bool:
    """Read what upstream takes for true or false."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return _read_as(value, bool(value))
    if isinstance(value, str) and value.lower() in _SPELLINGS:
        return _read_as(value, _SPELLINGS[value.lower()])
    raise _wrong("true or false")


def read_text(value: object) -> str:
    """Read text."""
    if not isinstance(value, str):
        raise _wrong("a string")
    return value


Int = Annotated[int, BeforeValidator(read_integer)]
Natural = Annotated[int, BeforeValidator(read_integer), Field(ge=0)]
Count = Annotated[int, BeforeValidator(read_integer), Field(ge=1)]
Size = Annotated[int, BeforeValidator(_size), Field(ge=0), TAKES_AUTO]
Interval = Annotated[int | None, BeforeValidator(_interval)]
Float = Annotated[float, BeforeValidator(read_number)]
Number = Annotated[int | float, BeforeValidator(_whole_or_not)]
Part = Annotated[float, BeforeValidator(read_number), Field(ge=0.0, le=1.0)]
Bool = Annotated[bool, BeforeValidator(read_boolean)]
Text = Annotated[str, BeforeValidator(read_text)]


def takes_auto(field: FieldInfo) -> bool:
    """Whether a field may be left at "auto", which is its default then."""
    return TAKES_AUTO in field.metadata
