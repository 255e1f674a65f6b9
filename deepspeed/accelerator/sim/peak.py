"""Who holds memory of the simulated device at its peak. Allocations and frees are logged, and the
peak is worked out afterwards, so that a new one costs nothing while memory grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from deepspeed.accelerator.host_waits import program_place

EARLIER = "(allocated before)"


class Held(NamedTuple):
    """Memory that somebody holds, from `address` on, and the place that allocated it."""

    nbytes: int
    address: int
    place: str


class PeakRecord:
    """The peak of allocated bytes since this was made, with what was held then."""

    def __init__(self, held: Iterable[tuple[int, int, int]]) -> None:
        self._all = {serial: Held(nbytes, address, EARLIER) for serial, nbytes, address in held}
        # Serial numbers in the order of events; a second occurrence is the end of that life.
        self._events = list(self._all)
        self._living = set(self._all)
        self._allocated = self.nbytes = sum(one.nbytes for one in self._all.values())
        self._at_peak = len(self._events)

    def took(self, serial: int, nbytes: int, address: int) -> None:
        self._all[serial] = Held(nbytes, address, program_place())
        self._living.add(serial)
        self._events.append(serial)
        self._allocated += nbytes
        if self._allocated > self.nbytes:
            self.nbytes, self._at_peak = self._allocated, len(self._events)

    def gave(self, serial: int) -> None:
        self._living.discard(serial)
        self._events.append(serial)
        self._allocated -= self._all[serial].nbytes

    def by_owner(self, describe: Callable[[int], str | None]) -> dict[str, int]:
        """Bytes at the peak by owner, most first; they add up to `nbytes`.

        `describe` names what lies at an address that is still held; other memory, and what has no
        name, goes by the place that allocated it.
        """
        alive: set[int] = set()
        for serial in self._events[: self._at_peak]:
            alive ^= {serial}
        owners: Counter[str] = Counter()
        for serial in alive:
            one = self._all[serial]
            name = describe(one.address) if serial in self._living else None
            owners[name or one.place] += one.nbytes
        return dict(owners.most_common())
