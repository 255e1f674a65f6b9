"""Why a gradient is not what it ought to be: which error of synchronization turns the right one
into the one found.

Pure: works on the fingerprints that all ranks have exchanged, and gives the same answer on all of
them. Every known error predicts what would have arrived; the prediction that explains most
parameters is the finding, and the rest is explained again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

NAMES_SHOWN = 10
# Below so many ranks every subset is tried as the group that a gradient was reduced over; above,
# blocks and strides.
MAX_RANKS_FOR_SUBSETS = 8


@dataclass(frozen=True)
class LedgerFinding:
    """One error and the parameters that it explains.

    Attributes:
        kind: "lost", "doubled", "late", "group", "divisor", "stale" or "unexplained".
        text: What happened, in words.
        parameters: Names, in model order.
    """

    kind: str
    text: str
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.parameters[:NAMES_SHOWN])
        hidden = len(self.parameters) - NAMES_SHOWN
        more = f" and {hidden} more" if hidden > 0 else ""
        return f"{self.kind}: {self.text}; {len(self.parameters)} parameter(s): {shown}{more}"


@dataclass
class RankRecord:
    """What one rank knows, on the host; `U` pieces of parameters, `A` micro-batches.

    Attributes:
        contributions: Fingerprints of this rank's contributions with their right weight, so that
            the right gradient is the sum over ranks and micro-batches; shape `[A, U, DIMS]`.
        late: Of these, what came after its bucket was sealed and was not sent again; shape `[U,
            DIMS]`.
        held: Pieces whose reduced gradient this rank holds.
        found: Their fingerprints as the optimizer is about to use them; shape `[len(held), DIMS]`.
        before: The same at the previous step; None at the first.
        tolerance: Allowed length of the difference; shape `[len(held)]`.
        wrong: Positions in `held` that deviate.
    """

    contributions: torch.Tensor
    late: torch.Tensor
    held: list[int]
    found: torch.Tensor
    before: torch.Tensor | None
    tolerance: torch.Tensor
    wrong: list[int]


@dataclass(frozen=True)
class Family:
    """Whom a set of records comes from: everybody who contributes to some pieces. `parts` are for
    each record the positions of those that hold the same part of the model; `num_replicas` is N of
    the definition; `everybody` what the ranks of the world contribute to pieces of these names, if
    that is not the same.
    """

    ranks: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    num_replicas: int
    everybody: torch.Tensor | None = None

    @staticmethod
    def of_replicas(num_ranks: int) -> Family:
        everyone = tuple(range(num_ranks))
        return Family(everyone, (everyone,) * num_ranks, num_ranks)


class Hypothesis(NamedTuple):
    """An error: its kind, its text, and what it would make of one holder's wrong pieces."""

    kind: str
    text: str
    predicted: torch.Tensor


class _Holder:
    """The wrong pieces of one rank, with everybody's contributions to them."""

    def __init__(
        self, records: Sequence[RankRecord], rank: int, num_micro: int, family: Family
    ) -> None:
        record = records[rank]
        self.rank = rank
        self.family = family
        self.num_ranks = len(records)
        self.num_micro = num_micro
        self.pieces = [record.held[position] for position in record.wrong]
        self.found = record.found[record.wrong]
        self.before = None if record.before is None else record.before[record.wrong]
        self.tolerance = record.tolerance[record.wrong]
        self.parts = torch.stack(
            [_padded(other.contributions, num_micro)[:, self.pieces] for other in records]
        )  # [N, A, wrong, DIMS]
        self.late = torch.stack([other.late[self.pieces] for other in records])  # [N, wrong, DIMS]
        self.right = self.parts.sum((0, 1))
        self.everybody = None if family.everybody is None else family.everybody[self.pieces]

    def hypotheses(self) -> Iterator[Hypothesis]:
        yield from self._late()
        yield from self._one_contribution()
        yield from self._whole_micro_batches()
        yield from self._whole_ranks()
        yield from self._shared()
        yield from self._groups()
        yield from self._stale()
        yield from self._divisors()

    def _names(self, positions: Iterable[int]) -> str:
        return str([self.family.ranks[position] for position in positions])

    def _micro(self, micro: int) -> str:
        return f"micro-batch {micro + 1} of {self.num_micro}"

    def _late(self) -> Iterator[Hypothesis]:
        for rank in range(self.num_ranks):
            if self.late[rank].count_nonzero():
                text = (
                    f"a contribution of rank {self.family.ranks[rank]} came after its bucket had "
                    "been sealed and was never sent"
                )
                yield Hypothesis("late", text, self.right - self.late[rank])
        if self.late.count_nonzero():
            text = (
                "contributions of several ranks came after their bucket had been sealed and were "
                "never sent"
            )
            yield Hypothesis("late", text, self.right - self.late.sum(0))

    def _one_contribution(self) -> Iterator[Hypothesis]:
        if self.num_ranks == 1:
            # One rank is every rank then, and reads the same for parameters with more holders.
            return
        for rank, micro in itertools.product(range(self.num_ranks), range(self.num_micro)):
            what = f"rank {self.family.ranks[rank]}, {self._micro(micro)}"
            yield Hypothesis("lost", f"{what} never arrived", self.right - self.parts[rank, micro])
            yield Hypothesis(
                "doubled", f"{what} was counted twice", self.right + self.parts[rank, micro]
            )

    def _whole_micro_batches(self) -> Iterator[Hypothesis]:
        for micro in range(self.num_micro):
            of_all, own = self.parts[:, micro].sum(0), self.parts[self.rank, micro]
            what = f"{self._micro(micro)} of every rank"
            yield Hypothesis("lost", f"{what} never arrived", self.right - of_all)
            yield Hypothesis("doubled", f"{what} was counted twice", self.right + of_all)
            if self.num_micro == 1:
                continue  # then there is nothing else, and the rest is what `_groups` says
            yield Hypothesis("lost", f"everything but {what} never arrived", of_all)
            text = (
                f"{self._micro(micro)} was added after the reduction: each rank has its own "
                "instead of the mean over ranks"
            )
            yield Hypothesis("lost", text, self.right - of_all + own * self.num_ranks)
            yield Hypothesis(
                "lost", f"{text}, divided by the number of ranks", self.right - of_all + own
            )

    def _whole_ranks(self) -> Iterator[Hypothesis]:
        if self.num_ranks == 1:
            return
        for rank in range(self.num_ranks):
            own, name = self.parts[rank].sum(0), f"rank {self.family.ranks[rank]}"
            yield Hypothesis("lost", f"{name}, all micro-batches, never arrived", self.right - own)
            yield Hypothesis(
                "doubled", f"{name}, all micro-batches, was counted twice", self.right + own
            )
            for first in range(1, self.num_micro - 1):
                text = (
                    f"{name}, all from micro-batch {first + 1} of {self.num_micro} on, never "
                    "arrived"
                )
                yield Hypothesis("lost", text, self.right - self.parts[rank, first:].sum(0))

    def _shared(self) -> Iterator[Hypothesis]:
        """Errors of parameters shared by parts of the model, or of which ranks have others."""
        own = list(self.family.parts[self.rank])
        if len(own) < self.num_ranks:
            of_part = self.parts[own].sum((0, 1))
            text = "not summed over the parts of the model that share it: each has its own"
            yield Hypothesis("group", text, of_part)
            yield Hypothesis(
                "doubled",
                "summed over the parts of the model that share it twice",
                self.right * len(set(self.family.parts)),
            )
        if self.everybody is not None:
            ranks = self._names(range(self.num_ranks))
            text = (
                "reduced together with other ranks' parameters of the same name, not over ranks "
                f"{ranks} alone"
            )
            yield Hypothesis("group", text, self.everybody)

    def _groups(self) -> Iterator[Hypothesis]:
        everyone, replicas = self._names(range(self.num_ranks)), self.family.num_replicas
        for group in _possible_groups(self.num_ranks, self.rank):
            total = self.parts[group].sum((0, 1))
            named = self._names(group)
            text = (
                f"averaged over ranks {named} instead of {everyone}"
                if len(group) > 1
                else "not reduced: each rank has its own"
            )
            yield Hypothesis("group", text, total * (self.num_ranks / len(group)))
            text = f"summed over ranks {named} instead of {everyone}, and divided by {replicas}"
            yield Hypothesis("group", text, total)

    def _stale(self) -> Iterator[Hypothesis]:
        if self.before is not None and self.before.count_nonzero():
            yield Hypothesis(
                "stale", "the gradient of the previous step is used again", self.before
            )
            yield Hypothesis(
                "stale",
                "the gradient of the previous step was added to this one's",
                self.right + self.before,
            )

    def _divisors(self) -> Iterator[Hypothesis]:
        ranks, micro, held = (
            float(self.family.num_replicas),
            float(self.num_micro),
            float(len(self.family.parts[self.rank])),
        )
        named = {
            ranks / held: (
                f"divided by the number of ranks that hold it ({held:g}) instead of all whose "
                f"losses are averaged ({ranks:g})"
            ),
            1 / ranks: "divided by the number of ranks twice",
            ranks: "not divided by the number of ranks",
            1 / micro: "divided by the accumulation steps twice",
            micro: "not divided by the accumulation steps",
        }
        for factor, text in named.items():
            if factor != 1.0:
                yield Hypothesis(
                    "divisor", f"{text} (arrives times {factor:.6g})", self.right * factor
                )
        yield Hypothesis("lost", "nothing arrived: the gradient is zero", self.right * 0.0)
        sizes = self.right.square().sum(1)
        largest = int(sizes.argmax())
        if sizes[largest] > 0:
            factor = float((self.found[largest] * self.right[largest]).sum() / sizes[largest])
            text = (
                f"arrives times {factor:.6g}: its effective divisor is {1 / factor:.6g} times the "
                "right one"
                if factor
                else ""
            )
            if text:
                yield Hypothesis("divisor", text, self.right * factor)


def _padded(contributions: torch.Tensor, num_micro: int) -> torch.Tensor:
    """Add zeros for micro-batches that this rank did not have."""
    missing = num_micro - contributions.shape[0]
    if missing:
        return torch.nn.functional.pad(contributions, (0, 0, 0, 0, 0, missing))
    return contributions


def _possible_groups(num_ranks: int, rank: int) -> list[list[int]]:
    """Proper subsets of the ranks that contain `rank`, likely ones first."""
    groups: list[list[int]] = [[rank]]
    for size in range(2, num_ranks):
        first = rank // size * size
        groups.append(list(range(first, min(first + size, num_ranks))))
        groups.append(list(range(rank % size, num_ranks, size)))
    if num_ranks <= MAX_RANKS_FOR_SUBSETS:
        others = [other for other in range(num_ranks) if other != rank]
        for size in range(1, num_ranks - 1):
            groups += [sorted([rank, *chosen]) for chosen in itertools.combinations(others, size)]
    return [list(group) for group in dict.fromkeys(tuple(g) for g in groups if len(g) < num_ranks)]


class _Fit(NamedTuple):
    """How well one hypothesis explains one holder's wrong pieces."""

    explained: set[int]  # pieces
    error: float


def explain(
    records: Sequence[RankRecord], names: Sequence[str], family: Family | None = None
) -> list[LedgerFinding]:
    """Find what explains all pieces that deviate on some rank, the finding that explains most
    first.

    `records` are of everybody who contributes to the pieces, whose parameters are `names`; without
    a `family` they are of ranks 0, 1, ... that hold the same model.
    """
    family = family or Family.of_replicas(len(records))
    num_micro = max(1, max(record.contributions.shape[0] for record in records))
    holders = [
        _Holder(records, rank, num_micro, family) for rank, own in enumerate(records) if own.wrong
    ]
    open_pieces = {(holder.rank, piece) for holder in holders for piece in holder.pieces}
    # One error reads the same on every rank, whatever it does to the pieces there.
    fits: dict[tuple[str, str], list[tuple[int, _Fit]]] = {}
    for holder in holders:
        for hypothesis in holder.hypotheses():
            distance = (hypothesis.predicted - holder.found).norm(dim=1)
            fitting = (distance <= holder.tolerance).tolist()
            explained = {
                piece for piece, fits_here in zip(holder.pieces, fitting, strict=True) if fits_here
            }
            if explained:
                relative = (
                    (distance / holder.tolerance.clamp_min(1e-38)).clamp_max(1.0).sum().item()
                )
                fits.setdefault(hypothesis[:2], []).append((holder.rank, _Fit(explained, relative)))
    findings = []
    while open_pieces:
        best = _best(fits, open_pieces)
        if best is None:
            break
        explained_here = {
            (rank, piece) for rank, fit in fits[best] for piece in fit.explained
        } & open_pieces
        findings.append(_finding(*best, {piece for _, piece in explained_here}, names))
        open_pieces -= explained_here
    if open_pieces:
        findings.append(_unexplained(holders, open_pieces, names))
    return findings


def _best(
    fits: dict[tuple[str, str], list[tuple[int, _Fit]]], open_pieces: set[tuple[int, int]]
) -> tuple[str, str] | None:
    """The hypothesis that explains most, then that with the smallest error, then the simplest."""
    best, best_score = None, (0, 0.0)
    for key, by_rank in fits.items():
        count = sum((rank, one) in open_pieces for rank, fit in by_rank for one in fit.explained)
        # Errors within rounding of each other are no preference; the simpler hypothesis came first.
        score = (count, -round(sum(fit.error for _, fit in by_rank), 1))
        if count and (best is None or score > best_score):
            best, best_score = key, score
    return best


def _finding(kind: str, text: str, pieces: set[int], names: Sequence[str]) -> LedgerFinding:
    return LedgerFinding(kind, text, tuple(dict.fromkeys(names[piece] for piece in sorted(pieces))))


def _unexplained(
    holders: Sequence[_Holder], open_pieces: set[tuple[int, int]], names: Sequence[str]
) -> LedgerFinding:
    errors = [0.0]
    for holder in holders:
        off = (holder.found - holder.right).norm(dim=1) / holder.right.norm(dim=1)
        errors += [
            off[i].item()
            for i, piece in enumerate(holder.pieces)
            if (holder.rank, piece) in open_pieces
        ]
    finite = [error for error in errors if math.isfinite(error)]
    size = (
        f"by up to {max(finite):.3g} of its size"
        if len(finite) == len(errors)
        else "though the right one is zero or finite"
    )
    text = (
        f"the gradient differs from the right one {size}, not as one lost, doubled, late or "
        "misdivided contribution would (overwritten memory, a race, or several errors at once)"
    )
    return _finding("unexplained", text, {piece for _, piece in open_pieces}, names)
