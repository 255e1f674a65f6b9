"""What guards say of a run, for the scenarios."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.verify import check_streams, lowered_sizes

SMALL_PIECE = 40
ERRORS = {
    "ledger": "GradientLedgerError",
    "intent": "CollectiveMismatchError",
    "engine": "PipeBufferError",
    "device": "HostWaitError",
}


@contextmanager
def simulated(backward_streams: int = 2, in_pieces: bool = True) -> Iterator[None]:
    """Everything within runs on the simulated device."""
    sizes = lowered_sizes(SMALL_PIECE) if in_pieces else nullcontext()
    with sizes, simulate(seed=0, backward_streams=backward_streams):
        yield


@contextmanager
def watched(backward_streams: int = 2, in_pieces: bool = True) -> Iterator[list[str]]:
    """What the stream checker finds on the simulated device, filled at the end."""
    said: list[str] = []
    with simulated(backward_streams, in_pieces), check_streams(raises=False) as found:
        yield said
    said += map(str, found.findings)


def raised(guard: str, run: Callable[[], object]) -> list[str]:
    """What a guard says by raising, on the rank it spoke on first or by the failure watch."""
    try:
        run()
    except RuntimeError as error:
        if ERRORS[guard] not in f"{type(error).__name__}: {error}":
            raise
        return [f"{ERRORS[guard]}: {error}"]
    return []
