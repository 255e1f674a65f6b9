"""Ranks and stage change three times in a run, once inside an accumulation window: the digests of
runs that did not change.
"""

import json
from pathlib import Path
from typing import Any

import torch

from deepspeed import comm as dist
from unit.common import DistributedFixture, DistributedTest
from unit.models import tokens
from unit.v1.checkpoint.runs import refused
from unit.v1.reproducibility.cases import MICRO_BATCHES, Case
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


def go_on(engine: Any, steps: int, more: int = 0) -> None:
    """Train on the engine's own data until so many steps, and `more` micro-batches."""
    while engine.global_steps < steps or more:
        more -= engine.global_steps == steps
        engine.backward(engine(next(engine.training_dataloader)))
        engine.step()


def with_data(**more: Any) -> Any:
    """An engine of as many ranks as there are, of the stage that they have; five steps an epoch."""
    engine = engine_of(Case(STAGES[dist.get_world_size()]), **more)
    rows = [tokens(number, 61, 1, 11)[0] for number in range(5 * 2 * MICRO_BATCHES)]
    engine.training_dataloader = engine.deepspeed_io(rows)
    return engine


class two_in_a_window(DistributedFixture):  # noqa: N801
    world_size = 2

    def run(self, class_tmpdir: str) -> None:
        engine = with_data()
        go_on(engine, 1, more=4)
        engine.save_checkpoint(class_tmpdir)
        digests = []
        for steps in (2, 3):
            go_on(engine, steps)
            digests.append(engine.state_digest())
        Path(class_tmpdir, "steps").write_text(json.dumps(digests), encoding="utf-8")
        engine.destroy()


class TestInAWindow(DistributedTest):
    world_size = [1, 2, 3]

    def test_it_is_repeated(self, two_in_a_window: None, class_tmpdir: str) -> None:
        # Kills: samples that are lost or seen twice, micro-batches that are counted in a window
        # that begins anew.
        wanted = json.loads(Path(class_tmpdir, "steps").read_text(encoding="utf-8"))
        world = dist.get_world_size()
        if world != 2:
            with refused(f'world was 2, now {world}.*with reproducibility to "repeat"'):
                with_data().load_checkpoint(class_tmpdir)
        torch.manual_seed(world)
        engine = with_data(checkpoint={"open_window": "repeat"})
        train(engine, steps=1)  # it goes elsewhere first
        engine.load_checkpoint(class_tmpdir)
        assert engine.global_steps == 1 and engine.micro_steps == MICRO_BATCHES // world
        for steps, digest in zip((2, 3), wanted, strict=True):
            go_on(engine, steps)
            assert engine.state_digest() == digest, (world, steps)
        engine.destroy()
