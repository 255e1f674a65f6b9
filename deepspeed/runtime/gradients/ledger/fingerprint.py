"""A linear fingerprint of a gradient: a few numbers that add up as gradients do.

[Note: fingerprint]
Element i of a parameter goes into component i mod DIMS with a fixed pseudo-random sign (a count
sketch). Therefore

1. it is linear: what is summed, scaled and cut into fragments on the way to the optimizer does the
   same to the fingerprints, and the fingerprints of a parameter's fragments, each taken at its
   offset, add up to the parameter's;
2. E|fingerprint(x)|^2 = |x|^2 over the signs, with a relative standard deviation of at most sqrt(2
   / DIMS) = 0.35 for an x that is spread out. A rounding error does not know the signs: its
   fingerprint is about as long as itself, and longer than SLACK = 3 times that with a probability
   below 2 exp(-SLACK^2 / 2) = 2 % even if all of it lies in one component; the bounds that the
   ledger multiplies by SLACK are worst cases that real errors stay below by another factor of about
   three, which makes that exp(-40);
3. parameters of at most DIMS elements are fingerprinted exactly.

The sign of element i is rows[i // WIDTH] * columns[i % WIDTH], so one matrix-vector product reads
the gradient once and makes no copy of it. Sums are fp32 whatever the gradient's dtype. Pure
arithmetic: knows nothing of ranks, hooks or optimizers.
"""

from __future__ import annotations

import math

import torch

DIMS = 16
WIDTH = 1024
SLACK = 3.0
SEED = 20
# A half-precision gradient is widened this many rows at a time (16 MiB), not as a whole.
ROWS_AT_ONCE = 4096
FP32_ROUNDOFF = 2.0**-24


def fingerprint_roundoff(numel: int) -> float:
    """Relative error of a fingerprint of `numel` elements: fp32 sums, errors that look random."""
    return FP32_ROUNDOFF * 2.0 * (math.sqrt(numel / WIDTH) + math.sqrt(WIDTH / DIMS) + 2.0)


class Fingerprint:
    """The fixed signs on one device, for parameters of at most `max_numel` elements."""

    def __init__(self, device: torch.device, max_numel: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        signs = torch.randint(2, (WIDTH,), generator=generator).mul_(2).sub_(1).float()
        # Rows have a generator of their own: a longer parameter continues the signs of a shorter
        # one, on every rank.
        rows = (
            torch.randint(
                2, (-(-max_numel // WIDTH) + 1,), generator=generator.manual_seed(SEED + 1)
            )
            .mul_(2)
            .sub_(1)
            .float()
        )
        columns = torch.zeros(DIMS, WIDTH)
        columns[torch.arange(WIDTH) % DIMS, torch.arange(WIDTH)] = signs
        self._row_signs: list[float] = rows.tolist()
        self._rows = rows.to(device)
        self._columns = columns.to(device)  # [DIMS, WIDTH]

    @torch.no_grad()
    def of(self, flat: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The fingerprint (fp32, `[DIMS]`) of consecutive elements of a parameter from `start`."""
        device_type = flat.device.type
        if torch.is_autocast_enabled(device_type):
            # A backward inside an autocast block would multiply in half precision.
            with torch.autocast(device_type, enabled=False):
                return self._of(flat, start)
        return self._of(flat, start)

    def _of(self, flat: torch.Tensor, start: int) -> torch.Tensor:
        row, column = divmod(start, WIDTH)
        head = min(flat.numel(), WIDTH - column)
        total = self._part_of_row(flat[:head], row, column)
        position = head
        row += 1
        while flat.numel() - position >= WIDTH:
            num_rows = min((flat.numel() - position) // WIDTH, ROWS_AT_ONCE)
            block = flat[position : position + num_rows * WIDTH].view(num_rows, WIDTH).float()
            sums = torch.mv(block.t(), self._rows[row : row + num_rows])
            total = total + torch.mv(self._columns, sums)
            position += num_rows * WIDTH
            row += num_rows
        if position < flat.numel():
            total = total + self._part_of_row(flat[position:], row, 0)
        return total

    def _part_of_row(self, part: torch.Tensor, row: int, column: int) -> torch.Tensor:
        product = torch.mv(self._columns[:, column : column + part.numel()], part.float())
        return product if self._row_signs[row] > 0 else -product
