"""Which failure is reported, and how it reads.

Owns: telling the cause from its consequences among one launcher's processes, and the text on
stderr. Does not own:
the choice among several launchers (`coordinator`). Called by: `launch`, `launch_rank`, `nodes`.
"""

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed.launcher.logs import RankHistory

TRACEBACK_WINDOW_SECONDS = 10.0


@dataclass(frozen=True)
class Exit:
    """The end of one process: its id, and its code, negative for a signal."""

    pid: int
    code: int


@dataclass(frozen=True)
class Failure:
    """What one launcher says of a failure; plain values, so that it travels as JSON.

    Attributes:
        subject: who failed: a rank with its process id, or a node.
        how: the way it ended.
        code: the code that the launch exits with on account of it.
        age: seconds between the failure and this report.
        others: sentences about processes that failed after it.
        heading: line above `last_words`.
        last_words: what the process last wrote to stderr.
    """

    subject: str
    how: str
    code: int
    age: float = 0.0
    others: list[str] = field(default_factory=list)
    heading: str = ""
    last_words: list[str] = field(default_factory=list)


def make_failure(
    exits: Mapping[int, Exit], history: Sequence[RankHistory], first_rank: int = 0
) -> Failure:
    """Return the report on processes that failed.

    Args:
        exits: the failed processes by local rank; not empty.
        history: what was seen of every process, by local rank.
        first_rank: global rank of local rank 0.
    """
    codes = {rank: end.code for rank, end in exits.items()}
    first = first_failure(codes, history)
    seen, code = history[first], codes[first]
    others = [
        f"rank {first_rank + rank} (process {end.pid}) then ended with {describe_exit(end.code)}"
        for rank, end in sorted(exits.items())
        if rank != first
    ]
    if code == -signal.SIGTERM and seen.traceback_at is not None:
        # It raised, its peers noticed and ended, and it was then ended while it was still cleaning
        # up.
        exit_code = 1
    else:
        exit_code = 128 - code if code < 0 else code
    return Failure(
        subject=f"rank {first_rank + first} (process {exits[first].pid})",
        how=describe_exit(code),
        code=exit_code,
        age=time.monotonic() - _moment(seen, code, _first_end(codes, history))[1],
        others=others,
        heading=_heading(first_rank + first, seen),
        last_words=_last_words(seen),
    )


def raised_before(
    moment: float, history: Sequence[RankHistory], first_rank: int = 0
) -> Failure | None:
    """Return the report on a process that raised shortly before `moment` and had not ended by then,
    if there is one.

    Its exit code will never be known: it was ended from outside while it was cleaning up.
    """
    raised = {
        rank: seen.traceback_at
        for rank, seen in enumerate(history)
        if seen.traceback_at is not None
        and moment - TRACEBACK_WINDOW_SECONDS < seen.traceback_at < moment
    }
    if not raised:
        return None
    first = min(raised, key=raised.__getitem__)
    seen = history[first]
    return Failure(
        subject=f"rank {first_rank + first} (process {seen.pid})",
        how="an exception",
        code=1,
        age=time.monotonic() - raised[first],
        heading=_heading(first_rank + first, seen),
        last_words=_last_words(seen),
    )


def _last_words(seen: RankHistory) -> list[str]:
    return [line.decode(errors="replace") for line in seen.last_traceback()]


def _heading(rank: int, seen: RankHistory) -> str:
    return (
        f"what rank {rank} last wrote to stderr:"
        if seen.stderr_tail
        else f"rank {rank} wrote nothing to stderr"
    )


def first_failure(exit_codes: Mapping[int, int], history: Sequence[RankHistory]) -> int:
    """Return the rank whose failure caused the others: the one that raised, or else ended, first.

    Args:
        exit_codes: codes of the failed ranks by rank; negative for a signal.
        history: what was seen of every rank, by rank.
    """
    first_end = _first_end(exit_codes, history)
    return min(
        sorted(exit_codes), key=lambda rank: _moment(history[rank], exit_codes[rank], first_end)
    )


def _first_end(exit_codes: Mapping[int, int], history: Sequence[RankHistory]) -> float:
    ends = [end for rank in exit_codes if (end := history[rank].exited_at) is not None]
    return min(ends, default=time.monotonic())


def _moment(seen: RankHistory, exit_code: int, first_end: float) -> tuple[bool, float]:
    """Return when a process failed, behind whether it can only be a consequence."""
    raised, ended = seen.traceback_at, seen.exited_at
    # An old traceback was caught and logged; one from just before the first end is a cause.
    if raised is not None and raised > first_end - TRACEBACK_WINDOW_SECONDS:
        return False, min(raised, ended if ended is not None else raised)
    # Without a time of its end (no pidfd), a rank that the agent ended cannot be the first.
    return ended is None and exit_code == -signal.SIGTERM, ended if ended is not None else first_end


def describe_exit(exit_code: int) -> str:
    """Return `exit code 3`, or `signal SIGKILL (9)` for a negative code."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name} ({-exit_code})"
    except ValueError:
        return f"signal {-exit_code}"


def write_failures(failures: Sequence[tuple[str, Failure]]) -> None:
    """Write what happened to stderr, the cause and its last words at the end.

    Args:
        failures: reports, each with the name of its launcher ("" where there is only one); the
            cause comes first.
    """
    (where, first), *later = failures
    lines = [
        sentence
        for place, failure in later
        for sentence in _sentences(place, failure, "then ended with")
    ]
    lines += _sentences(where, first, "failed first, with")
    if first.heading:
        lines.append(first.heading)
    # What the ranks printed comes before: this process wrote it.
    sys.stdout.flush()
    sys.stderr.write(
        "".join(f"[deepspeed] {line}\n" for line in lines)
        + "".join(f"{line}\n" for line in first.last_words)
    )
    sys.stderr.flush()


def _sentences(where: str, failure: Failure, verb: str) -> list[str]:
    lead = f"{where}: " if where else ""
    return [
        *(lead + sentence for sentence in failure.others),
        f"{lead}{failure.subject} {verb} {failure.how}",
    ]
