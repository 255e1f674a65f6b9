"""A few elements of parameters, by which a write to them is noticed that no version counter counts:
through `.data`, or by a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from deepspeed.accelerator import runs_ahead
from deepspeed.runtime.streams import LateNumber

# Elements of each parameter that are looked at: the first, the last, and between.
_NUM_PLACES = 4
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ValueSample:
    """A few elements of each of several parameters in one piece of memory.

    Args:
        memory: Returns that memory, 1-D; it may be replaced by another of the same size.
        parts: Where each parameter lies in it: its start and number of elements.
    """

    def __init__(
        self, memory: Callable[[], torch.Tensor], parts: Iterable[tuple[int, int]]
    ) -> None:
        self._memory = memory
        bytes_each = memory().element_size()
        self._bits = _BITS[min(bytes_each, 8)]
        words = max(bytes_each // 8, 1)  # of complex numbers two
        self._rows: list[slice] = []
        self._owners: list[int] = []
        places: list[int] = []
        for index, (start, numel) in enumerate(parts):
            last = numel - 1
            own = sorted({last * place // (_NUM_PLACES - 1) for place in range(_NUM_PLACES)})
            row = [words * (start + place) + word for place in own for word in range(words)]
            row = row if last >= 0 else []
            self._rows.append(slice(len(places), len(places) + len(row)))
            self._owners += [index] * len(row)
            places += row
        self._places = torch.tensor(places, dtype=torch.int64, device=memory().device)
        self._kept = self._now()
        self._late: LateNumber | None = None  # what was compared at the last step, on a device
        self._is_posted = False

    def _now(self) -> torch.Tensor:
        memory = self._memory().detach()
        # Bits, since NaN is not equal to itself.
        return memory.view(self._bits).index_select(0, self._places)

    def note(self, indices: Iterable[int]) -> None:
        """Remember the elements of some parameters, which were written to on purpose."""
        now = self._now()
        for index in indices:
            self._kept[self._rows[index]] = now[self._rows[index]]

    def note_all(self) -> None:
        """Remember the elements of all parameters."""
        self._kept = self._now()

    @property
    def is_late(self) -> bool:
        """Whether the host runs ahead of the device, and would wait for the elements."""
        return runs_ahead(self._memory())

    def changed(self) -> list[int]:
        """List the parameters that have been written to. Where the host runs ahead of the device it
        learns one call later, so that it waits for nothing.
        """
        if not self.is_late:
            return self.changed_now()
        before = self.changed_before()
        self._late = LateNumber() if self._late is None else self._late
        self._late.post(self._now() != self._kept)
        self._is_posted = True
        return before

    def changed_now(self) -> list[int]:
        """List those that have been written to; the host waits for the elements."""
        now = self._now()
        return [] if torch.equal(now, self._kept) else self._named((now != self._kept).tolist())

    def changed_before(self) -> list[int]:
        """List those that had been written to at the last call of `changed`, if the host has not
        learned of them.
        """
        if self._late is None or not self._is_posted:
            return []
        self._is_posted = False
        return self._named(self._late.read_list())

    def _named(self, differs: Sequence[float]) -> list[int]:
        if not any(differs):
            return []
        pairs = zip(self._owners, differs, strict=True)
        return list(dict.fromkeys(index for index, is_other in pairs if is_other))
