"""What each rank has, on every rank, and what collectives it issues."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class _Names:
    def __init__(self) -> None:
        self.issued: list[str] = []

    def run(self, call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
        self.issued.append(call.name)
        return proceed()


@contextmanager
def collectives() -> Iterator[list[str]]:
    """Note the names of the collectives of this rank inside, in their order."""
    names = _Names()
    add_observer(names)
    try:
        yield names.issued
    finally:
        remove_observer(names)
