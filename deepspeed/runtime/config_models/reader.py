"""From a user's dict to a validated model, and the wording of everything that can be wrong with it.
What values mean is not looked at here (``refusals``, ``deepspeed.runtime.config``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from deepspeed.runtime.config_models.base import AUTO, is_size, nested_model
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.constants import BFLOAT16_OLD
from deepspeed.utils.logging import warn_once

Model = TypeVar("Model", bound=BaseModel)
Block = dict[str, Any]

# Old path -> new path, where the value is kept.
RENAMED: dict[str, str] = {
    BFLOAT16_OLD: "bf16",
    "bf16.check_overflow": "bf16.check_grad_overflow",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "aio.thread_count": "aio.intra_op_parallelism",
}
# Old switch -> the block whose device becomes the CPU when it is true.
CPU_SWITCHES: dict[str, str] = {
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
}
PIN_MEMORY_SWITCH = "zero_optimization.cpu_offload_use_pin_memory"
# Keys of old that are now what the script does -> that.
CALLS: dict[str, str] = {
    "compile.enabled": "call engine.compile()",
    "compile.backend": "call engine.compile(backend=...)",
    "compile.kwargs": "call engine.compile(compile_kwargs={...})",
}
# A name that more blocks have than this ("enabled") says nothing about which one was meant.
_TELLING = 2


class Finding(NamedTuple):
    """A key that is unknown or still "auto"."""

    path: str
    kind: str  # "unknown" or "auto"
    model: type[BaseModel] | None


def known_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model by every key they may be given under (name and alias)."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        fields[field.alias or name] = field
        fields.setdefault(name, field)
    return fields


def _field_at(model: type[BaseModel], path: str) -> FieldInfo | None:
    first, _, rest = path.partition(".")
    field = known_fields(model).get(first)
    if field is None or not rest:
        return field
    inner = nested_model(field)
    return _field_at(inner, rest) if inner else None


def _look_up(config: Block, path: str) -> tuple[Block, str] | None:
    """Return the innermost dict and key of a dotted path that is present in ``config``."""
    *parents, last = path.split(".")
    block: Any = config
    for name in parents:
        block = block.get(name) if isinstance(block, dict) else None
    return (block, last) if isinstance(block, dict) and last in block else None


def _put(config: Block, path: str, value: object) -> None:
    """Set a dotted path, making the blocks on the way."""
    *parents, last = path.split(".")
    block = config
    for name in parents:
        if not isinstance(block.get(name), dict):
            block[name] = {}
        block = block[name]
    block[last] = value


def apply_dotted_keys(model: type[BaseModel], config: Block) -> None:
    """Nest top-level keys such as ``"zero_optimization.stage"`` (trl writes them), if known."""
    for key in [key for key in config if "." in str(key)]:
        if _field_at(model, key) is not None:
            _put(config, key, config.pop(key))


def apply_deprecated_names(config: Block) -> None:
    """Rewrite old names to the present ones, in place, with one warning."""
    replaced: list[str] = []
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        # The oldest form of the key was a switch for stage 1.
        config["zero_optimization"] = {"stage": int(zero)}
        replaced.append('zero_optimization: true/false (use {"stage": ...})')
    for old, new in RENAMED.items():
        found = _look_up(config, old)
        if found is None:
            continue
        if _look_up(config, new) is not None:
            raise DeepSpeedConfigError(
                f"{old} is the old name of {new} and both are given; remove {old}"
            )
        _put(config, new, found[0].pop(found[1]))
        replaced.append(f"{old} (use {new})")
    replaced.extend(_apply_cpu_switches(config))
    if replaced:
        warn_once(f"deprecated configuration keys: {', '.join(replaced)}")


def _apply_cpu_switches(config: Block) -> Iterator[str]:
    pinned = _look_up(config, PIN_MEMORY_SWITCH)
    pin_value = pinned[0].pop(pinned[1]) if pinned else None
    if pinned:
        yield f"{PIN_MEMORY_SWITCH} (use pin_memory of the offload blocks)"
    for switch, block_path in CPU_SWITCHES.items():
        found = _look_up(config, switch)
        if found is None:
            continue
        value = found[0].pop(found[1])
        if value is not None and not isinstance(value, bool):
            raise DeepSpeedConfigError(
                f"{switch}: {value!r} is of the wrong type: expected true or false"
            )
        yield f"{switch} (use {block_path}.device)"
        if value:
            _put(config, f"{block_path}.device", "cpu")
            if pin_value is not None:
                _put(config, f"{block_path}.pin_memory", pin_value)


def _autos_within(value: object, path: str) -> Iterator[Finding]:
    if value == AUTO:
        yield Finding(path, "auto", None)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _autos_within(inner, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _autos_within(inner, f"{path}[{index}]")


def findings(model: type[BaseModel], block: Block, path: str = "") -> Iterator[Finding]:
    """Yield every unknown key and every left-over "auto" of a block, in the user's order."""
    fields = known_fields(model)
    for key, value in block.items():
        here = f"{path}.{key}" if path else str(key)
        field = fields.get(key)
        if field is None:
            # A block with keys of its own is one of a feature that is refused when enabled: "auto"
            # is its business.
            if model.model_config.get("extra") != "allow":
                yield Finding(here, "unknown", model)
            continue
        inner = nested_model(field)
        if inner is not None and isinstance(value, dict):
            yield from findings(inner, value, here)
        elif field.default != AUTO and not (value == AUTO and is_size(field)):
            yield from _autos_within(value, here)


@cache
def all_paths(model: type[BaseModel], prefix: str = "") -> tuple[str, ...]:
    """List the dotted paths of all keys below a model."""
    paths: list[str] = []
    for key, field in known_fields(model).items():
        paths.append(prefix + key)
        inner = nested_model(field)
        if inner is not None:
            paths.extend(all_paths(inner, f"{prefix}{key}."))
    return tuple(paths)


def nearest_known(
    path: str, level: type[BaseModel], root: type[BaseModel], prefix: str
) -> str | None:
    """Return the known path most like an unknown one below `root`, which is at `prefix`.

    The same name elsewhere wins (a key in the wrong block), then a similar one in the same block,
    `level`, then a similar one anywhere; elsewhere only names that few blocks have.
    """
    parent, _, key = path.rpartition(".")
    leaves: dict[str, list[str]] = {}
    for known in all_paths(root):
        leaves.setdefault(known.rpartition(".")[2], []).append(
            f"{prefix}.{known}" if prefix else known
        )
    telling = {leaf: paths[0] for leaf, paths in leaves.items() if len(paths) <= _TELLING}
    if key in telling:
        return telling[key]
    similar = difflib.get_close_matches(key, list(known_fields(level)), n=1)
    if similar:
        return f"{parent}.{similar[0]}" if parent else similar[0]
    similar = difflib.get_close_matches(key, list(telling), n=1, cutoff=0.75)
    return telling[similar[0]] if similar else None


def _unknown_line(finding: Finding, root: type[BaseModel], prefix: str) -> str:
    if finding.path in CALLS:
        return f"{finding.path}: unknown key; remove it, and {CALLS[finding.path]}"
    near = nearest_known(finding.path, finding.model or root, root, prefix)
    return f"{finding.path}: unknown key" + (f'; did you mean "{near}"?' if near else "; remove it")


_EXPECTED = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "an object"),
    "list_type": "a list",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    **dict.fromkeys(("enum", "literal_error"), "one of {expected}"),
    "path_type": "a path",
}


def _error_line(error: ErrorDetails, prefix: str) -> str:
    path = ".".join([prefix, *map(str, error["loc"])] if prefix else map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{path}: is missing; add it"
    expected = _EXPECTED.get(error["type"], error["msg"]).format(**error.get("ctx", {}))
    kind = type(error["input"]).__name__
    return (
        f"{path}: {error['input']!r} ({kind}) is of the wrong type or out of range: expected "
        f"{expected}"
    )


def _without_autos(value: object) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_autos(inner) for key, inner in value.items() if inner != AUTO}


def read_block(model: type[Model], block: Any, path: str = "", drop_autos: bool = False) -> Model:
    """Validate a block, which stands at `path`, without changing it. `drop_autos` reads "auto" as
    not given: of a configuration that its owner has not filled in yet. DeepSpeedConfigError names
    every unknown key, every left-over "auto", or every value of a wrong type.
    """
    if not isinstance(block, dict):
        where = path or "the configuration"
        raise DeepSpeedConfigError(
            f"{where}: {block!r} ({type(block).__name__}) is of the wrong type: expected an object"
        )
    if drop_autos:
        block = _without_autos(block)
    found = list(findings(model, block, path))
    lines = [_unknown_line(finding, model, path) for finding in found if finding.kind == "unknown"]
    autos = [finding.path for finding in found if finding.kind == "auto"]
    if autos:
        lines.append(
            f'"auto" is left over at: {", ".join(autos)}; replace it by a value (only client '
            "libraries fill it)"
        )
    if lines:
        raise DeepSpeedConfigError("\n".join(lines))
    try:
        return model.model_validate(block)
    except ValidationError as error:
        text = "\n".join(_error_line(one, path) for one in error.errors(include_url=False))
        raise DeepSpeedConfigError(text) from None
