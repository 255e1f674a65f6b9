"""From the reports of all ranks to findings: pieces are sorted into families that have the same
contributors, and explained there. Pure, and alike on all ranks. Stages hold other parameters than
each other, ranks other experts; which pieces are the same is told by name and place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from deepspeed.runtime.gradients.ledger.findings import Family, LedgerFinding, RankRecord, explain


class PieceKey(NamedTuple):
    """A piece, by name."""

    name: str
    start: int
    numel: int


@dataclass
class RankReport:
    """What one rank tells all others after a deviation: for each of its pieces (`keys`), the global
    ranks that hold it in this part of the model, and one rank of each part that shares it; `absent`
    are backwards that never came, in words.
    """

    record: RankRecord
    keys: list[PieceKey]
    holders: list[tuple[int, ...]]
    sharers: list[tuple[int, ...]]
    absent: list[str]


class _Place(NamedTuple):
    """Where a piece's contributors are: a tuple of ranks for each part of the model that has it."""

    parts: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for part in self.parts for rank in part))


def explain_all(reports: dict[int, RankReport], num_replicas: int) -> list[LedgerFinding]:
    """Find from the reports by global rank what explains deviations and missing backwards."""
    findings = _absent(reports)
    index = {rank: {key: row for row, key in enumerate(own.keys)} for rank, own in reports.items()}
    families: dict[_Place, dict[PieceKey, None]] = {}
    for report in reports.values():
        for position in report.record.wrong:
            row = report.record.held[position]
            families.setdefault(_place(report, row, reports, index), {})[report.keys[row]] = None
    for place, keys in families.items():
        findings += _explain_family(place, list(keys), reports, index, num_replicas)
    return _merged(findings)


def _place(
    report: RankReport,
    row: int,
    reports: dict[int, RankReport],
    index: dict[int, dict[PieceKey, int]],
) -> _Place:
    key = report.keys[row]
    if not report.sharers[row]:
        return _Place((report.holders[row],))
    return _Place(tuple(reports[rank].holders[index[rank][key]] for rank in report.sharers[row]))


def _explain_family(
    place: _Place,
    keys: list[PieceKey],
    reports: dict[int, RankReport],
    index: dict[int, dict[PieceKey, int]],
    num_replicas: int,
) -> list[LedgerFinding]:
    ranks = place.ranks
    records = [_restricted(reports[one].record, [index[one][key] for key in keys]) for one in ranks]
    parts = tuple(
        tuple(ranks.index(other) for other in part)
        for rank in ranks
        for part in place.parts
        if rank in part
    )
    strangers = [
        _restricted(reports[one].record, [rows[key] for key in keys])
        for one, rows in index.items()
        if one not in ranks and all(key in rows for key in keys)
    ]
    sums = [record.contributions.sum(0) for record in (*records, *strangers)]
    family = Family(ranks, parts, num_replicas, torch.stack(sums).sum(0) if strangers else None)
    return explain(records, [key.name for key in keys], family)


def _restricted(record: RankRecord, rows: Sequence[int]) -> RankRecord:
    positions = {row: position for position, row in enumerate(record.held)}
    held = [number for number, row in enumerate(rows) if row in positions]
    of_held = [positions[rows[number]] for number in held]
    wrong = set(record.wrong)
    return replace(
        record,
        contributions=record.contributions[:, rows],
        late=record.late[rows],
        held=held,
        found=record.found[of_held],
        before=None if record.before is None else record.before[of_held],
        tolerance=record.tolerance[of_held],
        wrong=[number for number, position in enumerate(of_held) if position in wrong],
    )


def _absent(reports: dict[int, RankReport]) -> list[LedgerFinding]:
    texts = dict.fromkeys(text for report in reports.values() for text in report.absent)
    found = []
    for text in texts:
        ranks = [rank for rank, report in reports.items() if text in report.absent]
        names = tuple(dict.fromkeys(key.name for rank in ranks for key in reports[rank].keys))
        found.append(LedgerFinding("lost", f"{text} on rank(s) {ranks}", names))
    return found


def _merged(findings: Sequence[LedgerFinding]) -> list[LedgerFinding]:
    """Join what reads the same in every family; the one with most parameters comes first."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for finding in findings:
        names.setdefault((finding.kind, finding.text), {}).update(dict.fromkeys(finding.parameters))
    merged = [LedgerFinding(kind, text, tuple(own)) for (kind, text), own in names.items()]
    return sorted(merged, key=lambda finding: -len(finding.parameters))
