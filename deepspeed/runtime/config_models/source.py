"""Where a configuration comes from: a dict, a JSON or hjson file, or base64-encoded JSON."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from typing import Any

from deepspeed.runtime.config_utils import DeepSpeedConfigError, dict_raise_error_on_duplicate_keys
from deepspeed.utils.logging import warn_once


def load_config(source: object) -> dict[str, Any]:
    """Return a dict of the caller's own from a dict, a JSON or hjson file, or base64 of JSON."""
    if isinstance(source, dict):
        return copy.deepcopy(dict(source))
    if isinstance(source, (str, os.PathLike)):
        if os.path.isfile(source):
            with open(source, encoding="utf-8") as file:
                return _parse(file.read(), f"configuration file {os.fspath(source)}")
        if isinstance(source, str):
            decoded = _decode_base64(source)
            if decoded is not None:
                return _parse(decoded, "base64-encoded configuration")
        raise DeepSpeedConfigError(
            f"configuration {os.fspath(source)!r} is neither an existing file nor base64-encoded "
            f"JSON; check the path (relative to {os.getcwd()}) or pass a dict"
        )
    raise DeepSpeedConfigError(
        f"configuration of type {type(source).__name__} ({source!r}); pass a dict, a path, or "
        "base64-encoded JSON"
    )


def _decode_base64(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text.encode("ascii"), b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except DeepSpeedConfigError as error:
        raise DeepSpeedConfigError(f"{origin}: {error}") from None
    except json.JSONDecodeError as error:
        parsed = _parse_hjson(text, origin, error)
    if not isinstance(parsed, dict):
        raise DeepSpeedConfigError(
            f"{origin}: holds a {type(parsed).__name__} at the top; it must be an object"
        )
    return parsed


def _parse_hjson(text: str, origin: str, json_error: json.JSONDecodeError) -> object:
    # optional: only a file that is not JSON needs the hjson reader.
    import hjson

    where = f"line {json_error.lineno}, column {json_error.colno}: {json_error.msg}"
    try:
        parsed = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except hjson.HjsonDecodeError as error:
        raise DeepSpeedConfigError(
            f"{origin} is malformed: as JSON, {where}; as hjson, line {error.lineno}, column "
            f"{error.colno}: {error.msg}"
        ) from None
    except DeepSpeedConfigError as error:
        raise DeepSpeedConfigError(f"{origin}: {error}") from None
    warn_once(f"{origin} is read as hjson, since it is not JSON ({where})")
    return parsed
