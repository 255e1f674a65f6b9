"""The process groups that the package makes for itself: each once per world, and kept, because a
communicator is expensive.

Making one is collective over the world: every rank asks for the same, in the same order.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from deepspeed.comm import comm as dist
from deepspeed.comm import group_creation

Made = TypeVar("Made")


class _Store:
    def __init__(self) -> None:
        self.world: ProcessGroup | None = None
        self.made: dict[Hashable, Any] = {}

    def of_this_world(self) -> dict[Hashable, Any]:
        world = dist.get_world_group()
        if self.world is not world:
            self.made.clear()
            self.world = world
        return self.made


_store = _Store()


def made_once(key: Hashable, make: Callable[[], Made]) -> Made:
    """What `make` made under this key in the present world."""
    made = _store.of_this_world()
    if key not in made:
        made[key] = make()
    found: Made = made[key]
    return found


def is_made(key: Hashable) -> bool:
    """Whether asking for this key communicates nothing."""
    return key in _store.of_this_world()


def forget() -> None:
    """Make everything anew when it is asked for next."""
    _store.made.clear()
    _store.world = None


def own_group(rank_lists: Sequence[list[int]]) -> ProcessGroup:
    """Make this rank's group of a division (each rank once, the same lists everywhere). Collective
    over the world, and one call on each rank.
    """
    if len(rank_lists) == dist.get_world_size():
        return group_of_one()
    made = group_creation.make_own([ranks for ranks in rank_lists if len(ranks) > 1])
    return group_of_one() if made is None else made


def group_of_one() -> ProcessGroup:
    """The group of this rank alone."""
    return made_once("self", group_creation.make_alone)


def shared_group(rank_lists: Sequence[list[int]]) -> ProcessGroup:
    """This rank's group of `own_group`, made once per division of the ranks."""
    if len(rank_lists) == 1:
        return dist.get_world_group()
    if len(rank_lists) == dist.get_world_size():
        return group_of_one()
    return made_once(("ranks", tuple(map(tuple, rank_lists))), lambda: own_group(rank_lists))
