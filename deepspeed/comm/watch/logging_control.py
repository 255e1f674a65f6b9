"""The process's one `CommsLogger`, and the switch that says what is timed and shown."""

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.comm.utils import get_msg_size_from_args
from deepspeed.comm.watch.observation import (
    CollectiveCall,
    add_observer,
    call_site,
    group_size,
    remove_observer,
)
from deepspeed.comm.watch.operation_log import CommsLogger
from deepspeed.utils.timer import begin_span, end_span

__all__ = [
    "comms_logger",
    "configure",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "has_comm_data",
    "log_summary",
    "reset_log",
    "timed_op",
]


class TimedWork:
    """An asynchronous operation's handle that records the latency when it is first waited for."""

    def __init__(self, work: Any, record: Callable[[], None]) -> None:
        self._work = work
        self._record: Callable[[], None] | None = record

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._work.wait(*args, **kwargs)
        if self._record is not None:
            record, self._record = self._record, None
            record()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class OperationTimer:
    """Times operations into a `CommsLogger`, from issue to completion; an asynchronous one is
    complete when it was waited for.

    On a device from when the current stream comes to the issue to when it may go on: the work of
    streams that the operation waits for counts. The device itself is not waited for, neither before
    nor after, because a receive that is posted ahead may need what this host issues next.
    """

    def __init__(self, comms_logger: CommsLogger) -> None:
        self.logger = comms_logger

    def run(self, call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
        listed = call.log_name or call.name
        if not self.logger.wants(listed, call.prof):
            return proceed()
        if self.logger.debug:
            listed = f"{listed} | [Caller Func: {call.debug or _caller()}]"
        num_ranks = group_size(call.group)
        start = begin_span()

        def record() -> None:
            self.logger.append_span(call.name, listed, end_span(start), call.num_bytes, num_ranks)

        result = proceed()
        if result is not None and hasattr(result, "wait"):
            return TimedWork(result, record)
        record()
        return result


def _caller() -> str:
    frame = call_site()
    return frame.f_code.co_name if frame is not None else "unknown"


comms_logger = CommsLogger()
_timer = OperationTimer(comms_logger)


def _section_of(deepspeed_config: Any) -> Any:
    """The ``comms_logger`` section of a configuration in any of the shapes clients pass."""
    for path in (("tree", "comms_logger"), ("comms_config", "comms_logger"), ("comms_logger",)):
        found = deepspeed_config
        for name in path:
            found = getattr(found, name, None)
        if found is not None:
            return found
    return None


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Configure the comms logger; arguments that are None stay as they are, the others override the
    configuration.

    Args:
        deepspeed_config: a configuration object with a ``comms_logger`` section.
        enabled: whether anything is timed.
        prof_all: whether every operation is.
        prof_ops: the names of the operations that are, without ``prof_all``.
        verbose: whether each operation is logged as it completes.
        debug: whether names carry the calling function.
    """
    section = _section_of(deepspeed_config) if deepspeed_config is not None else None
    if section is not None:
        comms_logger.configure(section)
    options = {
        "enabled": enabled,
        "prof_all": prof_all,
        "prof_ops": prof_ops,
        "verbose": verbose,
        "debug": debug,
    }
    for name, value in options.items():
        if value is not None:
            setattr(comms_logger, name, value)
    if comms_logger.enabled:
        add_observer(_timer)
    else:
        remove_observer(_timer)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print what the comms logger recorded on rank 0; see `CommsLogger.log_all`.

    Args:
        show_straggler: also show how long operations waited for the slowest rank. Collective: all
            ranks must call.
        return_dict: return the numbers, on every rank its own.
    """
    # The exchange of the straggler analysis is not part of what was asked for.
    enabled, comms_logger.enabled = comms_logger.enabled, False
    try:
        return comms_logger.log_all(show_straggler=show_straggler, return_dict=return_dict)
    finally:
        comms_logger.enabled = enabled


def has_comm_data() -> bool:
    """Whether the comms logger recorded anything."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """How many operations the comms logger recorded."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """The names under which the comms logger recorded operations."""
    return comms_logger.get_operation_names()


def reset_log() -> None:
    """Forget what the comms logger recorded."""
    comms_logger.reset_data()


def timed_op(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a collective of one's own so that the comms logger sees it.

    Its payload is the parameter named ``tensor``, ``tensors``, ``input_list`` or ``output_tensor``;
    ``group``, ``log_name``, ``prof`` and ``debug`` are understood when passed by keyword.
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not comms_logger.enabled:
            return func(*args, **kwargs)
        call = CollectiveCall(
            func.__name__,
            functools.partial(func, **kwargs),
            args,
            kwargs.get("group"),
            get_msg_size_from_args(func, *args, **kwargs),
            kwargs.get("log_name"),
            kwargs.get("prof", False),
            kwargs.get("debug"),
        )
        # The operations inside of it reach all observers by themselves.
        return _timer.run(call, call.issue)

    return wrapper
