"""Whole parameters dealt to ranks: who computes what needs a parameter whole, while state stays
cut.

A group's shards are moved to a layout in which every parameter lies whole on one rank (`exchange`),
each rank computes its own, and the results go back the same way. A rank sends and receives about as
many elements as its shard has, whatever the number of ranks; what it owns already, most of it where
shards are cut from long rows, is computed while the rest travels.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch

from deepspeed import comm as dist
from deepspeed.ops.muon.newton_schulz import multiplications
from deepspeed.ops.whole_parameters import Argument, Function, Part, Use, WholeParameters
from deepspeed.runtime.sharding.exchange import Layout, LayoutExchange
from deepspeed.runtime.sharding.flattening import brought
from deepspeed.runtime.sharding.fragments import Fragment, NumEl, ParamIndex, ShardRank
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.utils.tensor_fragment import logical_shape

_Told = TypeVar("_Told")


def deal(
    costs: Sequence[int], num_shards: int, homes: Sequence[ShardRank] | None = None
) -> list[ShardRank]:
    """Choose the owner of each parameter, the dearest first to who has least: no rank has more than
    7/5 of what the best deal leaves the busiest. `homes` get theirs if that is hardly busier.
    """
    balanced = _dealt(costs, num_shards, None)
    if homes is None:
        return balanced
    near = _dealt(costs, num_shards, homes)
    is_balanced = 20 * _busiest(costs, near) <= 21 * _busiest(costs, balanced)
    return near if is_balanced else balanced


def _dealt(
    costs: Sequence[int], num_shards: int, homes: Sequence[ShardRank] | None
) -> list[ShardRank]:
    """Fill everyone's home first up to an equal share, then give the rest to who has least."""
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    loads, owners = [0] * num_shards, [-1] * len(costs)
    for param in order if homes is not None else ():
        home = homes[param]  # type: ignore[index]  # as above
        if num_shards * (loads[home] + costs[param]) <= sum(costs):
            owners[param] = home
            loads[home] += costs[param]
    heap = [(load, shard) for shard, load in enumerate(loads)]
    heapq.heapify(heap)
    for param in order:
        if owners[param] < 0:
            load, owners[param] = heap[0]
            heapq.heapreplace(heap, (load + costs[param], owners[param]))
    return owners


def _busiest(costs: Sequence[int], owners: Sequence[ShardRank]) -> int:
    loads: dict[ShardRank, int] = {}
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] = loads.get(owner, 0) + cost
    return max(loads.values(), default=0)


class DealtTable:
    """The layout in which each parameter is whole on one rank. `shard_numel`: the largest shard."""

    def __init__(
        self, numels: Sequence[NumEl], owners: Sequence[ShardRank], num_shards: int
    ) -> None:
        self._numels = list(numels)
        self.owners = list(owners)
        self._starts: list[NumEl] = []
        ends = [0] * num_shards
        for numel, owner in zip(numels, owners, strict=True):
            self._starts.append(ends[owner])
            ends[owner] += numel
        self.shard_numel = max(ends)

    def of_range(self, param: ParamIndex, start: NumEl, end: NumEl) -> Iterator[Fragment]:
        if start < end:
            at = self._starts[param] + start
            yield Fragment(param, start, self.owners[param], at, end - start)

    def of_shard(self, shard: ShardRank) -> Sequence[Fragment]:
        own = (param for param, owner in enumerate(self.owners) if owner == shard)
        return [
            fragment for param in own for fragment in self.of_range(param, 0, self._numels[param])
        ]


class _OfSome:
    """A layout of which one rank's shard has only some parameters, one behind the other."""

    def __init__(self, layout: Layout, params: Collection[ParamIndex], shard: ShardRank) -> None:
        self._layout = layout
        self._parts: list[Fragment] = []
        self.shard_numel = 0
        for part in layout.of_shard(shard):
            if part.param in params:
                self._parts.append(part._replace(shard_start=self.shard_numel))
                self.shard_numel += part.numel

    def of_range(self, param: ParamIndex, start: NumEl, end: NumEl) -> Iterator[Fragment]:
        return self._layout.of_range(param, start, end)

    def of_shard(self, shard: ShardRank) -> Sequence[Fragment]:
        return self._parts


class _Ways(NamedTuple):
    """The ways to the owners and back, and the longest message of either, on which ranks agree."""

    there: LayoutExchange
    back: LayoutExchange
    longest: NumEl


class DealtParameters(WholeParameters):
    """The parameters of one group, dealt to its ranks; see module. On `device` ranks communicate,
    and functions of whole parameters run.
    """

    def __init__(
        self, group: ShardedGroup, device: torch.device, names: Sequence[str] = ()
    ) -> None:
        self.names = list(names)
        self.process_group = group.process_group
        self.shapes = [logical_shape(param) for param in group.params]
        self.parts = [
            Part(part.param, part.in_shard) for part in group.table.of_shard(group.shard_rank)
        ]
        self._group = group
        self._device = device

    @cached_property
    def table(self) -> DealtTable:
        """Who computes what."""
        group = self._group
        # Who has more than half of a parameter has the element in its middle.
        middles = [numel // 2 for numel in group.table.numels]
        homes = [
            next((part.shard for part in group.table.of_range(param, at, at + 1)), 0)
            if group.table.numels[param]
            else 0
            for param, at in enumerate(middles)
        ]
        owners = deal([multiplications(shape) for shape in self.shapes], group.num_shards, homes)
        return DealtTable(group.table.numels, owners, group.num_shards)

    def _ways(self, shards: Layout, dealt: Layout) -> _Ways:
        group = self._group
        there = LayoutExchange(group, shards, dealt, self._device)
        back = LayoutExchange(group, dealt, shards, self._device)
        longest = torch.tensor(
            max(there.longest, back.longest), dtype=torch.int64, device=self._device
        )
        if group.num_shards > 1:
            dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group.process_group)
        return _Ways(there, back, int(longest.item()))

    @cached_property
    def _all_ways(self) -> _Ways:
        return self._ways(self._group.table, self.table)

    @cached_property
    def _cut(self) -> set[ParamIndex]:
        """The parameters that do not lie whole in their owner's shard."""
        table = self._group.table
        return {
            param
            for param, numel in enumerate(table.numels)
            for end in (1, numel)
            for part in table.of_range(param, end - 1, end if numel else 0)
            if part.shard != self.table.owners[param]
        }

    @cached_property
    def _cut_ways(self) -> tuple[_Ways, _OfSome, _OfSome]:
        """Between shards and owners, of parameters that are cut alone."""
        group = self._group
        shards = _OfSome(group.table, self._cut, group.shard_rank)
        dealt = _OfSome(self.table, self._cut, group.shard_rank)
        return self._ways(shards, dealt), shards, dealt

    @torch.no_grad()
    def through_owners(self, argument: Argument, function: Function, use: Use) -> None:
        ways, shards, dealt = self._cut_ways
        cut = [part for part in self.parts if part.param in self._cut]
        whole = [part for part in self.parts if part.param not in self._cut]
        half = len(whole) // 2

        def compute(part: Part) -> None:
            own = argument(part.at)
            found = function(brought(own, self._device).view(self.shapes[part.param]))
            use(part, found.reshape(-1).to(own.device))

        message = torch.cat([argument(slice(0, 0)), *(argument(part.at) for part in cut)])
        arriving = ways.there.start(message, ways.longest, self._device)
        for part in whole[:half]:
            compute(part)
        arrived = arriving()
        for fragment in dealt.of_shard(self._group.shard_rank):
            matrix = arrived[fragment.in_shard].view(self.shapes[fragment.param])
            matrix.copy_(function(matrix))
        returning = ways.back.start(arrived, ways.longest, message.device)
        for part in whole[half:]:
            compute(part)
        results = returning()
        for part, fragment in zip(cut, shards.of_shard(self._group.shard_rank), strict=True):
            use(part, results[fragment.in_shard])

    @property
    def owned(self) -> list[ParamIndex]:
        """The non-empty parameters that are dealt to this rank, in the order of `wholes`."""
        return [fragment.param for fragment in self.table.of_shard(self._group.shard_rank)]

    def from_owner(self, param: ParamIndex, value: _Told) -> _Told:
        """Send what the owner of a parameter gives, and others need not have, to every rank."""
        if self._group.num_shards == 1:
            return value
        owner = dist.get_global_rank(self.process_group, self.table.owners[param])
        told = [value]
        dist.broadcast_object_list(told, src=owner, group=self.process_group)
        return told[0]

    @torch.no_grad()
    def to_owners(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Put this rank's whole parameters in a row on `device`, from all shards. Collective."""
        ways = self._all_ways
        return ways.there.move(shard, ways.longest, device)

    @torch.no_grad()
    def from_owners(self, dealt: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Reverse `to_owners`; zero where no parameter lies. Collective."""
        ways = self._all_ways
        return ways.back.move(dealt, ways.longest, device)

    def wholes(self, dealt: torch.Tensor) -> Iterator[tuple[ParamIndex, torch.Tensor]]:
        """Yield views of what `to_owners` returned, in shape."""
        for fragment in self.table.of_shard(self._group.shard_rank):
            yield fragment.param, dealt[fragment.in_shard].view(self.shapes[fragment.param])

    def sum_parts(self, values: torch.Tensor) -> torch.Tensor:
        if self._group.num_shards == 1:
            return values
        summed = brought(values, self._device)
        dist.all_reduce(summed, group=self._group.process_group)
        return summed.to(values.device)
