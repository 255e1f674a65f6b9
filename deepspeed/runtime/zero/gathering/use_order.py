"""The order in which units were used last time: a hint, never a condition.

Pure bookkeeping on the units' numbers. A pass is a forward and what follows it; passes of one kind
are expected to be alike. Where one is not, there is no hint for the rest of it, and the next one is
compared with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate


class UseOrder:
    """Remembers the last pass of each kind.

    Args:
        numels: Elements of each unit.
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
        """A pass begins; the one before is over."""
        self._remember()
        self._kind, self._uses, self._named = kind, [], 0
        self._is_expected = kind in self._last

    def _remember(self) -> None:
        if self._kind is not None:
            self._last[self._kind] = self._uses
            self._sums[self._kind] = [0, *accumulate(self._numels[unit] for unit in self._uses)]

    def visit(self, unit: int) -> None:
        """A unit is used."""
        position = len(self._uses)
        self._uses.append(unit)
        expected = self._last.get(self._kind, ())
        if position >= len(expected) or expected[position] != unit:
            self._is_expected = False

    def ahead(self, numel: int) -> Iterator[int]:
        """The units that come within the next `numel` elements, as far as is known. Every use is
        named once, so that going on costs nothing for what was named before; the one at which the
        caller stops is named again.
        """
        if not self._is_expected:
            return
        last, sums, now = self._last[self._kind], self._sums[self._kind], len(self._uses)
        self._named = max(self._named, now)
        while self._named < len(last) and sums[self._named + 1] - sums[now] <= numel:
            yield last[self._named]
            self._named += 1

    def name_again(self, unit: int) -> None:
        """`ahead` may have named the next use of `unit`, which was whole and is so no longer."""
        position = self._next_use(unit)
        if position is not None:
            self._named = min(self._named, position)

    def distance(self, unit: int) -> int | None:
        """Elements that are used before `unit` is again; None if that is not known, or it is not
        in this pass.
        """
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
        """Whether this pass has been like the one before."""
        return self._is_expected

    def forget(self) -> None:
        """Expect nothing."""
        self._last, self._sums, self._is_expected = {}, {}, False
        self._kind = None
