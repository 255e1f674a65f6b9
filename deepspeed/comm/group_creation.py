"""Making process groups at a cost that does not grow with the world.

A rank makes the group it is in and no other. The functions that do so are collective over the world
all the same: every rank says how all ranks divide.

[Note: names of groups made by their members]
torch names a group that only its members make after its ranks and a number: older torch, how many
groups this process is in; newer torch, how many it has made. Members for whom it differs (the ends
of a pipeline are in fewer groups than its middle; a script has made a group of some ranks) would
meet under different names, for ever. So all ranks agree on a number first, the largest of any rank,
in one reduction of one number. Newer torch's number is then set. For older torch, who is in fewer
groups makes groups of itself alone, which have no communicator and meet nobody. The number never
falls, also if groups are destroyed, so no name is used twice.

[Note: order of groups made by their members]
Making a group ends when all its members make it. Divisions are made one after the other, the same
ones in the same order on all ranks, and each rank is in one group of a division at most. The oldest
division that somebody still works at has members that all have come past the ones before: no rank
waits for one that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import DeviceMesh, ProcessGroup

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import process_groups
from deepspeed.comm.process_groups import get_rank, get_world_group, get_world_size, new_group

_c10d: Any = torch_dist.distributed_c10d


class _Names:
    world: ProcessGroup | None = None
    highest = 0


def members_make_groups() -> bool:
    """Whether a group can be made without the ranks that are not in it.

    MPI cannot, and a world that is bound to its devices splits its communicator, in which all take
    part.
    """
    backend = process_groups.get_backend_name()
    return backend != "mpi" and getattr(get_world_group(), "bound_device_id", None) is None


@cache
def _names_count_what_was_made() -> bool:
    """Whether this torch puts `group_count` into the names, and not how many groups there are."""
    world = _c10d._world
    count, name = world.group_count, _c10d._hash_ranks_to_str([0])
    world.group_count = count + 1
    changed: bool = _c10d._hash_ranks_to_str([0]) != name
    world.group_count = count
    return changed


def _agree_on_names() -> None:
    """See [Note: names of groups made by their members]."""
    world = get_world_group()
    if _Names.world is not world:
        _Names.world, _Names.highest = world, 0
    names, by_count = _c10d._world.pg_names, _names_count_what_was_made()
    own = _c10d._world.group_count if by_count else len(names)
    device = get_accelerator().current_device_name()
    agreed = torch.tensor([max(own, _Names.highest + 1)], device=device)
    torch_dist.all_reduce(agreed, torch_dist.ReduceOp.MAX)
    _Names.highest = int(agreed.item())
    if by_count:
        _c10d._world.group_count = _Names.highest
        return
    while len(names) < _Names.highest:
        new_group([get_rank()], by_members=True)


def make_alone() -> ProcessGroup:
    """Make a group of this rank alone. Collective over the world where groups are."""
    if members_make_groups():
        return new_group([get_rank()], by_members=True)
    return [new_group([rank]) for rank in range(get_world_size())][get_rank()]


def make_own(rank_lists: Sequence[Sequence[int]], options: object = None) -> ProcessGroup | None:
    """Make this rank's group of a division (each global rank once at most, the same lists on all
    ranks); None if it is in none. Collective over the world.
    """
    rank = get_rank()
    if not members_make_groups():
        made = [new_group(ranks, options=options) for ranks in rank_lists]
        return next((one for one, own in zip(made, rank_lists, strict=True) if rank in own), None)
    _agree_on_names()
    own = next((ranks for ranks in rank_lists if rank in ranks), None)
    group = None if own is None else new_group(own, by_members=True, options=options)
    if _names_count_what_was_made():
        # Also on ranks that are in none: groups that a script has all ranks make are named by it.
        _c10d._world.group_count = _Names.highest + 1
    return group


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Make a torch DeviceMesh of this shape over the accelerator. Collective over the world.
    torch's own way makes every group of every axis on every rank.
    """
    world = get_world_size()
    device_type = get_accelerator().current_device_name().partition(":")[0]
    shape = tuple(mesh_shape)
    if not members_make_groups() or torch.Size(shape).numel() != world:
        return torch_dist.init_device_mesh(device_type, shape, mesh_dim_names=tuple(mesh_dim_names))
    mesh = torch.arange(world, device="cpu").view(shape)
    groups: list[Any] = [
        make_own(mesh.movedim(axis, -1).reshape(-1, size).tolist())
        for axis, size in enumerate(shape)
    ]
    return DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],
        device_type,
        mesh=mesh,
        mesh_dim_names=tuple(mesh_dim_names),
    )
