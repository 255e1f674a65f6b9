"""Sums of squares: as fast as they go, or the same bits in any order and cut."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed.accelerator import runs_ahead
from deepspeed.ops.native import native_op

# Elements of which torch takes one norm on the host. It sums the squares of all that it is given in
# a few fp32 numbers there, which lose 0.5 % of the norm of 2**26 elements.
HOST_PIECE = 1 << 14
# Elements of which it takes such norms at once: it makes fp32 of all half-precision ones first.
HOST_NORMED = 1 << 20


class Squares:
    """How squares are added: fp32, in the order of elements and ranks."""

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        """Sums of nothing, as they are reduced: one of each parameter group."""
        return torch.zeros(count, dtype=torch.float32, device=device)

    def of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Sum the squares of the elements of tensors on one device: a row of `zeros`."""
        norms = torch.cat([norm for tensor in tensors for norm in _norms(tensor)])
        return norms.square_().sum()

    def totals(self, squares: torch.Tensor) -> torch.Tensor:
        """The sums, fp32, one of each row."""
        return squares


def _norms(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Norms of pieces of a tensor, in tensors of one dimension."""
    whole = tensor.numel() // HOST_PIECE * HOST_PIECE
    if whole and not runs_ahead(tensor) and tensor.is_contiguous():
        flat = tensor.view(-1)
        for part in flat[:whole].split(whole if tensor.dtype == torch.float32 else HOST_NORMED):
            yield _norm(part.view(-1, HOST_PIECE), dim=1)
        tensor = flat[whole:]
    if tensor.numel():
        yield _norm(tensor).view(1)


def _norm(tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    # dtype=float32: half-precision inputs would otherwise square and sum in their own dtype.
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, 2, dim, dtype=torch.float32)
    return norm


# A row of `ExactSquares`: 15 bins, each 2^40 times as fine as the one before. The first one holds
# all of fp32's squares (below 2^256), the 14th the smallest one (2^-298).
HIGHEST, BIN_BITS, NUM_BINS = 256, 40, 15
# Bins that an element is divided among, from that of the largest. What is below the largest by 2^41
# does not count: 2^24 such elements come to 2^-17 of it.
BINS_KEPT = 2
# A bin is three sums, in steps of 2^20, whose multiples are exact to 2^40 elements and more.
CELLS, CELL_BITS = 3, 20
MANTISSA_BITS, EXPONENT_BIAS, EXPONENT_MASK = 52, 1023, 2047  # of fp64
# Elements of which one sum is taken before it is cut into those: exact in fp64.
ROW = 1 << 12
# Elements of what is made at a time: on the host it stays in the cache.
HOST_SQUARES, DEVICE_SQUARES = 1 << 15, 1 << 24


class ExactSquares(Squares):
    """Adds squares of fp32 gradients so that no order and no cut of the elements shows.

    Every square, exact in fp64, is divided into multiples of fixed powers of two, whose sums are
    exact (pre-rounded summation: Demmel and Nguyen, "Parallel Reproducible Summation", IEEE TC
    64(7), 2015, with bins of absolute exponents). On the host a native op does it, with equal bits.
    """

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(count, NUM_BINS * CELLS, dtype=torch.float64, device=device)

    def of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        cells = self.zeros(1, tensors[0].device)[0]
        on_host = tensors[0].is_cpu and not runs_ahead(tensors[0])
        op = native_op("cpu_squares", "torch sums squares") if on_host else None
        if op is None:
            for rows in _rows(tensors, HOST_SQUARES if on_host else DEVICE_SQUARES):
                _add(rows, cells)
            return cells
        for tensor in tensors:
            values = tensor.float().contiguous()  # itself, mostly
            op.add(torch.get_num_threads(), values.numel(), values.data_ptr(), cells.data_ptr())
        return cells

    def totals(self, squares: torch.Tensor) -> torch.Tensor:
        # Some rank has left out what is further from the largest.
        used = (squares != 0).view(-1, NUM_BINS, CELLS).any(dim=2)
        first = used.to(torch.int8).argmax(dim=1, keepdim=True).clamp_(max=NUM_BINS - BINS_KEPT)
        places = torch.arange(BINS_KEPT * CELLS, device=squares.device)
        parts = squares.gather(1, first * CELLS + places)
        total = parts[:, -1]
        for place in reversed(range(BINS_KEPT * CELLS - 1)):  # in one order, unlike torch.sum
            total = total + parts[:, place]
        return total.float()


def _rows(tensors: list[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """Copies of all elements in fp64, then zeros, in the shape `[rows, ROW]`."""
    pieces = [piece for tensor in tensors for piece in torch.split(tensor.reshape(-1), size)]
    while pieces:
        count = pieces[0].numel()
        together = 1
        while together < len(pieces) and count + pieces[together].numel() <= size:
            count += pieces[together].numel()
            together += 1
        rows = torch.zeros(-(-count // ROW), ROW, dtype=torch.float64, device=pieces[0].device)
        start = 0
        for piece in pieces[:together]:
            rows.view(-1)[start : start + piece.numel()].copy_(piece)
            start += piece.numel()
        pieces = pieces[together:]
        yield rows


def _add(values: torch.Tensor, cells: torch.Tensor) -> None:
    """Add the squares of `values`, which are overwritten. What is not finite makes the first cell
    NaN, which `totals` always reads. No value is looked at.
    """
    rest = values.square_()
    # The bin whose unit the largest is a multiple of, 2^40 times at most.
    # Of what is not finite it is 1025, whatever the sign, and the first bin is taken.
    bits = rest.amax(dim=1).view(torch.int64)
    exponent = (bits >> MANTISSA_BITS & EXPONENT_MASK) - EXPONENT_BIAS + 1
    first = ((HIGHEST - exponent) // BIN_BITS).clamp_(0, NUM_BINS - BINS_KEPT)
    bins = torch.stack([first, first + 1])
    units = HIGHEST - BIN_BITS * (bins + 1)
    big = _rounding_to(units).unsqueeze(2)
    sums = []
    for place in range(BINS_KEPT):
        part = (rest + big[place]).sub_(big[place])
        sums.append(part.sum(dim=1))
        rest = rest.sub_(part)
    left = torch.stack(sums)
    parts = []
    for cell in range(CELLS - 1):
        big = _rounding_to(units + CELL_BITS * (CELLS - 1 - cell))
        parts.append((left + big).sub_(big))
        left = left - parts[-1]
    found = torch.stack([*parts, left])
    places = CELLS * bins + torch.arange(CELLS, device=values.device).view(-1, 1, 1)
    cells.index_add_(0, places.view(-1), found.view(-1))


def _rounding_to(exponents: torch.Tensor) -> torch.Tensor:
    """What rounds to multiples of 2^exponents when it is added and taken away."""
    # torch.ldexp and torch.pow take powers of two in fp32.
    return ((exponents + (52 + EXPONENT_BIAS)) << MANTISSA_BITS).view(torch.float64) * 1.5


IN_ORDER = Squares()
