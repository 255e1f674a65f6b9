"""The ledger's arithmetic: fingerprints, how a deviation is explained, how reports become findings.

Reports are of four ranks, two stages of two: "own" is a parameter of each stage, "tied" is shared
by both; "expert" has the same name on all, but ranks 0 and 2 hold another one than 1 and 3.
"""

import pytest
import torch
from unit.models import drawn

from deepspeed.runtime.gradients.ledger.families import PieceKey, RankReport, explain_all
from deepspeed.runtime.gradients.ledger.findings import LedgerFinding, RankRecord, explain
from deepspeed.runtime.gradients.ledger.fingerprint import (
    DIMS,
    WIDTH,
    Fingerprint,
    fingerprint_roundoff,
)

CPU = torch.device("cpu")
SIZES = (1, DIMS, DIMS + 1, WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH + 5)
PIECES = 4


class TestFingerprint:
    @pytest.mark.parametrize("numel", SIZES)
    def test_fragments_add_up(self, numel: int) -> None:
        # Kills: signs that start anew with each fragment; part of a row left out or taken twice.
        prints, grad = Fingerprint(CPU, numel), drawn(0, numel)
        for cut in {0, 1, numel // 3, numel // 2, numel - 1, min(numel, WIDTH), numel}:
            parts = [(grad[:cut], 0), (grad[cut:], cut)]
            found = sum(prints.of(part, start) for part, start in parts if part.numel())
            torch.testing.assert_close(found, prints.of(grad), rtol=0, atol=1e-4)

    @pytest.mark.parametrize("numel", SIZES)
    def test_linear_and_as_long_as_the_gradient(self, numel: int) -> None:
        prints = Fingerprint(CPU, numel)
        a, b = drawn(1, numel), drawn(2, numel)
        sums = 2 * prints.of(a) - prints.of(b)
        torch.testing.assert_close(prints.of(2 * a - b), sums, rtol=0, atol=1e-4)
        # Kills: a sketch that loses elements or counts some several times.
        assert 0.4 < prints.of(a).norm() / a.norm() < 2.0

    def test_every_element_counts(self) -> None:
        # Kills: an element that no component takes in.
        prints = Fingerprint(CPU, 2 * WIDTH + 3)
        for position in (0, 1, WIDTH - 1, WIDTH, 2 * WIDTH - 1, 2 * WIDTH, 2 * WIDTH + 2):
            one = torch.zeros(2 * WIDTH + 3)
            one[position] = 1.0
            assert prints.of(one).abs().sum() == 1.0

    def test_signs_do_not_depend_on_the_largest_parameter(self) -> None:
        # Kills: other signs for a parameter on ranks of a pipeline, or in an engine made later.
        grad = drawn(0, 5 * WIDTH)
        alone, among_larger = (Fingerprint(CPU, times * WIDTH).of(grad) for times in (5, 50))
        assert torch.equal(alone, among_larger)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sums_are_fp32(self, dtype: torch.dtype) -> None:
        # Kills: sums in the gradient's dtype; a bf16 dot product has three digits.
        grad = drawn(0, 4 * WIDTH + 7).to(dtype)
        exact = Fingerprint(CPU, grad.numel())
        wide = exact.of(grad.float())
        bound = fingerprint_roundoff(grad.numel()) * grad.float().norm()
        for autocast in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                assert (exact.of(grad) - wide).norm() <= bound
                assert (exact.of(grad.float()) - wide).norm() == 0


TOLERANCE = 1e-3


def off(found: torch.Tensor, right: torch.Tensor) -> list[int]:
    """The pieces that are wrong."""
    return ((found - right).norm(dim=1) > TOLERANCE).nonzero().flatten().tolist()


class Scene:
    """What ranks contributed, and what each of them found."""

    def __init__(self, ranks: int, micro: int) -> None:
        self.parts = drawn(3, ranks, micro, PIECES, DIMS)
        self.right = self.parts.sum((0, 1))
        self.found = [self.right.clone() for _ in range(ranks)]
        self.late = torch.zeros(ranks, PIECES, DIMS)

    def explain(self, wrong: list[int] | None = None) -> list[LedgerFinding]:
        held, sizes = list(range(PIECES)), torch.full((PIECES,), TOLERANCE)
        records = []
        for rank, found in enumerate(self.found):
            mine = off(found, self.right) if wrong is None else wrong
            own = self.parts[rank], self.late[rank], held, found, None, sizes, mine
            records.append(RankRecord(*own))
        return explain(records, ["a", "b", "b", "c"])


def only(findings: list[LedgerFinding]) -> LedgerFinding:
    assert len(findings) == 1, findings
    return findings[0]


class TestExplanations:
    def test_one_contribution(self) -> None:
        scene = Scene(3, 4)
        scene.found = [scene.right - scene.parts[1, 2] for _ in range(3)]
        finding = only(scene.explain())
        assert (finding.kind, finding.parameters) == ("lost", ("a", "b", "c"))
        assert "rank 1, micro-batch 3 of 4" in finding.text
        scene.found = [scene.right + scene.parts[2, 0] for _ in range(3)]
        assert "rank 2, micro-batch 1 of 4 was counted twice" in only(scene.explain()).text

    def test_the_last_ones_of_a_rank(self) -> None:
        scene = Scene(2, 4)
        scene.found[0] = scene.right - scene.parts[1, 2:].sum(0)
        assert "rank 1, all from micro-batch 3 of 4 on" in only(scene.explain()).text

    def test_different_errors_of_different_parameters(self) -> None:
        # Kills: one explanation for all; a name that is listed once per fragment.
        scene = Scene(2, 2)
        scene.found[0][1:3] -= scene.parts[0, 1, 1:3]
        scene.found[1][0] *= 0.5
        lost, divisor = scene.explain()
        assert (lost.kind, lost.parameters) == ("lost", ("b",))
        assert "rank 0, micro-batch 2" in lost.text
        assert divisor.kind == "divisor" and divisor.parameters == ("a",)

    def test_groups(self) -> None:
        scene = Scene(4, 1)
        pairs = [[0, 1], [0, 1], [2, 3], [2, 3]]
        scene.found = [scene.parts[pair].sum((0, 1)) * 2 for pair in pairs]
        for finding, pair in zip(scene.explain(), pairs[1:3], strict=True):
            assert finding.text == f"averaged over ranks {pair} instead of [0, 1, 2, 3]"
        scene.found = [scene.parts[rank].sum(0) * 4 for rank in range(4)]
        assert only(scene.explain()).text.startswith("not reduced")

    def test_any_divisor(self) -> None:
        scene = Scene(2, 1)
        scene.found = [scene.right / 7 for _ in range(2)]
        finding = only(scene.explain())
        assert finding.kind == "divisor"
        assert "effective divisor is 7 times the right one" in finding.text

    def test_late_comes_before_lost(self) -> None:
        # Kills: calling late what is lost for the reason that it came late.
        scene = Scene(2, 1)
        scene.late[1, 0] = scene.parts[1, 0, 0]
        for found in scene.found:
            found[0] -= scene.parts[1, 0, 0]
        finding = only(scene.explain())
        assert finding.kind == "late" and "rank 1" in finding.text and finding.parameters == ("a",)

    def test_what_nothing_explains(self) -> None:
        # Kills: a finding for something else, and no finding at all.
        scene = Scene(2, 2)
        scene.found[0] = drawn(9, PIECES, DIMS)
        scene.found[1][3] = float("nan")
        finding = only(scene.explain(wrong=[3]))
        assert finding.kind == "unexplained" and finding.parameters == ("c",)

    def test_many_names_are_counted(self) -> None:
        names = tuple(f"layer.{i}" for i in range(25))
        shown = str(LedgerFinding("lost", "gone", names))
        assert "layer.9" in shown and "layer.10" not in shown and "and 15 more" in shown


STAGES = ((0, 1), (2, 3))
REPLICAS = 2
OWN, TIED, EXPERT = range(3)


class OwnScene:
    """What four ranks contributed to three pieces in two micro-batches, and what each found."""

    def __init__(self) -> None:
        self.parts = drawn(1, 4, 2, 3, DIMS)
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
        reports, sizes = {}, torch.full((3,), TOLERANCE)
        for rank in range(4):
            stage, same = rank // 2, (rank % 2, rank % 2 + 2)
            found, wrong = self.found[rank], off(self.found[rank], self.right[rank])
            none = torch.zeros(3, DIMS)
            record = RankRecord(self.parts[rank], none, [0, 1, 2], found, None, sizes, wrong)
            keys = [PieceKey(name, 0, 5) for name in (f"{stage}.own", "tied", "expert")]
            holders, sharers = [STAGES[stage], STAGES[stage], same], [(), same, ()]
            reports[rank] = RankReport(record, keys, holders, sharers, self.absent[rank])
        return explain_all(reports, REPLICAS)


@pytest.fixture
def stages() -> OwnScene:
    return OwnScene()


def test_one_error_of_all_stages_is_one_finding(stages: OwnScene) -> None:
    # Kills: a finding per stage, or per kind of parameter.
    assert stages.explain() == []
    stages.found = stages.right * 7
    finding = only(stages.explain())
    assert finding.kind == "divisor"
    assert set(finding.parameters) == {"0.own", "1.own", "tied", "expert"}


def test_global_ranks_are_named(stages: OwnScene) -> None:
    # Kills: places within the stage's group taken for ranks.
    stages.found[2:, OWN] -= stages.parts[3, 1, OWN]
    finding = only(stages.explain())
    assert (finding.kind, finding.parameters) == ("lost", ("1.own",))
    assert "rank 3, micro-batch 2 of 2" in finding.text


def test_a_shared_parameter(stages: OwnScene) -> None:
    # Kills: explaining a shared parameter by the contributions of one stage.
    for rank in range(4):
        stages.found[rank, TIED] = stages.parts[list(STAGES[rank // 2]), :, TIED].sum((0, 1))
    not_summed = only(stages.explain())
    stages.found[:, TIED] = 2 * stages.right[:, TIED]
    twice = only(stages.explain())
    assert not_summed.parameters == twice.parameters == ("tied",)
    assert "not summed over the parts" in not_summed.text and "that share it twice" in twice.text


def test_parameters_of_the_same_name(stages: OwnScene) -> None:
    # Kills: other ranks' experts counted as contributions; not seeing that they were.
    stages.found[:, EXPERT] = stages.parts[:, :, EXPERT].sum((0, 1))
    findings = stages.explain()
    assert {finding.parameters for finding in findings} == {("expert",)}
    said = "reduced together with other ranks' parameters"
    assert all(said in finding.text for finding in findings)


def test_what_never_ran(stages: OwnScene) -> None:
    # Kills: a schedule's gap told only where it changes a gradient; one finding per rank.
    for rank in STAGES[1]:
        stages.absent[rank].append("the backward of micro-batch 2 of 2 never ran")
    finding = only(stages.explain())
    assert finding.kind == "lost" and finding.text.endswith("never ran on rank(s) [2, 3]")
    assert finding.parameters == ("1.own", "tied", "expert")
