"""Which ranks share a checkpoint folder, how they agree, and which folder is loaded.

What several ranks have, one of them writes: the first of those that share a folder, so with
node-local storage one on each node.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.file_names import CHECKPOINT_SUFFIXES
from deepspeed.checkpoint.files import CheckpointError, read_latest, recover_folder
from deepspeed.checkpoint.manifest import newest_common_tag, published_tags, read_manifest
from deepspeed.checkpoint.verification import (
    FULL,
    OFF,
    check_coverage,
    check_folder,
    existing_tags,
    latest_tag,
    newest_published,
    raise_problems,
)
from deepspeed.comm.failures import reports
from deepspeed.comm.watch import lone_waits
from deepspeed.utils.logging import log_dist, logger

# Number of the node, from our launcher and torch's; without them the machine's name.
_NODE_VARIABLES = ("CROSS_RANK", "GROUP_RANK")

# Takes a file's name in the folder and its content, which may change after.
Put = Callable[[str, Any], None]


class StorageNode(NamedTuple):
    """The ranks that share this rank's folder; `publishers`: the first rank of each folder."""

    rank: int
    ranks: tuple[int, ...]
    publishers: tuple[int, ...]

    @property
    def publishes(self) -> bool:
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
    """A folder for the ranks of each node. Collective."""
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


def together(action: Callable[[], Any], device: torch.device, what: str) -> Any:
    """Run `action` on every rank; if it fails on one, raise on all, naming ranks and reasons."""
    result, error = None, None
    meeting = 0 if dist.get_world_size() == 1 else lone_waits.watch.coming()
    try:
        result = action()
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    own = None if error is None else f"{type(error).__name__}: {error}"
    told = reports(own, None, lambda: what, device, meeting)
    if told:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in told)
        raise CheckpointError(f"{what} failed. {reasons}") from error
    return result


class FolderChoice:
    """Finds and checks checkpoint folders. All ranks call each method, together."""

    def __init__(
        self, node: StorageNode, level: str, universal: bool, device: torch.device
    ) -> None:
        self._node = node
        self._level = level
        self._universal = universal
        self._device = device

    def recover(self, folder: str) -> None:
        """Put back what a killed save has moved away."""
        together(
            lambda: recover_folder(folder) if self._node.publishes else None,
            self._device,
            f"looking for {folder}",
        )

    def latest_tag(self, load_dir: str) -> str | None:
        """What to load when no tag is given, the same on all ranks; None and a warning if none."""
        what = f"looking for the newest checkpoint in {load_dir}"
        known = together(lambda: self._known_tags(load_dir), self._device, what)
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, known)
        tag = newest_common_tag([everywhere[publisher] for publisher in self._node.publishers])
        if tag is None:
            log_dist(self._told_of_nothing(load_dir), ranks=[0], level=logging.WARNING)
        return tag

    def _told_of_nothing(self, load_dir: str) -> str:
        latest = keys.LATEST_UNIVERSAL if self._universal else keys.LATEST
        there = os.listdir(load_dir) if os.path.isdir(load_dir) else None
        why, tags = f"is no folder with a file {latest!r}", existing_tags(load_dir)
        if there is None:
            why = "is not there"
        elif any(name.endswith(CHECKPOINT_SUFFIXES) for name in there):
            parent, tag = os.path.split(load_dir)
            why = f"is one checkpoint: give load_checkpoint({parent!r}, tag={tag!r})"
        elif tags:
            why = f"has no file {latest!r}; give the tag that you mean: {', '.join(tags)}"
        return f"no checkpoint is loaded, and training starts anew: {load_dir} {why}"

    def _known_tags(self, load_dir: str) -> tuple[str | None, list[str]]:
        if not self._node.publishes:
            return None, []
        if os.path.isfile(load_dir):
            raise CheckpointError(
                f"{load_dir} is a file; give the folder that save_checkpoint was given"
            )
        if self._universal:
            tag = read_latest(load_dir, keys.LATEST_UNIVERSAL)
            return tag, [] if tag is None else [tag]
        named, newest = latest_tag(load_dir), newest_published(load_dir)
        if newest is not None and named != newest:
            logger.warning(
                f"{os.path.join(load_dir, keys.LATEST)} "
                f"{'is missing' if named is None else f'names {named!r}'}, but the newest "
                f"checkpoint that it was to name is {newest!r}: a save was killed before it wrote "
                f"the file, or the file was lost or changed since. Loading {named or newest!r}; "
                "give a tag for another"
            )
        return named or newest, published_tags(load_dir)

    def verify_newest(self, folder: str) -> None:
        """`verify`; if it fails, tell which older checkpoint could be loaded: none is unasked."""
        try:
            return self.verify(folder)
        except CheckpointError as error:
            load_dir, tag = os.path.split(folder)
            candidates: list[Any] = [
                [name for name in reversed(published_tags(load_dir)) if name != tag]
            ]
            dist.broadcast_object_list(candidates, src=0)
            for name in candidates[0]:
                if self._is_valid(os.path.join(load_dir, name)):
                    raise CheckpointError(
                        f"{error}. The newest other checkpoint that is as it was written has "
                        f"tag={name!r}"
                    ) from error
            raise

    def _is_valid(self, folder: str) -> bool:
        try:
            self.verify(folder)
        except CheckpointError:
            return False
        return True

    def verify(self, folder: str) -> None:
        """Hold the folder against its manifest, if any; each rank reads a share of the files."""
        device, doing = self._device, f"checking {folder}"
        parts = together(lambda: _check_share(folder, self._node, self._level), device, doing)
        if len(self._node.publishers) > 1:
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, parts)
            parts = {rank: part for found in everywhere for rank, part in found.items()}
        # Of one folder its first rank has them all; of folders of several nodes now every rank has.
        together(lambda: raise_problems(folder, check_coverage(parts.values())), device, doing)


def _check_share(folder: str, node: StorageNode, level: str) -> Mapping[int, Mapping[str, Any]]:
    """Check what is this rank's share of a folder."""
    load_dir, tag = os.path.split(folder)
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"tag {tag!r} is not in {load_dir}; there are: "
            f"{', '.join(existing_tags(load_dir)) or 'none'}"
        )
    manifest = read_manifest(folder) if level != OFF else None
    if manifest is None:
        return {}
    share = node.share(node.ranks)
    raise_problems(folder, check_folder(folder, manifest, share, level == FULL))
    return manifest.parts if share[0] == 0 else {}
