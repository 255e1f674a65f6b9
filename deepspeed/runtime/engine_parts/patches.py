"""What a program has put on an engine, its model or its optimizer under names of upstream's.

Client libraries patch upstream's classes. A name that this package does not have can be assigned
all the same, and then nothing calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from deepspeed._absent import absences_of, reason
from deepspeed.utils.exceptions import MisuseError
from deepspeed.utils.logging import warn_once

HONOURED: dict[str, tuple[str, ...]] = {
    "deepspeed.runtime.engine.DeepSpeedEngine": (
        "_broadcast_model",
        "_copy_recovery_script",
        "_report_progress",
    ),
    "deepspeed.runtime.pipe.module.PipelineModule": ("_count_layer_params",),
}
"""Class -> methods that are there to be replaced."""


def tell_of_patches(*things: object, raises: bool) -> None:
    """Warn of what the program has put on an engine, its parts, or a class in the place of
    upstream's methods, once per name; with `raises` what nothing calls is an error.
    """
    for thing in things:
        for text, is_called in _patches_of(thing):
            if raises and not is_called:
                raise MisuseError(text)
            warn_once(text)


def _patches_of(thing: object) -> Iterator[tuple[str, bool]]:
    """Texts, and whether what they are about is called; attributes of derived classes count."""
    kinds = (thing if isinstance(thing, type) else type(thing)).__mro__
    names = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    for place, holder in enumerate((thing, *kinds)):
        known = _known(names[max(place - 1, 0) :])
        honoured = HONOURED.get(names[place - 1], ()) if place else ()
        for name, value in vars(holder).items() if known else ():
            module = str(getattr(value, "__module__", None))
            if module.partition(".")[0] == "deepspeed":
                continue
            if name in honoured:
                yield f"{known[0]}.{name} is this program's own; this package calls it", True
            elif (why := _why(known, name)) is not None:
                yield f"{why}. What this program has put there is never called", False


@functools.cache
def _known(classes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(where for where in classes if where in HONOURED or absences_of(where))


@functools.cache
def _why(known: tuple[str, ...], name: str) -> str | None:
    """Why none of these classes has the name. Kept: each new engine asks of a thousand names."""
    return next(filter(None, (reason(where, name) for where in known)), None)
