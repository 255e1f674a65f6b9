"""Shards of a group on their way from one layout to another: that in memory and that of files.

In files shards are consecutive ranges of all parameters, as upstream's; in memory they may be cut
section by section (`fragments`). Every rank knows both, so nothing but elements travels.
Collective.

[Note: rounds]
One all-to-all of a whole shard would need two shards more on the device, where a large model leaves
no room. So it goes by rounds, each with a bounded number of elements of every message. How many
there are follows from the longest message, on which ranks agree before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, Protocol

import torch

from deepspeed import comm as dist
from deepspeed.runtime.sharding.flattening import brought
from deepspeed.runtime.sharding.fragments import Fragment, NumEl, ParamIndex, ShardRank
from deepspeed.runtime.sharding.group import ShardedGroup

# Elements that a rank sends, and at most receives, in one round.
ROUND_NUMEL = 1 << 25


class Layout(Protocol):
    """The part of a fragment table that says who owns what."""

    @property
    def shard_numel(self) -> NumEl: ...

    def of_shard(self, shard: ShardRank) -> Sequence[Fragment]: ...

    def of_range(self, param: ParamIndex, start: NumEl, end: NumEl) -> Iterator[Fragment]: ...


class Run(NamedTuple):
    """`numel` elements at `start` of this rank's shard that `peer` owns in the other layout."""

    peer: ShardRank
    start: NumEl
    numel: NumEl


def overlaps(mine: Layout, other: Layout, shard: ShardRank) -> list[Run]:
    """Find what `shard` of one layout has of every shard of the other.

    Ordered by peer, and for each by parameter and element: read from either side, the runs between
    two shards hold the same elements in the same order, which is that of the message between them.
    """
    found = sorted(
        (
            there.shard,
            there.param,
            there.param_start,
            fragment.shard_start + there.param_start - fragment.param_start,
            there.numel,
        )
        for fragment in mine.of_shard(shard)
        for there in other.of_range(
            fragment.param, fragment.param_start, fragment.param_start + fragment.numel
        )
    )
    runs: list[Run] = []
    for peer, _, _, start, numel in found:
        if runs and runs[-1].peer == peer and runs[-1].start + runs[-1].numel == start:
            runs[-1] = runs[-1]._replace(numel=runs[-1].numel + numel)
        else:
            runs.append(Run(peer, start, numel))
    return runs


class Kept(NamedTuple):
    """`numel` elements that a rank has in both layouts, at `source` and at `target`."""

    source: NumEl
    target: NumEl
    numel: NumEl


def kept(sent: Iterable[Run], received: Iterable[Run]) -> Iterator[Kept]:
    """Yield what goes from a rank to itself, in runs that each side has cut as its layout does."""
    sources = iter(sent)
    source, left = 0, 0
    for run in received:
        done = 0
        while done < run.numel:
            if left == 0:
                _, source, left = next(sources)
            numel = min(left, run.numel - done)
            yield Kept(source, run.start + done, numel)
            source, left, done = source + numel, left - numel, done + numel


def in_rounds(runs: Iterable[Run], limit: NumEl, count: int) -> list[list[Run]]:
    """Sort `runs` by the round in which they travel: element `i` of a message in `i // limit`."""
    rounds: list[list[Run]] = [[] for _ in range(count)]
    peer, sent = -1, 0
    for run in runs:
        sent = sent if run.peer == peer else 0
        peer, start, end = run.peer, run.start, run.start + run.numel
        while start < end:
            number, done = divmod(sent, limit)
            numel = min(end - start, limit - done)
            rounds[number].append(Run(peer, start, numel))
            start += numel
            sent += numel
    return rounds


class _Arriving(NamedTuple):
    """A round under way: where elements go, what is sent, where they arrive."""

    runs: Sequence[Run]
    message: torch.Tensor
    arrived: torch.Tensor
    work: dist.Handle

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.arrived


class LayoutExchange:
    """Moves this rank's shard of one group from layout `source` to `target`, communicating from
    `device`; None: where the parameters are.
    """

    def __init__(
        self,
        group: ShardedGroup,
        source: Layout,
        target: Layout,
        device: torch.device | None = None,
    ) -> None:
        self._group = group
        self._device = device or group.flat.device
        self._target_numel = target.shard_numel
        own = group.shard_rank
        sent, received = overlaps(source, target, own), overlaps(target, source, own)
        self._sent = [run for run in sent if run.peer != own]
        self._received = [run for run in received if run.peer != own]
        here = ([run for run in runs if run.peer == own] for runs in (sent, received))
        self._kept = list(kept(*here))
        self._has_padding = sum(run.numel for run in received) < target.shard_numel

    @property
    def longest(self) -> NumEl:
        """Elements of the longest message that this rank sends to another."""
        return max(self._numel_by_peer(self._sent), default=0)

    def _numel_by_peer(self, runs: Iterable[Run]) -> list[NumEl]:
        numels = [0] * self._group.num_shards
        for run in runs:
            numels[run.peer] += run.numel
        return numels

    @torch.no_grad()
    def move(self, shard: torch.Tensor, longest: NumEl, device: torch.device) -> torch.Tensor:
        """Return this rank's shard, of which padding at the end may be missing, in the target
        layout, on `device`; padding is zero. `longest`: elements of the longest message of all
        ranks.
        """
        return self.start(shard, longest, device)()

    @torch.no_grad()
    def start(
        self, shard: torch.Tensor, longest: NumEl, device: torch.device
    ) -> Callable[[], torch.Tensor]:
        """Begin `move`; what is returned finishes it. Until then nobody writes to `shard`."""
        limit = max(1, ROUND_NUMEL // self._group.num_shards)
        count = -(-longest // limit)
        both = (in_rounds(runs, limit, count) for runs in (self._sent, self._received))
        rounds = zip(*both, strict=True)
        begun = [self._begin(shard, *both) for both in islice(rounds, 1)]

        @torch.no_grad()
        def finish() -> torch.Tensor:
            make = torch.zeros if self._has_padding else torch.empty
            moved = make(self._target_numel, dtype=shard.dtype, device=device)
            for source, target, numel in self._kept:
                moved[target : target + numel].copy_(shard[source : source + numel])
            for arriving in chain(begun, (self._begin(shard, *both) for both in rounds)):
                start = 0
                arrived = arriving.wait().to(device)
                for run in arriving.runs:
                    there = moved[run.start : run.start + run.numel]
                    there.copy_(arrived[start : start + run.numel])
                    start += run.numel
            return moved

        return finish

    def _begin(
        self, shard: torch.Tensor, sent: Sequence[Run], received: Sequence[Run]
    ) -> _Arriving:
        group = self._group
        pieces = [shard[run.start : run.start + run.numel] for run in sent]
        message = brought(torch.cat([shard[:0], *pieces]), self._device)
        arrived = message.new_empty(sum(run.numel for run in received))
        # As bytes: not every backend sends every dtype that an optimizer may keep.
        size = shard.element_size()
        work = dist.all_to_all_single(
            arrived.view(torch.uint8),
            message.view(torch.uint8),
            [numel * size for numel in self._numel_by_peer(received)],
            [numel * size for numel in self._numel_by_peer(sent)],
            group=group.process_group,
            async_op=True,
        )
        return _Arriving(received, message, arrived, work)
