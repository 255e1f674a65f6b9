"""Switching the stream checker on: for a block of code, or for the rest of the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import memory_names
from deepspeed.verify.streams.checker import StreamChecker
from deepspeed.verify.streams.collectives import telling

_process_wide: ExitStack | None = None
_process_checker: StreamChecker | None = None


@contextmanager
def _traced() -> Iterator[StreamChecker]:
    """A checker that hears of everything the accelerator does."""
    checker = StreamChecker(memory_names.describe)
    with get_accelerator().trace_streams(checker) as tracing, telling(tracing):
        yield checker


@contextmanager
def check_streams(raises: bool = True) -> Iterator[StreamChecker]:
    """Within it, every access to memory on any stream is checked for an order.

    Args:
        raises: Raise at the end if something was found; otherwise read `checker.findings` or `checker.report()`.

    Yields:
        The checker.

    Raises:
        StreamRaceError: Accesses were left unordered; not if the block itself raises.
        RuntimeError: The accelerator has no streams (set DS_ACCELERATOR=sim), or is being checked already.
    """
    with _traced() as checker:
        yield checker
    if raises:
        checker.raise_findings()


def enable_stream_checking() -> StreamChecker:
    """Check from now on, until `disable_stream_checking` or the end of the process. Does nothing when it is on already.

    Returns:
        The checker; the engine raises its findings at every `step()` through `raise_findings`.

    Raises:
        RuntimeError: The accelerator has no streams (set DS_ACCELERATOR=sim).
    """
    global _process_wide, _process_checker
    if _process_checker is None:
        stack = ExitStack()
        _process_checker = stack.enter_context(_traced())
        _process_wide = stack
    return _process_checker


def disable_stream_checking() -> None:
    """Undo `enable_stream_checking`; findings that nobody raised are dropped."""
    global _process_wide, _process_checker
    if _process_wide is not None:
        stack, _process_wide, _process_checker = _process_wide, None, None
        stack.close()


def raise_findings() -> None:
    """Raise what `enable_stream_checking` has found since the last call; nothing when it is off.

    Raises:
        StreamRaceError: There is a finding.
    """
    if _process_checker is not None:
        _process_checker.raise_findings()
