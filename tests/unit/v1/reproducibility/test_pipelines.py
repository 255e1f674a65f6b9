"""Pipelines of 1, 2 and 4 stages: one digest, that of one process that runs the same layers."""

import json
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from unit.common import DistributedFixture, DistributedTest
from unit.v1.contract.matrix import all_pairs, pairs_of
from unit.v1.reproducibility.pipelines import FACTORS, PipeCase, bits_of, pipe_cases
from unit.verify.guards import watched

# As configured by default, and with as much beside one another as there is.
ON_DEVICE = (PipeCase((2, 1)), PipeCase((2, 2), ("zero_bubble", 0), stage=1, overlap=True))


def bits_on_device(case: PipeCase) -> list[Any]:
    with watched() as found:
        bits = bits_of(case, steps=4)
    assert not found, "\n".join([str(case), *found])
    return bits


class on_one_rank(DistributedFixture):  # noqa: N801  # the name of the fixture
    world_size = 1

    def run(self, class_tmpdir: str) -> None:
        if not Path(class_tmpdir, "bits").exists():
            alone = {case.kind: case.alone for case in pipe_cases()}
            found = {kind: bits_of(case) for kind, case in alone.items()}
            assert len({bits[0] for bits in found.values()}) == len(found), found
            assert any(skipped for *_, skipped in found.values()), found
            found["device"] = bits_on_device(PipeCase(is_plain=True))
            Path(class_tmpdir, "bits").write_text(json.dumps(found), encoding="utf-8")


class TestPairs(DistributedTest):
    world_size = [2, 3, 4]

    def test_as_one_rank(self, on_one_rank: None, class_tmpdir: str) -> None:
        wanted = json.loads(Path(class_tmpdir, "bits").read_text(encoding="utf-8"))
        world = dist.get_world_size()
        for case in (case for case in pipe_cases() if case.ranks == world):
            assert bits_of(case) == wanted[case.kind], case
        # Kills: a leaf that is summed, or a share that is used, before it has come.
        for case in (case for case in ON_DEVICE if case.ranks == world):
            assert bits_on_device(case) == wanted["device"], case


def test_pairs_are_covered() -> None:
    found = [vars(case) for case in pipe_cases()]
    assert set().union(*(pairs_of(row, FACTORS) for row in found)) == all_pairs(FACTORS)
