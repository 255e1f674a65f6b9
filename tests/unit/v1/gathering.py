"""What each rank has, on every rank, and what collectives it issues."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.watch.observation import CollectiveCall, add_observer, remove_observer
from deepspeed.utils import safe_get_full_fp32_params, safe_get_full_grads

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]


def from_all_ranks(own: T, first_alone: bool = False) -> list[T]:
    """What each rank gives, by rank, on every rank, or on the first alone: others get nothing;
    collective, in one file of each.
    """
    file = io.BytesIO()
    torch.save(own, file)
    files: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files, file.getvalue())
    read = [] if first_alone and dist.get_rank() else files
    return [torch.load(io.BytesIO(found), weights_only=False) for found in read]


def masters_of(params: Mapping[str, nn.Parameter], plain: bool = False) -> Tensors:
    """The fp32 parameters, whole; `plain`: the parameters are their own masters."""
    values = list(params.values()) if plain else safe_get_full_fp32_params(list(params.values()))
    return {name: value.detach().clone() for name, value in zip(params, values, strict=True)}


def gradients_of(params: Mapping[str, nn.Parameter], plain: bool = False) -> Tensors:
    """What the coming step will use, whole; nothing if the system says that there is none."""
    values = [param.grad for param in params.values()]
    if not plain:
        values = safe_get_full_grads(list(params.values())) or [None] * len(params)
    named = zip(params, values, strict=True)
    return {name: value.clone() for name, value in named if value is not None}


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
