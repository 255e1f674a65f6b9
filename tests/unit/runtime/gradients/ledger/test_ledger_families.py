"""How the reports of ranks that hold different parameters become findings.

Four ranks, two stages of two: "own" is a parameter of each stage, "tied" is shared by both;
"expert" has the same name on all, but ranks 0 and 2 hold another one than 1 and 3.
"""

from collections.abc import Callable

import torch

from deepspeed.runtime.gradients.ledger.families import PieceKey, RankReport, explain_all
from deepspeed.runtime.gradients.ledger.findings import LedgerFinding, RankRecord
from deepspeed.runtime.gradients.ledger.fingerprint import DIMS

STAGES = ((0, 1), (2, 3))
REPLICAS = 2
OWN, TIED, EXPERT = range(3)
TOLERANCE = 1e-3


class Scene:
    """What four ranks contributed to three pieces in two micro-batches, and what each found."""

    def __init__(self) -> None:
        self.parts = torch.randn(4, 2, 3, DIMS, generator=torch.Generator().manual_seed(1))
        self.right = torch.stack([self._right(rank) for rank in range(4)])  # [rank, piece, DIMS]
        self.found = self.right.clone()
        self.absent: list[list[str]] = [[], [], [], []]

    def _right(self, rank: int) -> torch.Tensor:
        sums = self.parts.sum(1)
        stage, same = STAGES[rank // 2], (rank % 2, rank % 2 + 2)
        return torch.stack(
            [sums[list(stage), OWN].sum(0), sums[:, TIED].sum(0), sums[list(same), EXPERT].sum(0)]
        )

    def explain(self) -> list[LedgerFinding]:
        reports = {}
        for rank in range(4):
            stage = rank // 2
            wrong = (
                ((self.found[rank] - self.right[rank]).norm(dim=1) > TOLERANCE)
                .nonzero()
                .flatten()
                .tolist()
            )
            record = RankRecord(
                self.parts[rank],
                torch.zeros(3, DIMS),
                [0, 1, 2],
                self.found[rank],
                None,
                torch.full((3,), TOLERANCE),
                wrong,
            )
            keys = [
                PieceKey(f"{stage}.own", 0, 5),
                PieceKey("tied", 0, 5),
                PieceKey("expert", 0, 5),
            ]
            holders = [STAGES[stage], STAGES[stage], (rank % 2, rank % 2 + 2)]
            sharers: list[tuple[int, ...]] = [(), (rank % 2, rank % 2 + 2), ()]
            reports[rank] = RankReport(record, keys, holders, sharers, self.absent[rank])
        return explain_all(reports, REPLICAS)


def found_for(plant: Callable[[Scene], None]) -> list[LedgerFinding]:
    scene = Scene()
    plant(scene)
    return scene.explain()


def only(findings: list[LedgerFinding]) -> LedgerFinding:
    assert len(findings) == 1, findings
    return findings[0]


def test_one_error_of_all_stages_is_one_finding() -> None:
    # Kills: a finding per stage, or per kind of parameter.
    def plant(scene: Scene) -> None:
        scene.found = scene.right * 7

    finding = only(found_for(plant))
    assert finding.kind == "divisor" and set(finding.parameters) == {
        "0.own",
        "1.own",
        "tied",
        "expert",
    }


def test_global_ranks_are_named() -> None:
    # Kills: places within the stage's group taken for ranks.
    def plant(scene: Scene) -> None:
        scene.found[2:, OWN] -= scene.parts[3, 1, OWN]

    finding = only(found_for(plant))
    assert (finding.kind, finding.parameters) == (
        "lost",
        ("1.own",),
    ) and "rank 3, micro-batch 2 of 2" in finding.text


def test_a_shared_parameter() -> None:
    # Kills: explaining a shared parameter by the contributions of one stage.
    def not_summed(scene: Scene) -> None:
        for rank in range(4):
            scene.found[rank, TIED] = scene.parts[list(STAGES[rank // 2]), :, TIED].sum((0, 1))

    def twice(scene: Scene) -> None:
        scene.found[:, TIED] *= 2

    for plant, text in ((not_summed, "not summed over the parts"), (twice, "that share it twice")):
        finding = only(found_for(plant))
        assert finding.parameters == ("tied",) and text in finding.text


def test_parameters_of_the_same_name() -> None:
    # Kills: other ranks' experts counted as contributions; not seeing that they were.
    def plant(scene: Scene) -> None:
        scene.found[:, EXPERT] = scene.parts[:, :, EXPERT].sum((0, 1))

    findings = found_for(plant)
    assert {finding.parameters for finding in findings} == {("expert",)}
    assert all(
        "reduced together with other ranks' parameters" in finding.text for finding in findings
    )


def test_what_never_ran() -> None:
    # Kills: a schedule's gap that is reported only where it changes a gradient; one finding per
    # rank.
    def plant(scene: Scene) -> None:
        for rank in STAGES[1]:
            scene.absent[rank].append("the backward of micro-batch 2 of 2 never ran")

    finding = only(found_for(plant))
    assert finding.kind == "lost" and finding.text.endswith("never ran on rank(s) [2, 3]")
    assert finding.parameters == ("1.own", "tied", "expert")


def test_nothing_wrong() -> None:
    assert found_for(lambda scene: None) == []
