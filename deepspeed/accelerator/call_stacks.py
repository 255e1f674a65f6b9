"""Where the user's or the engine's code issued an operator: noted always, formatted for reports."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

Stack = tuple[tuple[CodeType, int], ...]
"""Code object and line, innermost frame first."""

MAX_FRAMES = 8
MAX_DEPTH = 60
"""Frames walked at most; under a deep torch call stack the user's own code is still reached."""

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OWN_PARTS = ("accelerator", "comm", "verify")
"""Parts of this package that issue or trace operators on behalf of what a reader wants to see."""
EXPLICIT = os.path.join(PACKAGE, "comm", "shard_ops.py")
"""Decides itself which collectives to issue, so its lines are worth reading."""


@functools.lru_cache(maxsize=1)
def _foreign_directories() -> tuple[str, ...]:
    places = [os.path.join(PACKAGE, part) for part in OWN_PARTS]
    for package in ("torch", "_pytest", "pluggy", "pytest"):
        spec = importlib.util.find_spec(package)
        if spec is not None:
            places += list(spec.submodule_search_locations or ())
    return tuple(place + os.sep for place in places)


_shown: dict[str, bool] = {}
"""By file name."""


def _is_shown(filename: str) -> bool:
    """Whether frames of this file are user or engine code."""
    if filename.startswith("<"):
        return False
    path = os.path.abspath(filename)
    if path == EXPLICIT:
        return True
    # site-packages lies below the standard library's directory, but holds user code (model
    # libraries).
    standard = sysconfig.get_paths()["stdlib"] + os.sep
    if path.startswith(standard) and f"{os.sep}site-packages{os.sep}" not in path:
        return False
    return not path.startswith(_foreign_directories())


_callers: dict[int, FrameType] = {}
"""Of threads that run for a frame of another one, which waits."""


@contextmanager
def called_from(thread: int) -> Iterator[None]:
    """Within it, stacks of `thread` go on with the caller's."""
    _callers[thread] = sys._getframe(1)
    try:
        yield
    finally:
        del _callers[thread]


def capture(max_frames: int = MAX_FRAMES, frame: FrameType | None = None) -> Stack:
    """The innermost user and engine frames of the caller, or of `frame`; reads no source line."""
    frames: list[tuple[CodeType, int]] = []
    frame = frame or sys._getframe(1)
    depth, caller = 0, _callers.get(threading.get_ident())
    # Several times per operator: a dictionary of file names costs a third of what calling a cached
    # function does.
    while frame is not None and depth < MAX_DEPTH:
        code = frame.f_code
        shown = _shown.get(code.co_filename)
        if shown is None:
            shown = _shown[code.co_filename] = _is_shown(code.co_filename)
        if shown:
            frames.append((code, frame.f_lineno))
            if len(frames) == max_frames:
                break
        frame = frame.f_back
        if frame is None:
            frame, caller = caller, None
        depth += 1
    return tuple(frames)


def describe(stack: Stack, indent: str) -> list[str]:
    """One line per frame, innermost first, with its source line where there is one."""
    if not stack:
        return [f"{indent}(no Python frame: issued by autograd or by a library)"]
    lines = []
    for code, line in stack:
        source = linecache.getline(code.co_filename, line).strip()
        said = f": {source}" if source else ""
        lines.append(f"{indent}{code.co_filename}:{line} in {code.co_name}{said}")
    return lines
