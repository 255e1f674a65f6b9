"""A few elements of parameters that stay whole, by which a write to them is noticed that no version
counter counts: through `.data` that was taken in a forward, or by a collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed.accelerator import runs_ahead
from deepspeed.runtime.streams import LateNumber

# Elements of each parameter that are looked at: the first, the last, and between.
_NUM_PLACES = 4


class ValueSample:
    """A few elements of each of several parameters in one piece of memory.

    Args:
        memory: 1-D.
        parts: The parameters, each a view of it.
    """

    def __init__(self, memory: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        self._memory = memory
        self._rows: list[slice] = []
        places: list[int] = []
        for part in parts:
            start = int(part.storage_offset() - memory.storage_offset())
            last = part.numel() - 1
            own = sorted({last * place // (_NUM_PLACES - 1) for place in range(_NUM_PLACES)})
            row = [start + place for place in own] if last >= 0 else []
            self._rows.append(slice(len(places), len(places) + len(row)))
            places += row
        self._places = torch.tensor(places, dtype=torch.int64, device=memory.device)
        self._kept = self._now()
        self._late: LateNumber | None = None  # what was compared at the last step, on a device

    def _now(self) -> torch.Tensor:
        """The elements' bytes, since NaN is not equal to itself: one row for each."""
        elements = self._memory[self._places]
        return elements.view(torch.uint8).view(len(elements), elements.element_size())

    def note(self, index: int) -> None:
        """Remember the elements of one parameter, which was written to on purpose."""
        row = self._rows[index]
        self._kept[row] = self._now()[row]

    def note_all(self) -> None:
        """Remember the elements of all parameters."""
        self._kept = self._now()

    def changed(self) -> list[int]:
        """List the parameters that have been written to. Where the host runs ahead of the device it
        learns one call later, so that it waits for nothing.
        """
        differs = (self._now() != self._kept).any(1)
        if not runs_ahead(self._memory):
            return self._named(differs.tolist())
        before = [] if self._late is None else self._named(self._late.read_list())
        self._late = self._late or LateNumber()
        self._late.post(differs)
        return before

    def _named(self, differs: Sequence[float]) -> list[int]:
        return [index for index, row in enumerate(self._rows) if any(differs[row])]
