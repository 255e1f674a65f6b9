"""What happens around a collective when somebody watches.

Nobody watches by default and `deepspeed.comm.comm` then calls torch directly. With the comms logger on, each call
goes through `OperationTimer`, which measures it from issue to completion; an asynchronous one is complete when its handle
has been waited for.
"""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as torch_dist

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.comms_logging import CommsLogger


def group_size(group: Any) -> int:
    """The number of ranks in a group (None: the world); 1 when there is no process group."""
    return torch_dist.get_world_size(group) if torch_dist.is_initialized() else 1


class TimedWork:
    """An asynchronous operation's handle that records the latency when it is waited for; otherwise the handle itself."""

    def __init__(self, work: Any, record: Callable[[], None]) -> None:
        self._work = work
        self._record: Callable[[], None] | None = record

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as the wrapped handle does; the first call records the latency."""
        result = self._work.wait(*args, **kwargs)
        if self._record is not None:
            record, self._record = self._record, None
            record()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class OperationTimer:
    """Times operations into a `CommsLogger`."""

    def __init__(self, comms_logger: CommsLogger) -> None:
        self.logger = comms_logger

    def run(
        self,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        name: str,
        num_bytes: int,
        group: Any = None,
        log_name: str | None = None,
        prof: bool = False,
        debug: str | None = None,
    ) -> Any:
        """Call ``operation(*args)`` and record it.

        Args:
            operation: issues the collective; its result is a handle if and only if the operation is still running.
            args: its arguments.
            name: the collective, for the bandwidth formula.
            num_bytes: its message; see `deepspeed.utils.comms_logging.calc_bw_log`.
            group: the ranks that take part; None means the world.
            log_name: the name it is listed under; None means ``name``.
            prof: time it even if it is not among the operations chosen for timing.
            debug: the calling function, shown in debug mode.
        """
        listed = log_name or name
        if not self.logger.wants(listed, prof):
            return operation(*args)
        if self.logger.debug:
            listed = f"{listed} | [Caller Func: {debug or _caller()}]"
        accelerator = get_accelerator()
        num_ranks = group_size(group)
        # The device is drained before and after, so that only this operation is measured.
        accelerator.synchronize()
        started = time.perf_counter()

        def record() -> None:
            accelerator.synchronize()
            self.logger.append(name, listed, (time.perf_counter() - started) * 1e3, num_bytes, num_ranks)

        result = operation(*args)
        if result is not None and hasattr(result, "wait"):
            return TimedWork(result, record)
        record()
        return result


def _caller() -> str:
    """The first function on the stack outside of the communication layer."""
    # startup: only debug mode looks at stacks.
    import inspect

    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("deepspeed.comm"):
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else "unknown"
