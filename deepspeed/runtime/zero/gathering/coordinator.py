"""Who needs which unit whole, from when and until when.

[Note: who needs it]
A unit is whole while a forward that uses it runs (`holds`), while the running backward needs it
(`is_kept_for_backward`), or while somebody reads its parameters by hand (`ShardRecord.readers`,
which is not ours). When nobody does it is *idle*: it goes back at once, or stays because it is used
again within `max_reuse_numel` elements, as the order seen last time says, and no more than
`max_live_numel` elements are whole. Nothing is idle over a step: shards change there.

[Note: units of several modules]
A unit that small neighbours share (`GatherUnit.is_fused`) is not retired while it is the last that
was used: the next module is likely one of its own. It is retired when another unit is used, and
when the forward or the backward is over. So its modules come and go without asking the order, and
without hooks on their inputs that say when their backward is over. The same neighbours have several
such units if their parameters are of several kinds; these have one name, and stay together.

What is gathered when depends on the entries of modules alone and on numbers that are the same on
all ranks, so all ranks issue the same gathers in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice

import torch

from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit


def in_backward() -> bool:
    """Whether this thread runs a backward, recomputation included."""
    return torch._C._current_graph_task_id() != -1


class PartitionedParameterCoordinator:
    """Lets units, all that do not persist, be whole while somebody needs them.

    Args:
        prefetch_numel: The next unit is gathered ahead, and all that begin within so many elements
            from now; 0: none.
        max_live_numel: Elements whole at a time that nobody needs at the moment.
        max_reuse_numel: How soon a unit must be used again to stay.
    """

    def __init__(
        self,
        units: Sequence[GatherUnit],
        prefetch_numel: int,
        max_live_numel: int,
        max_reuse_numel: int,
    ) -> None:
        self.units = list(units)
        for index, unit in enumerate(self.units):
            unit.index = index
            unit.coordinator = self
        self._prefetch_numel = prefetch_numel
        self._max_live_numel = max_live_numel
        self._max_reuse_numel = max_reuse_numel
        self._order = UseOrder([unit.numel for unit in self.units])
        self._idle: dict[GatherUnit, None] = {}
        self._kept: dict[GatherUnit, None] = {}
        self._ahead: dict[GatherUnit, None] = {}
        self._last_fused: list[GatherUnit] = []  # of one name; if one of them was used last
        self._recomputed: set[GatherUnit] = set()  # whose memory is kept by what autograd saved
        self._round: list[GatherUnit] | None = None  # see `begin_round`
        self.live_numel = 0

    # Forward

    def begin_pass(self) -> None:
        """Begin an outermost forward. What one left whose backward never came goes."""
        self.release_all()
        self._order.begin(torch.is_grad_enabled())

    def enter(self, units: Iterable[GatherUnit]) -> None:
        for unit in units:
            unit.holds += 1
            if in_backward():
                self.use_in_recomputation(unit)
            elif unit in self._last_fused or (unit.holds > 1 and unit.is_whole):
                unit.fetch()  # it may be another stream that reads now
            else:
                self._use(unit)

    def leave(self, units: Iterable[GatherUnit]) -> None:
        if self._round is not None:
            self._round.extend(units)
            return
        for unit in units:
            unit.holds -= 1
            self._retire(unit)

    def begin_round(self) -> None:
        """Hold what forwards use until all of several micro-batches have used it, one by one."""
        self._round = []

    def end_round(self) -> list[GatherUnit]:
        """Let go of it, and tell what it was."""
        units, self._round = self._round or [], None
        self.leave(units)
        return units

    def end_forward(self) -> None:
        self._end_fused()

    # Backward

    def use_in_backward(self, unit: GatherUnit, from_memory: bool = False) -> None:
        """Have `unit` whole for the running backward; `from_memory`: where a gather puts its
        parameters, though they may be whole elsewhere too.
        """
        if unit.is_kept_for_backward and unit.is_whole:
            unit.fetch()  # it may be another stream that reads now
            return
        unit.is_kept_for_backward = True
        self._kept[unit] = None
        self._use(unit, from_memory)

    def use_in_recomputation(self, unit: GatherUnit) -> None:
        self._recomputed.add(unit)
        if unit in self._last_fused:
            unit.fetch()  # it may be another stream that reads now
        else:
            self.use_in_backward(unit)

    def is_recomputed(self, unit: GatherUnit) -> bool:
        """Whether what a recomputation saved of `unit` stays as it is, no note of a place: so the
        unit stays until backward is done with all of that.
        """
        return unit in self._recomputed

    def done_in_backward(self, units: Iterable[GatherUnit]) -> None:
        for unit in units:
            self._recomputed.discard(unit)
            if unit.is_kept_for_backward and unit not in self._last_fused:
                unit.is_kept_for_backward = False
                del self._kept[unit]
                self._retire(unit)

    def end_backward(self) -> None:
        self._end_fused()
        self.done_in_backward(list(self._kept))
        self._recomputed.clear()
        self._release_idle()

    # What is whole

    def _use(self, unit: GatherUnit, from_memory: bool = False) -> None:
        if not unit.is_fused or any(last.name != unit.name for last in self._last_fused):
            self._end_fused()
        self._order.visit(unit.index)
        self._idle.pop(unit, None)
        if unit.is_covered and not from_memory:
            return
        added = 0 if unit in self._ahead or unit.is_whole else unit.numel
        if added:
            self._make_room(added)
            self._read_ahead(chain((unit.index,), self._order.later()))
        with torch._C._DisableFuncTorch():  # what vmap or jvp run makes plain tensors here too
            unit.fetch()  # if it fails, nothing of it is counted
            self._ahead.pop(unit, None)
            if unit.is_fused and unit not in self._last_fused:
                self._last_fused.append(unit)
            self.live_numel += added
            self._prefetch()

    def _end_fused(self) -> None:
        units, self._last_fused = self._last_fused, []
        self.done_in_backward([unit for unit in units if unit not in self._recomputed])
        for unit in units:
            self._retire(unit)

    def _make_room(self, numel: int) -> None:
        while self._idle and self.live_numel + numel > self._max_live_numel:
            # The first to become idle in forward is the last to be used again in backward.
            self._let_go_until_later(next(iter(self._idle)))

    def _prefetch(self) -> None:
        for index in self._order.ahead(self._prefetch_numel):
            self._read_ahead(self._order.later())
            if not self._start(self.units[index]):
                break
        self._read_ahead(self._order.later())

    def read_first(self) -> None:
        """Begin to read what the next pass likely needs first, if shards lie in files."""
        self._read_ahead(self._order.anew())

    def _read_ahead(self, uses: Iterator[int]) -> None:
        reads = self.units[0].resources.reads if self.units else None
        if reads is None:
            return
        for unit in (self.units[index] for index in uses):
            if not (unit.is_whole or unit.is_on_its_way or reads.begin(unit.shard)):
                return

    def foresee(self, units: Iterator[GatherUnit]) -> None:
        """Hear what the running backward needs next, if the last pass does not tell."""
        unit = None if self._order.is_expected else next(units, None)
        if self._prefetch_numel and unit is not None:
            self._start(unit)

    def _start(self, unit: GatherUnit) -> bool:
        """Begin a gather ahead; False if there is no room. What is in use leaves room for one."""
        if unit.is_whole or unit.is_covered or unit in self._ahead:
            return True
        if self.live_numel + unit.numel > self._max_live_numel:
            if self._ahead or unit.numel > self._max_live_numel:
                return False
            self._make_room(unit.numel)
        unit.start()
        self._ahead[unit] = None
        self.live_numel += unit.numel
        return True

    def _retire(self, unit: GatherUnit) -> None:
        if unit.holds or unit.is_kept_for_backward or not unit.is_whole:
            return
        if unit in self._last_fused:
            return
        distance = self._order.distance(unit.index)
        if distance is not None and distance <= self._max_reuse_numel:
            self._idle[unit] = None
        else:
            self._let_go_until_later(unit)

    def _let_go_until_later(self, unit: GatherUnit) -> None:
        self._release(unit)
        self._order.name_again(unit.index)

    def _release(self, unit: GatherUnit) -> None:
        self._idle.pop(unit, None)
        self._ahead.pop(unit, None)
        self.live_numel -= unit.numel
        unit.release()

    def _release_idle(self) -> None:
        for unit in [*self._idle, *self._ahead]:
            self._release(unit)

    def drop_ahead(self, unit: GatherUnit) -> None:
        """Let go of a gather that was begun before a shard of `unit` changed."""
        if unit in self._ahead:
            self._release(unit)

    def release_all(self) -> None:
        """Let nothing be whole but what a running forward holds: shards are about to change."""
        self._end_fused()
        self.done_in_backward(list(self._kept))
        self._release_idle()
        for unit in self.units:
            unit.forget_secondary()

    # Clients

    def is_invalid_trace(self) -> bool:
        return not self._order.is_expected

    def _invalidate_trace(self) -> None:
        self._order.forget()


class UseOrder:
    """The last pass of each kind, over units of `numels` elements: a hint, never a condition. Where
    a pass (a forward and what follows it) is not as the last, there is no hint for the rest of it.
    """

    def __init__(self, numels: Sequence[int]) -> None:
        self._numels = list(numels)
        self._last: dict[Hashable, list[int]] = {}
        self._sums: dict[Hashable, list[int]] = {}
        self._kind: Hashable = None
        self._uses: list[int] = []
        self._is_expected = False
        self._named = 0  # uses of this pass that `ahead` has named, or that are over

    def begin(self, kind: Hashable) -> None:
        self._remember()
        self._kind, self._uses, self._named = kind, [], 0
        self._is_expected = kind in self._last

    def _remember(self) -> None:
        if self._kind is not None:
            self._last[self._kind] = self._uses
            self._sums[self._kind] = [0, *accumulate(self._numels[unit] for unit in self._uses)]

    def visit(self, unit: int) -> None:
        position = len(self._uses)
        self._uses.append(unit)
        expected = self._last.get(self._kind, ())
        if position >= len(expected) or expected[position] != unit:
            self._is_expected = False

    def ahead(self, numel: int) -> Iterator[int]:
        """Name the units that begin within the next `numel` elements, as far as is known: every use
        once, so that going on costs nothing for what was named; the one at which the caller stops
        again.
        """
        if not self._is_expected:
            return
        last, sums, now = self._last[self._kind], self._sums[self._kind], len(self._uses)
        self._named = max(self._named, now)
        while self._named < len(last) and sums[self._named] - sums[now] < numel:
            named = self._named
            yield last[named]
            if self._named == named:  # else something has gone meanwhile that comes before
                self._named += 1

    def later(self) -> Iterator[int]:
        """Name all uses behind those that `ahead` has named, as far as is known."""
        if self._is_expected:
            yield from islice(self._last[self._kind], max(self._named, len(self._uses)), None)

    def anew(self) -> Iterator[int]:
        """Name the uses of the pass that is over, as if the next were one like it."""
        yield from self._uses

    def name_again(self, unit: int) -> None:
        """Let `ahead` name the next use of `unit`, which was whole and is so no longer."""
        position = self._next_use(unit)
        if position is not None:
            self._named = min(self._named, position)

    def distance(self, unit: int) -> int | None:
        """Count the elements used before `unit` is again; None if it is not, or not known."""
        position = self._next_use(unit)
        if position is None:
            return None
        sums = self._sums[self._kind]
        return sums[position] - sums[len(self._uses)]

    def _next_use(self, unit: int) -> int | None:
        if not self._is_expected:
            return None
        try:
            return self._last[self._kind].index(unit, len(self._uses))
        except ValueError:
            return None

    @property
    def is_expected(self) -> bool:
        return self._is_expected

    def forget(self) -> None:
        self._last, self._sums, self._is_expected = {}, {}, False
        self._kind = None
