"""Methods of an engine that one of its parts has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def of_part(
    part: str, method: Callable[Concatenate[Any, Arguments], Result]
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Return a method, with the signature and help of `method`, that calls the one of its name of
    the engine's attribute `part`.
    """
    name = method.__name__

    @functools.wraps(method)
    def delegate(engine: Any, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        result: Result = getattr(getattr(engine, part), name)(*args, **kwargs)
        return result

    return delegate
