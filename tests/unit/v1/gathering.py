"""What each rank has, on every rank, and what collectives it issues."""

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from deepspeed import comm as dist
from deepspeed.comm.watch.observation import CollectiveCall, add_observer, remove_observer

T = TypeVar("T")


def from_all_ranks(own: T) -> list[T]:
    """What each rank gives, by rank, on every rank; collective, in one file of each."""
    file = io.BytesIO()
    torch.save(own, file)
    files: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files, file.getvalue())
    return [torch.load(io.BytesIO(found), weights_only=False) for found in files]


class _Notes:
    def __init__(self, of: Callable[[CollectiveCall], Iterable[Any]]) -> None:
        self.of = of
        self.made: list[Any] = []

    def run(self, call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
        self.made += self.of(call)
        return proceed()


@contextmanager
def noted(of: Callable[[CollectiveCall], Iterable[T]]) -> Iterator[list[T]]:
    """What `of` gives for each collective of this rank inside, in their order."""
    notes = _Notes(of)
    add_observer(notes)
    try:
        yield notes.made
    finally:
        remove_observer(notes)


def collectives() -> AbstractContextManager[list[str]]:
    """Note the names of the collectives of this rank inside, in their order."""
    return noted(lambda call: [call.name])
