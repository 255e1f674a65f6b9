"""Switching the stream checker on: for a block of code, or for the rest of the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import file_trace, get_accelerator
from deepspeed.utils import memory_names
from deepspeed.verify.streams.checker import StreamChecker
from deepspeed.verify.streams.collectives import telling
from deepspeed.verify.streams.findings import StreamRaceError

_process_wide: ExitStack | None = None
_process_checker: StreamChecker | None = None


@contextmanager
def _traced() -> Iterator[StreamChecker]:
    """Make a checker that hears of everything the accelerator does."""
    checker = StreamChecker(lambda at: file_trace.name_of(at) or memory_names.describe(at))
    with get_accelerator().trace_streams(checker) as tracing, telling(tracing):
        yield checker


@contextmanager
def check_streams(raises: bool = True) -> Iterator[StreamChecker]:
    """Check an order of every access to memory on any stream, within the block.

    Args:
        raises: Raise at the end if something was found; otherwise read `checker.findings` or
            `checker.report()`.

    Raises:
        StreamRaceError: Accesses were left unordered; not if the block itself raises.
        RuntimeError: The accelerator has no streams (set DS_ACCELERATOR=sim), or is being checked
            already.
    """
    with _traced() as checker:
        yield checker
    if raises:
        checker.raise_findings()


def enable_stream_checking() -> StreamChecker:
    """Check from now on, until `disable_stream_checking` or the end of the process. Does nothing
    when it is on already. The engine raises findings at every `step()` through `raise_findings`.

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

    With a process group all ranks must call it alike, and all raise if one of them has a finding: a
    rank that went on by itself would wait for the others in its next collective.

    Raises:
        StreamRaceError: There is a finding, here or on another rank.
    """
    if _process_checker is None:
        return
    here = races = bool(_process_checker.findings)
    if dist.is_initialized():
        flag = torch.tensor([float(here)], device=get_accelerator().current_device_name())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        races = bool(flag.item())
    _process_checker.raise_findings()
    if races:
        raise StreamRaceError([], "another rank left accesses to memory unordered; see its report")
