"""Whether a script has undone what it changed, up to rounding: `w += d; w -= d`.

[Note: what rounding leaves]
Of a sum that is taken back only before and after are known, not the value in between. Each of the
two roundings is off by at most eps / 2 of what it rounds, so an element is off by at most
eps * max(|w|, |w + d|). What the latter was nobody can tell, but it is no larger than a few times
the elements around it if d is of the size of the parameter, as what adapters add is. So what is
left may be, of k units,

    |after - before|  <=  k * eps * (2 * size + 4 * rms)      in every element
    norm of it        <=  k * eps * rms * (sqrt(n) + 2)       over all n elements

where `size` is the larger of the two absolute values and `rms` the root of the mean of its squares.
The second holds because roundings go up as often as down: of a d that is 3 * k times as large as w
they stay below it. It is what tells a small change of all elements from rounding. bf16 has so few
digits that k cannot be large there: what changes all elements by 2% is to be noticed.
"""

from __future__ import annotations

import math

import torch

# k, by dtype.
_UNITS = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 16, torch.float64: 16}
# Elements that are compared at a time, which bounds the memory that it takes.
PIECE_NUMEL = 1 << 22


@torch.no_grad()
def is_undone(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether `after` differs from `before` at most by rounding; NaN is where it was."""
    if before.dtype != after.dtype or before.numel() != after.numel():
        return False
    if before.is_complex():
        before, after = torch.view_as_real(before), torch.view_as_real(after)
    if before.dtype not in _UNITS:
        return torch.equal(before.reshape(-1), after.reshape(-1))
    pieces = (tensor.reshape(-1).split(PIECE_NUMEL) for tensor in (before, after))
    return all(_is_rounding(*pair) for pair in zip(*pieces, strict=True) if pair[0].numel())


def _is_rounding(before: torch.Tensor, after: torch.Tensor) -> bool:
    unit, numel = _UNITS[before.dtype] * torch.finfo(before.dtype).eps, before.numel()
    exact = torch.promote_types(before.dtype, torch.float32)
    before, after = before.to(exact), after.to(exact)
    is_same = (before == after) | (before.isnan() & after.isnan())
    change = torch.where(is_same, 0, after - before).abs_()
    size = torch.maximum(before.abs(), after.abs()).nan_to_num_(0, 0, 0)
    rms = torch.linalg.vector_norm(size) / math.sqrt(numel)
    is_small = (change <= unit * (2 * size + 4 * rms)).all()
    norm = torch.linalg.vector_norm(change)
    return bool(is_small & (norm <= unit * rms * (math.sqrt(numel) + 2)))
