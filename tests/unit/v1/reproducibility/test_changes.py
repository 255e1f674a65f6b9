"""Ranks and stage change three times in a run: the digests of one that did not change."""

import json
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from unit.common import DistributedFixture, DistributedTest
from unit.v1.reproducibility.cases import Case
from unit.v1.reproducibility.runs import engine_of, train

STAGES = {1: 2, 3: 3, 2: 1, 4: 0}  # by ranks, in the order of the run
RANKS = list(STAGES)
OF_LEG = 2  # steps
# The first step is skipped, so that the loss scale is not the first one later.
PRECISION = "fp16"


def engine_now() -> Any:
    return engine_of(Case(STAGES[dist.get_world_size()], PRECISION))


def leg(folder: str) -> None:
    """Go on where the run is, with as many ranks as there are now."""
    number = RANKS.index(dist.get_world_size())
    engine = engine_now()
    path, _ = engine.load_checkpoint(folder, tag=f"after{number - 1}")
    assert path is not None
    train(engine, first=OF_LEG * number, steps=OF_LEG)
    wanted = json.loads(Path(folder, "digests").read_text(encoding="utf-8"))
    assert engine.state_digest() == wanted[number], RANKS[number]
    engine.save_checkpoint(folder, tag=f"after{number}")
    engine.destroy()


class one(DistributedFixture):  # noqa: N801  # the name of the fixture
    world_size = 1

    def run(self, class_tmpdir: str) -> None:
        engine, digests = engine_now(), []
        for number in range(len(RANKS)):
            train(engine, first=OF_LEG * number, steps=OF_LEG)
            digests.append(engine.state_digest())
            if number == 0:
                engine.save_checkpoint(class_tmpdir, tag="after0")
        engine.destroy()
        assert len(set(digests)) == len(digests)
        Path(class_tmpdir, "digests").write_text(json.dumps(digests), encoding="utf-8")


class three(DistributedFixture):  # noqa: N801
    world_size = 3

    def run(self, one: None, class_tmpdir: str) -> None:
        leg(class_tmpdir)


class two(DistributedFixture):  # noqa: N801
    world_size = 2

    def run(self, three: None, class_tmpdir: str) -> None:
        leg(class_tmpdir)


class TestFour(DistributedTest):
    world_size = 4

    def test_as_unchanged(self, two: None, class_tmpdir: str) -> None:
        # Kills: state, a loss scale or seeds that depend on how the run was cut.
        leg(class_tmpdir)
