"""A narrow flat buffer in the memory of a wide one: gradients arrive in the model's dtype and are
used in the masters', and never take the memory of both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Of the wide buffer: what lies last in it is converted through memory of its own, because there
# the two overlap in every piece.
TAIL_NUMEL = 1 << 15
# The narrow buffer starts at a multiple of this many bytes, as collectives like it.
START_ALIGNMENT = 16


class Overlay:
    """Two flat buffers of as many elements in one piece of memory, of which one is valid; at first
    the narrow one, with zeros.

    The narrow one lies at the end. Element by element from the start, a wide element never reaches
    a narrow one that has not been read; a piece may therefore be as long as the distance between
    the two, which halves from piece to piece: about `log2(numel)` copies convert everything.
    """

    def __init__(
        self, numel: int, narrow_dtype: torch.dtype, wide_dtype: torch.dtype, device: torch.device
    ) -> None:
        memory = torch.zeros(
            -(-numel // START_ALIGNMENT) * START_ALIGNMENT, dtype=wide_dtype, device=device
        )
        self.wide = memory[:numel]
        self.narrow = memory.view(narrow_dtype)[-memory.numel() :][:numel]
        self._wide_bytes, self._narrow_bytes = wide_dtype.itemsize, narrow_dtype.itemsize
        self._capacity = memory.numel()

    def _pieces(self) -> Iterator[slice]:
        """From the start, ranges of elements whose places in the two buffers don't touch."""
        numel, done = self.wide.numel(), 0
        if self._wide_bytes == self._narrow_bytes:
            return
        apart = self._capacity * (self._wide_bytes - self._narrow_bytes)
        while numel - done > TAIL_NUMEL:
            end = min(numel, (apart + self._narrow_bytes * done) // self._wide_bytes)
            yield slice(done, end)
            done = end
        yield slice(done, numel)

    @torch.no_grad()
    def widen(self) -> None:
        """Make the wide buffer the valid one, with the values of the narrow one."""
        for piece in self._pieces():
            self._copy(self.wide[piece], self.narrow[piece])

    @torch.no_grad()
    def narrow_again(self) -> None:
        """Make the narrow buffer the valid one, with the values of the wide one."""
        for piece in reversed(list(self._pieces())):
            self._copy(self.narrow[piece], self.wide[piece])

    @staticmethod
    def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source.clone() if source.numel() <= TAIL_NUMEL else source)
