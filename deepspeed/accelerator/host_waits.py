"""Counts of the moments at which the host stands still because it wants something of the device,
and of the copies that make it do so, by place. A device reports to the `HostWaits` that somebody
asked for.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter

import torch

from deepspeed.accelerator.call_stacks import PACKAGE, capture

# A data loader works on host memory, whatever the device.
_ON_HOST_MEMORY = f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}"
_MAX_DEPTH = 12
NO_FRAME = "(no frame of the program)"


def program_place() -> str:
    """The innermost frame that is neither torch's nor the device's nor a collective's own."""
    stack = capture(max_frames=1)
    if not stack:
        return NO_FRAME
    code, line = stack[0]
    path = code.co_filename
    if path.startswith(PACKAGE + os.sep):
        path = os.path.relpath(path, os.path.dirname(PACKAGE))
    return f"{path}:{line} in {code.co_name}"


def _is_data_loader() -> bool:
    frame, depth = sys._getframe(2), 0
    while frame is not None and depth < _MAX_DEPTH:
        if _ON_HOST_MEMORY in frame.f_code.co_filename:
            return True
        if frame.f_back is None:
            return False
        frame, depth = frame.f_back, depth + 1
    return False


class HostWaits:
    """What the thread that made this waited for.

    Attributes:
        by_place: Waits by ``PLACE: KIND``, such as ``deepspeed/runtime/engine.py:12 in step:
            item``.
        pageable_copies: Copies between host and device that are blocking or whose host memory is
            not page-locked, by place.
    """

    def __init__(self) -> None:
        self.by_place: Counter[str] = Counter()
        self.pageable_copies: Counter[str] = Counter()
        self._thread = threading.get_ident()

    @property
    def total(self) -> int:
        return self.by_place.total()

    def inside(self, part: str) -> dict[str, int]:
        """Waits at places that contain `part`, such as ``deepspeed/``."""
        return {place: count for place, count in self.by_place.items() if part in place}

    def waited(self, kind: str) -> None:
        if self._is_programs():
            self.by_place[f"{program_place()}: {kind}"] += 1

    def copied(self) -> None:
        """A copy between pageable memory and the device is made, or one that blocks."""
        if self._is_programs():
            self.pageable_copies[program_place()] += 1

    def _is_programs(self) -> bool:
        # A device's backward runs in a thread of autograd's.
        is_backward = torch._C._current_graph_task_id() >= 0
        return (is_backward or threading.get_ident() == self._thread) and not _is_data_loader()
