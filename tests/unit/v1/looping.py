"""`each`: run a test method for several values inside one launched world, which costs most."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from unit.v1.contract.matrix import pairwise


def each(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test method: call it for every combination and name the first that fails."""
    rows = itertools.product(*values.values())
    return _each_row(values, [dict(zip(values, row, strict=True)) for row in rows])


def each_pair(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `each`, for few combinations in which every two values meet."""
    return _each_row(values, pairwise({name: tuple(some) for name, some in values.items()}))


def _each_row(
    values: Iterable[str], rows: Sequence[Mapping[str, Any]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def run_all(self: Any, **fixtures: Any) -> None:
            for chosen in rows:
                try:
                    method(self, **chosen, **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    told = f"for {chosen}: {type(error).__name__}: {error}"
                    raise AssertionError(told) from error

        parameters = inspect.signature(method).parameters
        remaining = [parameter for name, parameter in parameters.items() if name not in values]
        # pytest asks for the fixtures of this signature.
        run_all.__signature__ = inspect.Signature(remaining)  # type: ignore[attr-defined]  # read by inspect
        return run_all

    return decorate
