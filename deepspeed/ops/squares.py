"""Sums of squares: as fast as they go, or the same bits in any order and cut."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed.accelerator import runs_ahead

# Elements of which torch takes one norm on the host. It sums the squares of all that it is given in
# a few fp32 numbers there, which lose 0.5 % of the norm of 2**26 elements.
HOST_PIECE = 1 << 14


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
        yield _norm(flat[:whole].view(-1, HOST_PIECE), dim=1)
        tensor = flat[whole:]
    if tensor.numel():
        yield _norm(tensor).view(1)


def _norm(tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    # dtype=float32: half-precision inputs would otherwise square and sum in their own dtype.
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, 2, dim, dtype=torch.float32)
    return norm


# Exponents of two between the bins of `ExactSquares`, of which the first holds all of fp32's
# squares (below 2^256) and the 26th the smallest one (2^-298).
BIN_BITS = 22
HIGHEST = 256
# Bins that an element is divided among, from that of the largest: what is below that by 2^66 does
# not count, and 2^30 such remainders are below 2^-36 of the largest.
BINS_KEPT = 4
NUM_BINS = 26 + BINS_KEPT - 1
# Elements of what is made at a time: on the host it stays in the cache.
HOST_SQUARES, DEVICE_SQUARES = 1 << 15, 1 << 24


class ExactSquares(Squares):
    """Adds squares of fp32 gradients so that no order and no cut of the elements shows.

    Every square, exact in fp64, is divided into multiples of fixed powers of two, whose sums are
    exact up to 2^31 elements (pre-rounded summation: Demmel and Nguyen, "Parallel Reproducible
    Summation", IEEE TC 64(7), 2015, with bins of absolute exponents).
    """

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(count, NUM_BINS, dtype=torch.float64, device=device)

    def of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        device = tensors[0].device
        bins = self.zeros(1, device)[0]
        size = HOST_SQUARES if device.type == "cpu" else DEVICE_SQUARES
        for tensor in tensors:
            for chunk in torch.split(tensor, size):
                _divide(chunk.double().square_(), bins)
        return bins

    def totals(self, squares: torch.Tensor) -> torch.Tensor:
        # Some rank has left out what is further from the largest.
        first = (squares != 0).to(torch.int8).argmax(dim=1, keepdim=True)
        places = torch.arange(NUM_BINS, device=squares.device)
        counted = torch.where(places < first + BINS_KEPT, squares, 0.0)
        total = torch.zeros_like(squares[:, 0])
        for place in reversed(range(NUM_BINS)):  # in one order, whatever torch.sum does
            total += counted[:, place]
        return total.float()


def _divide(squares: torch.Tensor, bins: torch.Tensor) -> None:
    """Add every element to `bins`. What is not finite makes them NaN. No value is looked at."""
    # The bin whose unit the largest is a multiple of, 2^22 times at most.
    exponent = torch.frexp(squares.max()).exponent
    first = ((HIGHEST - exponent) // BIN_BITS).clamp_(0, NUM_BINS - BINS_KEPT)
    for place in range(BINS_KEPT):
        unit = HIGHEST - BIN_BITS * (first + place + 1)
        big = torch.ldexp(squares.new_full((), 1.5), unit + 52)
        part = (squares + big).sub_(big)  # rounded to a multiple of 2^unit
        bins.index_add_(0, (first + place).view(1), part.sum().view(1))
        squares -= part


IN_ORDER = Squares()
