"""The comms logger's switch: what is timed, what is shown.

Owns the process's one `CommsLogger` and decides whether an `OperationTimer` observes the
operations.
"""

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.comm import collectives
from deepspeed.comm.observation import CollectiveCall, OperationTimer
from deepspeed.comm.utils import get_msg_size_from_args
from deepspeed.utils.comms_logging import CommsLogger

comms_logger = CommsLogger()
_timer = OperationTimer(comms_logger)


def _section_of(deepspeed_config: Any) -> Any:
    """The ``comms_logger`` section of a configuration object in any of the shapes clients pass;
    None if it has none.
    """
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
        collectives.add_observer(_timer)
    else:
        collectives.remove_observer(_timer)


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
