"""What an operator returns, without its numbers: shapes, strides and dtypes come from running it
once on numbers that don't matter. Meta kernels disagree with the host's kernels in strides and
dtypes here and there, and a result must be bit for bit the host's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from deepspeed.accelerator import operators


class Fresh(NamedTuple):
    """A tensor that an operator returns in memory of its own."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        if 0 in self.size:
            return 0
        last = sum(stride * (size - 1) for stride, size in zip(self.stride, self.size, strict=True))
        return (last + 1) * self.dtype.itemsize


class Plan(NamedTuple):
    """What an operator returns for arguments of certain shapes: an argument's position or name, a
    `Fresh`, a list of these, or None. Not `deferrable` is what only the real arguments can tell;
    `reads` and `writes` count the arguments' tensors in order.
    """

    results: tuple[Any, ...]
    deferrable: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def generator_of(args: Any, kwargs: Mapping[str, Any]) -> torch.Generator:
    """The generator that a random operator uses."""
    given = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator))
    return next(given, torch.default_generator)


def dummies_of(tree: object, fill: int) -> Any:
    """Arguments of the same shapes, of one number."""
    if isinstance(tree, torch.Tensor):
        dummy = torch.empty_strided(tree.size(), tree.stride(), dtype=tree.dtype)
        if 0 not in tree.stride():
            return dummy.fill_(fill)
        return torch.full_like(tree, fill) if fill else dummy.zero_()
    if isinstance(tree, (list, tuple)):
        return type(tree)([dummies_of(item, fill) for item in tree]) if tree else tree
    if isinstance(tree, Mapping):
        return {name: dummies_of(value, fill) for name, value in tree.items()}
    return tree


def made_plan(func: Any, args: Any, kwargs: Any) -> Plan | None:
    """Run the operator on zeros, which every index may be, or ones, which integers divide by."""
    generator = (
        generator_of(args, kwargs) if torch.Tag.nondeterministic_seeded in func.tags else None
    )
    state = None if generator is None else generator.get_state()
    for fill in (0, 1):
        dummies, dummy_kwargs = dummies_of(args, fill), dummies_of(kwargs, fill)
        try:
            result = func(*dummies, **dummy_kwargs)
        except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError):
            continue  # the user's mistake, or numbers that do matter: the real call will tell
        finally:
            if generator is not None and state is not None:
                generator.set_state(state)
        return _plan_of(func, result, args, kwargs, dummies, dummy_kwargs)
    return None


def _plan_of(
    func: Any, result: Any, args: Any, kwargs: Any, dummies: Any, dummy_kwargs: Any
) -> Plan:
    returns = func._schema.returns
    values = [] if not returns else [result] if len(returns) == 1 else list(result)
    entries = []
    for declared, value in zip(returns, values, strict=True):
        alias = declared.alias_info
        is_argument = alias is not None and alias.is_write
        entries.append(_aliased(func, alias, len(args)) if is_argument else _spec(value))
    before = operators.tensors_in((args, kwargs))
    after = operators.tensors_in((dummies, dummy_kwargs))
    # `out=` may be given another size.
    keeps_sizes = all(t.shape == d.shape for t, d in zip(before, after, strict=True))
    on_host = all(
        t.device.type == "cpu" and t.layout == torch.strided for t in operators.tensors_in(values)
    )
    return Plan(tuple(entries), keeps_sizes and on_host, *_read_and_written(func, args, kwargs))


def _aliased(func: Any, alias: Any, num_positional: int) -> int | str:
    """Find the argument that is returned: its position if it was given so, else its name."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == alias.before_set:
            return position if position < num_positional else str(argument.name)
    raise RuntimeError(f"{func}: the schema returns an argument that it does not have")


def _read_and_written(func: Any, args: Any, kwargs: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Count the arguments' tensors in order: those only read, and those that are written."""
    written, given = operators.written_names(func), operators.arguments(func, args, kwargs)
    writes = [name in written for name, value in given.items() for _ in operators.tensors_in(value)]
    return tuple(i for i, yes in enumerate(writes) if not yes), tuple(
        i for i, yes in enumerate(writes) if yes
    )


def _spec(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return Fresh(value.dtype, tuple(value.size()), value.stride())
    return [_spec(item) for item in value] if isinstance(value, (list, tuple)) else None
