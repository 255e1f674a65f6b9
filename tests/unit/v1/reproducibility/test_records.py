"""Records of runs on 1, 2 and 3 ranks, and of pipelines: equal in digests and losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from deepspeed import comm as dist
from deepspeed.monitor.watch.record import RecordReader, record_at
from deepspeed.runtime.engine_parts.losses import Losses
from deepspeed.verify import diff
from unit.common import DistributedFixture, DistributedTest
from unit.v1.reproducibility import pipelines, runs
from unit.v1.reproducibility.cases import Case
from unit.v1.reproducibility.pipelines import PipeCase

STEPS = 3
FIRST = 2  # batch: their losses have other means in the order of 2 ranks, and of 3
EVERY = 2  # so that a step without digests has losses that are forgotten


def more(folder: Path) -> dict[str, Any]:
    watch = {"enabled": True, "output_path": str(folder.parent), "job_name": folder.name}
    bits = {"world_size_invariant": True, "digest_every": EVERY}
    return {"watch": {**watch, "refresh_seconds": 0}, "reproducibility": bits}


def record(folder: Path, case: Case, train: Callable[..., Any] = runs.train) -> None:
    engine = runs.engine_of(case, **more(folder))
    train(engine, FIRST, STEPS)
    engine.destroy()


def record_pipeline(folder: Path, case: PipeCase) -> None:
    engine = pipelines.engine_of(case, **more(folder))
    pipelines.train(engine, steps=STEPS)
    engine.destroy()


def divides_itself(engine: Any, first: int, steps: int) -> None:
    """As accelerate does."""
    for step in range(first, first + steps):
        for number in range(dist.get_rank(), runs.MICRO_BATCHES, dist.get_world_size()):
            loss = engine(runs.batch_of(step, number)) / engine.gradient_accumulation_steps()
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()


def fault() -> Any:
    """Losses of rank 1 are shown some units in the last place off, more than their mean rounds."""
    original = Losses.show

    def show(self: Losses, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        if dist.get_rank() == 1:
            loss = loss.detach() * (1 + 2**-20)
        original(self, loss, scale_wrt_gas)

    return mock.patch.object(Losses, "show", show)


class on_one_rank(DistributedFixture):  # noqa: N801  # the name of the fixture
    world_size = 1

    def run(self, class_tmpdir: str) -> None:
        folder = Path(class_tmpdir, "alone")
        if not folder.exists():
            record(folder, Case(2, ranks=1))
            record_pipeline(folder.with_name("plain"), PipeCase(is_plain=True))


class TestRecords(DistributedTest):
    world_size = [2, 3]

    def test_as_one_rank(self, on_one_rank: None, class_tmpdir: str) -> None:
        # Kills: the loss of rank 0 alone, a mean by ranks, losses of the step before.
        root, world = Path(class_tmpdir), dist.get_world_size()
        mine = root / str(world)
        record(mine / "right", Case(world, ranks=world))
        record(mine / "divided", Case(2, ranks=world), divides_itself)
        with fault():
            record(mine / "fault", Case(2, ranks=world))
        record_pipeline(mine / "pipeline", PipeCase(grid={2: (2, 1), 3: (1, 3)}[world]))
        dist.barrier()
        if dist.get_rank() > 0:
            return
        for name, other in (("right", "alone"), ("divided", "alone"), ("pipeline", "plain")):
            found = diff.compare(root / other, mine / name)
            assert found.differences == [] and len(found.steps) == STEPS // EVERY, name
        lines: dict[str, Any] = {}
        for folder in (root / "alone", root / "plain", *mine.iterdir()):
            path = record_at(folder)
            assert path is not None
            lines[folder.name] = {
                line["step"]: line for line in RecordReader(path).new_lines() if "step" in line
            }
        for name, other in (("right", "alone"), ("pipeline", "plain")):
            now, then = lines[name][EVERY], lines[other][EVERY]
            assert now["loss"] == then["loss"] and now["losses"] == then["losses"] > 3, name
            assert "losses" not in lines[name][EVERY + 1], name
        # A division that rounds is not compared, and told to what it may be.
        divided = lines["divided"][EVERY]
        assert "losses" not in divided
        assert abs(divided["loss"] - lines["alone"][EVERY]["loss"]) < 1e-6
        found = diff.compare(root / "alone", mine / "fault")
        assert [(each.name, each.what) for each in found.differences] == [("loss", "loss")]
