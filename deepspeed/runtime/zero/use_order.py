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

    def begin(self, kind: Hashable) -> None:
        """A pass begins; the one before is over."""
        self._remember()
        self._kind, self._uses = kind, []
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

    def ahead(self) -> Iterator[int]:
        """The units that come next, as far as is known."""
        if self._is_expected:
            yield from self._last[self._kind][len(self._uses) :]

    def distance(self, unit: int) -> int | None:
        """Elements that are used before `unit` is again; None if that is not known, or it is not
        in this pass.
        """
        if not self._is_expected:
            return None
        uses, now = self._last[self._kind], len(self._uses)
        try:
            position = uses.index(unit, now)
        except ValueError:
            return None
        sums = self._sums[self._kind]
        return sums[position] - sums[now]

    @property
    def is_expected(self) -> bool:
        """Whether this pass has been like the one before."""
        return self._is_expected

    def forget(self) -> None:
        """Expect nothing."""
        self._last, self._sums, self._is_expected = {}, {}, False
        self._kind = None
