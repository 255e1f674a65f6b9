"""Which ranks share a checkpoint folder: all, or with node-local storage those of one node.

What several ranks have, one of them writes: the first of those that share a folder, so with
node-local storage one on each node.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from deepspeed import comm as dist

# Number of the node, from the launcher of ours and that of torch; without either the machine's name
# tells nodes apart.
_NODE_VARIABLES = ("CROSS_RANK", "GROUP_RANK")

# Takes a file's name in the folder and its content, which may change after.
Put = Callable[[str, Any], None]


class StorageNode(NamedTuple):
    """The ranks that share this rank's folder.

    Attributes:
        rank: This rank.
        ranks: Global ranks with this folder, ascending.
        publishers: The first rank of each folder; it renames and removes what is in it.
    """

    rank: int
    ranks: tuple[int, ...]
    publishers: tuple[int, ...]

    @property
    def publishes(self) -> bool:
        """Whether this rank renames the folder."""
        return self.rank in self.publishers

    def is_first(self, ranks: Sequence[int]) -> bool:
        """Whether this rank writes what `ranks`, itself among them, have in common."""
        return self.rank == min(set(ranks) & set(self.ranks))

    def share(self, ranks: Sequence[int]) -> tuple[int, int]:
        """Which of how many this rank is among those of `ranks` that share the folder."""
        here = sorted(set(ranks) & set(self.ranks))
        return here.index(self.rank), len(here)


def storage_node(is_local: bool) -> StorageNode:
    """The ranks that share a checkpoint folder; `is_local`: those of one node. Collective."""
    return node_local_storage() if is_local else shared_storage()


def shared_storage() -> StorageNode:
    """One folder for all ranks."""
    return StorageNode(dist.get_rank(), tuple(range(dist.get_world_size())), (0,))


def node_local_storage() -> StorageNode:
    """A folder for the ranks of each node. Collective.

    Raises:
        ValueError: On every rank, if two ranks of what seems one node have the same local rank.
    """
    own = next((os.environ[name] for name in _NODE_VARIABLES if name in os.environ), None)
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, ((own, socket.gethostname()), dist.get_local_rank()))
    if len(set(places)) < len(places):
        raise ValueError(
            "checkpoint.use_node_local_storage: ranks of one node have the same local rank, so "
            "which ranks share a folder is not known; let the launcher set LOCAL_RANK, and "
            f"{' or '.join(_NODE_VARIABLES)} where nodes have the same name. Rank by rank: {places}"
        )
    nodes: dict[Any, list[int]] = {}
    for rank, (node, _) in enumerate(places):
        nodes.setdefault(node, []).append(rank)
    own_ranks = nodes[places[dist.get_rank()][0]]
    return StorageNode(
        dist.get_rank(), tuple(own_ranks), tuple(ranks[0] for ranks in nodes.values())
    )
