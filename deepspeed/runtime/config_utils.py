"""Small helpers of the configuration, light on purpose: `import deepspeed` imports them, and
pydantic alone costs more than that may.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch

from deepspeed._lazy import lazy_attributes
from deepspeed.utils.exceptions import MisuseError

__getattr__ = lazy_attributes(
    __name__, {"DeepSpeedConfigModel": "deepspeed.runtime.config_models.base"}
)


class DeepSpeedConfigError(MisuseError):
    """A configuration cannot be honoured; the text names the key, the value and the remedy."""


class ScientificNotationEncoder(json.JSONEncoder):
    """JSON encoder of dtypes, enums, paths and whatever else configurations hold."""

    def default(self, o: object) -> Any:
        return str(o)


class DeepSpeedConfigObject:
    """Prints as the JSON of its attributes."""

    def repr(self) -> dict[str, Any]:
        return self.__dict__

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, indent=4, cls=ScientificNotationEncoder)


def dict_raise_error_on_duplicate_keys(ordered_pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Refuse an object with a key given twice: an ``object_pairs_hook`` of JSON readers."""
    counts = Counter(key for key, _ in ordered_pairs)
    twice = [key for key, count in counts.items() if count > 1]
    if twice:
        raise DeepSpeedConfigError(
            f"duplicate keys in the configuration: {twice}; keep one value of each"
        )
    return dict(ordered_pairs)


def get_scalar_param(
    param_dict: dict[str, Any], param_name: str, param_default_value: object
) -> Any:
    """Return ``param_dict[param_name]``, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_scalar_param
get_dict_param = get_scalar_param


_DTYPE_NAMES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


def parse_dtype(value: str | torch.dtype | None, key: str = "dtype") -> torch.dtype | None:
    """Return the dtype that a value names: ``"fp32"``, ``"fp16"``, ``"bf16"``, torch's names with
    or without ``torch.``, a dtype, or None. `key` is for the error.
    """
    if value is None:
        return None
    name = str(value).lower().removeprefix("torch.")
    if name not in _DTYPE_NAMES:
        raise DeepSpeedConfigError(
            f'{key}: {value!r} is not a data type; use "fp32", "fp16", "bf16" or null'
        )
    return _DTYPE_NAMES[name]
