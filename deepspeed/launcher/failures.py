"""Which failure of one launcher's processes is the cause of the others, and how it reads.

The choice among several launchers is `job.coordinator`'s.
"""

import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed.launcher.logs import RankHistory

TRACEBACK_WINDOW_SECONDS = 10.0
# How long a killed process may take to be gone: its connections close first, then its device's
# memory is cleared away. Its peers may have raised and ended by then.
DYING_SECONDS = 5.0
# In what a process says that aborts because a collective failed, as NCCL's watchdog does.
LOST_COLLECTIVE = (b"c10::Dist", b"gloo::")
# In the exception of one whose peer is gone.
LOST_PEER = (*LOST_COLLECTIVE, b"by peer", b"Broken pipe", b"ncclRemoteError")


@dataclass(frozen=True)
class Exit:
    """The end of one process: its id, and its code, negative for a signal."""

    pid: int
    code: int


@dataclass(frozen=True)
class Failure:
    """What one launcher says of a failure; plain values, so that it travels as JSON."""

    subject: str  # who failed: a rank with its process id, or a node
    how: str  # the way it ended
    code: int  # the code that the launch exits with on account of it
    age: float = 0.0  # seconds between the failure and this report
    lasted: float = 0.0  # seconds between the failure and the end
    # Number of the signal that ended it, unless a launcher sent that or it speaks of a lost peer;
    # else 0.
    signal: int = 0
    is_of_lost_peer: bool = False  # what it last wrote speaks of a lost peer
    # Sentences about processes that failed after it.
    others: list[str] = field(default_factory=list)
    heading: str = ""  # line above `last_words`
    last_words: list[str] = field(default_factory=list)  # what the process last wrote to stderr


@dataclass(frozen=True)
class End:
    """When a process, or one launcher's part of a job, failed."""

    moment: float  # monotonic seconds of its traceback, or else of its end
    ended: float  # of its end
    signal: int = 0  # this and the next as in `Failure`
    is_of_lost_peer: bool = False


def cause_of(ends: Sequence[End]) -> int:
    """Return the position of the end that caused the others: the first, or the signal behind it.

    A process that a signal ends closes its connections before its end can be seen, and its peers'
    tracebacks, and on a busy machine their ends, may come in between. A signal of its own fault is
    no cause of what ended before it, unless that speaks of a lost peer; SIGKILL comes from outside,
    whatever else has happened.
    """
    first = min(ends, key=lambda end: end.moment)

    def precedence(end: End) -> int:
        killed = end.signal == signal.SIGKILL
        late = end.moment > first.moment + TRACEBACK_WINDOW_SECONDS
        patience = DYING_SECONDS * (killed or first.is_of_lost_peer)
        if not end.signal or late or end.moment > first.ended + patience:
            return 2
        return 0 if killed else 1

    return min(range(len(ends)), key=lambda at: (precedence(ends[at]), ends[at].moment))


def make_failure(
    exits: Mapping[int, Exit],
    history: Sequence[RankHistory],
    first_rank: int = 0,
    stopped_at: float | None = None,
) -> Failure:
    """Return the report on the failed processes `exits`; `stopped_at` is in monotonic seconds."""
    ends = ends_of({rank: end.code for rank, end in exits.items()}, history, stopped_at)
    first = list(ends)[cause_of(list(ends.values()))]
    seen, code, end = history[first], exits[first].code, ends[first]
    others = [
        f"rank {first_rank + rank} (process {end.pid}) then ended with {describe_exit(end.code)}"
        for rank, end in sorted(exits.items())
        if rank != first
    ]
    how, exit_code = describe_exit(code), 128 - code if code < 0 else code
    if code == -signal.SIGTERM and not end.signal:
        # It raised, its peers noticed and ended, and it was ended while it was still cleaning up.
        how, exit_code = "an exception", 1
    name = f"rank {first_rank + first}"
    wrote = f"what {name} last wrote to stderr:"
    return Failure(
        subject=f"{name} (process {exits[first].pid})",
        how=how,
        code=exit_code,
        age=time.monotonic() - end.moment,
        lasted=end.ended - end.moment,
        signal=end.signal,
        is_of_lost_peer=end.is_of_lost_peer,
        others=others,
        heading=wrote if seen.stderr_tail else f"{name} wrote nothing to stderr",
        last_words=[line.decode(errors="replace") for line in seen.last_traceback()],
    )


def failed_before(
    moment: float, history: Sequence[RankHistory], first_rank: int = 0
) -> Failure | None:
    """Return the report on processes that failed shortly before the job was told to stop.

    The exit code of one that raised and had not ended by then will never be known: it was ended
    from outside while it was cleaning up.
    """
    exits: dict[int, Exit] = {}
    for rank, seen in enumerate(history):
        if seen.pid is None:
            continue
        raised = seen.traceback_at
        if seen.exited_at is not None and seen.exited_at < moment and seen.code is not None:
            if seen.code:
                exits[rank] = Exit(seen.pid, seen.code)
        elif raised is not None and moment - TRACEBACK_WINDOW_SECONDS < raised < moment:
            exits[rank] = Exit(seen.pid, -signal.SIGTERM)
    return make_failure(exits, history, first_rank, moment) if exits else None


def ends_of(
    codes: Mapping[int, int], history: Sequence[RankHistory], stopped_at: float | None = None
) -> dict[int, End]:
    """Return the ends of failed processes by rank, without those that can only be consequences."""
    times = {rank: history[rank].exited_at for rank in codes}
    # One that was gone before it had said its id ended first, unless a launcher ended it.
    early = [rank for rank in codes if times[rank] is None and codes[rank] != -signal.SIGTERM]
    ended = [end for end in times.values() if end is not None]
    first_end = min(ended, default=time.monotonic())
    launcher_began = first_end if stopped_at is None else min(first_end, stopped_at)
    if early:
        launcher_began = -math.inf
    ends: dict[int, End] = {}
    consequences: dict[int, End] = {}
    for rank, code in codes.items():
        at, seen = times[rank], history[rank]
        by_launcher = code == -signal.SIGTERM and (at is None or at > launcher_began)
        end = first_end if at is None else at
        raised = seen.traceback_at
        # An old traceback was caught and logged; one from just before the first end is a cause.
        if raised is None or raised <= first_end - TRACEBACK_WINDOW_SECONDS:
            raised = None
        is_of_lost_peer = _speaks_of_a_lost_peer(code, seen)
        own = code < 0 and not by_launcher and not (code == -signal.SIGABRT and is_of_lost_peer)
        moment = end if own or raised is None else min(raised, end)
        found = End(moment, end, -code if own else 0, is_of_lost_peer)
        (consequences if by_launcher and raised is None else ends)[rank] = found
    return ends or consequences


def _speaks_of_a_lost_peer(code: int, seen: RankHistory) -> bool:
    # The stack that an abort prints is long. What an exception follows may have been handled.
    aborts = code == -signal.SIGABRT
    words = LOST_COLLECTIVE if aborts else LOST_PEER
    lines = seen.stderr_tail if aborts else seen.last_traceback()
    return any(word in line for line in lines for word in words)


def describe_exit(exit_code: int) -> str:
    """Return `exit code 3`, or `signal SIGKILL (9)` for a negative code."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name} ({-exit_code})"
    except ValueError:
        return f"signal {-exit_code}"


def write_failures(failures: Sequence[tuple[str, Failure]]) -> None:
    """Write what happened to stderr, the cause (given first) and its last words at the end."""
    (where, first), *later = failures
    lines = []
    for place, failure in later:
        lines += _sentences(place, failure, "then ended with")
    lines += _sentences(where, first, "failed first, with")
    if first.heading:
        lines.append(first.heading)
    # What the ranks printed comes before: this process wrote it.
    sys.stdout.flush()
    marked = [f"[deepspeed] {line}" for line in lines]
    sys.stderr.write("".join(f"{line}\n" for line in [*marked, *first.last_words]))
    sys.stderr.flush()


def _sentences(where: str, failure: Failure, verb: str) -> list[str]:
    lead = f"{where}: " if where else ""
    return [lead + one for one in (*failure.others, f"{failure.subject} {verb} {failure.how}")]
