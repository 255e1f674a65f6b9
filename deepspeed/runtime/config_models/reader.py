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
from pydantic_core import ErrorDetails, PydanticCustomError

from deepspeed.runtime.config_models.base import (
    AUTO,
    nested_model,
    plain_number,
    read_boolean,
    takes_auto,
)
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
# Old key -> the key, and the value of it, that it means where it is true.
ALLREDUCE_SWITCH = "fp32_allreduce"
ALLREDUCE_MEANS = ("communication_data_type", "fp32")
# What the optimizers of old clipped by -> what the engine clips by.
CLIPPING_OF_OLD = "optimizer.params.max_grad_norm"
CLIPPING = "gradient_clipping"
# Keys of old that are now something else -> that.
INSTEAD: dict[str, str] = {
    "compile.enabled": "call engine.compile()",
    "max_grad_norm": f'set "{CLIPPING}"',
}
# A name that more blocks have than this ("enabled") says nothing about which one was meant.
_TELLING = 2
# How alike two names are (difflib's ratio) of which one may be meant by the other: in one block, in
# another one, and at the top level, where programs have keys of their own.
_LIKE, _LIKE_ELSEWHERE = 0.6, 0.75
_LIKE_AT_TOP, _LIKE_BELOW_TOP = 0.75, 0.85
# How top-level keys begin, or which they are, that are for who reads the file.
_NOTE_MARKS = ("_", "#", "//")
_NOTES = frozenset(("comment", "comments", "note", "notes", "name", "description"))


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
    replaced.extend(_apply_allreduce_switch(config))
    replaced.extend(_apply_clipping_of_old(config))
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
        value = _switch(found)
        yield f"{switch} (use {block_path}.device)"
        if value:
            _put(config, f"{block_path}.device", "cpu")
            if pin_value is not None:
                _put(config, f"{block_path}.pin_memory", pin_value)


def _switch(found: tuple[Block, str]) -> bool:
    """Take a switch of old out of the configuration, where ``_look_up`` has found it."""
    block, key = found
    value = block.pop(key)
    if value is not None and not isinstance(value, bool):
        raise DeepSpeedConfigError(f"{key}: {value!r} is of the wrong type: expected true or false")
    return bool(value)


def _apply_allreduce_switch(config: Block) -> Iterator[str]:
    found = _look_up(config, ALLREDUCE_SWITCH)
    if found is None:
        return
    key, value = ALLREDUCE_MEANS
    is_on = _switch(found)
    if is_on and config.get(key) is None:
        config[key] = value
    yield f'{ALLREDUCE_SWITCH} (use {key}: "{value}")'


def _apply_clipping_of_old(config: Block) -> Iterator[str]:
    found = _look_up(config, CLIPPING_OF_OLD)
    if found is None or found[0][found[1]] == AUTO:
        return
    value = plain_number(found[0].pop(found[1]))
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise DeepSpeedConfigError(
            f"{CLIPPING_OF_OLD}: {value!r} is of the wrong type: expected a number"
        )
    if value is not None and CLIPPING not in config:
        config[CLIPPING] = value
    elif value and plain_number(config[CLIPPING]) != value:
        raise DeepSpeedConfigError(
            f"{CLIPPING_OF_OLD}: {value} and {CLIPPING}: {config[CLIPPING]} mean the same and "
            f"differ; remove {CLIPPING_OF_OLD}"
        )
    yield f"{CLIPPING_OF_OLD} (use {CLIPPING})"


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
        elif field.default != AUTO and not (value == AUTO and takes_auto(field)):
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
    `level`, then a similar one anywhere; elsewhere only names that few blocks have. At the top
    level a key may abbreviate a known path, and names have to be more alike.
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
    if not parent and (whole := _abbreviated(key, root)):
        return whole
    like, elsewhere = (_LIKE, _LIKE_ELSEWHERE) if parent else (_LIKE_AT_TOP, _LIKE_BELOW_TOP)
    similar = difflib.get_close_matches(key, list(known_fields(level)), n=1, cutoff=like)
    if similar:
        return f"{parent}.{similar[0]}" if parent else similar[0]
    similar = difflib.get_close_matches(key, list(telling), n=1, cutoff=elsewhere)
    return telling[similar[0]] if similar else None


def _abbreviated(key: str, root: type[BaseModel]) -> str | None:
    """Return the first path, of a block at most, that has words for all of a key's, two or more:
    "grad_clip" is "gradient_clipping" and "zero_stage" "zero_optimization.stage".
    """
    words = key.lower().split("_")
    for path in all_paths(root) if len(words) > 1 and all(words) else ():
        if path.count(".") < 2:
            known = path.replace(".", "_").split("_")
            if all(any(one.startswith(word) for one in known) for word in words):
                return path
    return None


def _is_note(name: str) -> bool:
    return name.startswith(_NOTE_MARKS) or name.lower() in _NOTES


def _is_another_programs(name: str, root: type[BaseModel]) -> bool:
    """Whether a top-level key resembles none of ours, so that it is no mistake in one of them."""
    if _is_note(name):
        return True
    first = name.partition(".")[0]
    leaves = {path.rpartition(".")[2] for path in all_paths(root)}
    is_like_ours = name in INSTEAD or name in leaves or first in known_fields(root)
    return not is_like_ours and nearest_known(name, root, root, "") is None


def without_unread_keys(root: type[BaseModel], config: Block) -> Block:
    """Return a whole configuration without the keys that nothing here reads, which one warning
    names: those at the top level that resemble none of ours, which are of programs and people, and
    unknown ones in blocks that say ``"enabled": false``, which other releases had.
    """
    known = known_fields(root)
    unread: list[str] = []
    kept: Block = {}
    for key, value in config.items():
        name = str(key)
        if key not in known and _is_another_programs(name, root):
            others = [] if _is_note(name) else list(known)
            near = difflib.get_close_matches(name, others, n=1, cutoff=_LIKE)
            unread.append(f"{name} (the nearest known key is {near[0]})" if near else name)
        else:
            inner = nested_model(known[key]) if key in known else None
            kept[key] = value if inner is None else _without_keys_of_old(inner, value, key, unread)
    if unread:
        warn_once(f"configuration keys that are not read: {', '.join(unread)}")
    return kept


def _without_keys_of_old(
    model: type[BaseModel], block: object, path: str, unread: list[str], is_off: bool = False
) -> object:
    if not isinstance(block, dict):
        return block
    fields = known_fields(model)
    has_switch = "enabled" in fields or f"{path}.enabled" in INSTEAD
    is_off = is_off or (has_switch and _says_off(block.get("enabled")))
    is_off = is_off and model.model_config.get("extra") != "allow"
    kept: Block = {}
    for key, value in block.items():
        if key in fields:
            inner, here = nested_model(fields[key]), f"{path}.{key}"
            kept[key] = (
                value if inner is None else _without_keys_of_old(inner, value, here, unread, is_off)
            )
        elif is_off:
            unread.append(f'{path}.{key} (unknown, of a block with "enabled": false)')
        else:
            kept[key] = value
    return kept


def _says_off(value: object) -> bool:
    try:
        return not read_boolean(value)
    except PydanticCustomError:
        return False


def _unknown_line(finding: Finding, root: type[BaseModel], prefix: str) -> str:
    path = finding.path
    if path in INSTEAD:
        return f"{path}: unknown key; remove it, and {INSTEAD[path]}"
    near = nearest_known(path, finding.model or root, root, prefix)
    if near is None:
        return f"{path}: unknown key; remove it"
    block, _, key = near.rpartition(".")
    if key == path.rpartition(".")[2]:
        return f'{path}: unknown key here; it belongs in the block "{block}" ("{near}")'
    return f'{path}: unknown key; did you mean "{near}"?'


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
