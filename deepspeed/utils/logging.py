"""The project's logger and the rank-aware ways to write to it.

Owns the logger named ``DeepSpeed``, its level (``DS_LOG_LEVEL``) and the helpers that print on
chosen ranks only. It does not own process groups: the rank is read from a live process group when
there is one and from the launcher's environment otherwise, so that messages written before
initialization are filtered too.
"""

import functools
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

LOG_LEVEL_ENV = "DS_LOG_LEVEL"
LOG_FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"

log_levels: dict[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class _StdoutHandler(logging.StreamHandler):
    """Writes to whatever ``sys.stdout`` is at the time of the message.

    A handler that keeps the stream object it saw at import writes to a closed file once somebody
    has replaced ``sys.stdout`` (test capture, notebooks, redirections).
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stdout

    @stream.setter
    def stream(self, value: object) -> None:
        raise AttributeError(f"this handler follows sys.stdout; {value!r} cannot be its stream")


class LoggerFactory:
    """Makes loggers in the project's format."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """A logger that writes to stdout in the project's format and does not propagate."""
        if name is None:
            raise ValueError(
                "create_logger needs a name: got None; pass the name of the logger to make"
            )
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        if not any(isinstance(handler, _StdoutHandler) for handler in made.handlers):
            handler = _StdoutHandler()
            handler.setFormatter(logging.Formatter(LOG_FORMAT))
            made.addHandler(handler)
        return made


def get_log_level_from_string(log_level_str: str) -> int:
    """The numeric level of ``debug``, ``info``, ``warning``, ``error``, ``critical`` (any case)."""
    level = log_levels.get(str(log_level_str).lower())
    if level is None:
        known = ", ".join(log_levels)
        raise ValueError(f"log level {log_level_str!r} is unknown; use one of {known}")
    return level


def _level_from_environment() -> int:
    text = os.environ.get(LOG_LEVEL_ENV)
    if not text:
        return logging.WARNING
    try:
        return get_log_level_from_string(text)
    except ValueError as error:
        raise ValueError(f"{LOG_LEVEL_ENV}={text}: {error}") from error


logger: logging.Logger = LoggerFactory.create_logger("DeepSpeed", _level_from_environment())


def set_log_level_from_string(
    log_level_str: str, custom_logger: logging.Logger | None = None
) -> None:
    """Set the level of ``custom_logger`` (default: this project's) by one of these names."""
    target = logger if custom_logger is None else custom_logger
    target.setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    """The effective numeric level of the project's logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the logger's level is at or below the named one: such messages are written."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def _rank() -> int:
    """This process's global rank, or -1 outside of any distributed job."""
    # cycle: deepspeed.comm logs through this module. It is consulted only when somebody has loaded
    # it already; a process that has not loaded it cannot have a process group of ours.
    comm = sys.modules.get("deepspeed.comm")
    is_initialized = getattr(comm, "is_initialized", None)
    if comm is not None and is_initialized is not None and is_initialized():
        return int(comm.get_rank())
    return int(os.environ.get("RANK", "-1"))


def _selected(ranks: Iterable[int] | None, rank: int) -> bool:
    wanted = list(ranks) if ranks is not None else []
    # A process that belongs to no job is the only one there is: it speaks for every rank.
    return not wanted or -1 in wanted or rank < 0 or rank in wanted


def get_dist_msg(message: object, ranks: Iterable[int] | None = None) -> str | None:
    """The message with its rank in front, or None when this rank is not among ``ranks``.

    Args:
        message: what to say.
        ranks: global ranks that speak; None, an empty list or one with -1 means all.
    """
    rank = _rank()
    return f"[Rank {rank}] {message}" if _selected(ranks, rank) else None


def log_dist(
    message: object, ranks: Iterable[int] | None = None, level: int = logging.INFO
) -> None:
    """Log ``message`` on the given global ranks (None or -1: on all)."""
    # The level is asked first: most calls are below it and should not look up the rank.
    if not logger.isEnabledFor(level):
        return
    text = get_dist_msg(message, ranks)
    if text is not None:
        logger.log(level, text, stacklevel=2)


@functools.cache
def _log_dist_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    text = get_dist_msg(message, ranks)
    if text is not None:
        logger.log(level, text, stacklevel=3)  # the caller of log_dist_once


def log_dist_once(
    message: object, ranks: Iterable[int] | None = None, level: int = logging.INFO
) -> None:
    """`log_dist`, but each (message, ranks, level) once per process."""
    _log_dist_once(str(message), None if ranks is None else tuple(ranks), level)


@functools.cache
def _log_once(message: str, level: int) -> None:
    logger.log(level, message, stacklevel=3)


def log_once(message: object, level: int = logging.WARNING) -> None:
    """Log a message once per process: for settings that are ignored or changed."""
    _log_once(str(message), level)


def warn_once(message: str) -> None:
    """Log a warning to the user once per process, on the first rank: for what all ranks see."""
    _log_dist_once(message, (0,), logging.WARNING)


def warning_once(message: object) -> None:
    """Log a warning once per process."""
    _log_once(str(message), logging.WARNING)


def print_dist(message: object, ranks: Iterable[int] | None = None) -> None:
    """Print ``message`` to stdout on global ranks (None or -1: all), whatever the log level."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def print_json_dist(
    message: Mapping[str, Any],
    ranks: Iterable[int] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Write a mapping as JSON to ``path``, with the rank under ``"rank"``, on the given global
    ranks.

    Raises:
        ValueError: no path was given.
    """
    if path is None:
        raise ValueError("print_json_dist needs a path: got None; pass the file to write to")
    rank = _rank()
    if not _selected(ranks, rank):
        return
    with open(path, "w", encoding="utf-8") as file:
        json.dump({**message, "rank": rank}, file)
        file.flush()


def print_configuration(args: object, name: str) -> None:
    """Log every attribute of ``args``, sorted, under the heading ``name``."""
    logger.info("%s:", name)
    for key in sorted(vars(args)):
        logger.info("  %s %s %s", key, "." * (29 - len(key)), getattr(args, key))
