"""A run that is saved inside an accumulation window goes on as if it had not stopped."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.runtime.checkpointing.process_files import where_step_began
from deepspeed.utils import safe_get_full_grad
from deepspeed.verify import check_streams
from unit.common import DistributedFixture, DistributedTest
from unit.v1.looping import each
from unit.v1.zero.usage import Warnings

from . import runs, test_experts
from .runs import ACCUMULATE, BF16, CPU, FP16, backward, differences, refused, start, train, zero
from .test_resume import IMMEDIATE

HALF = {"device": "cpu", "ratio": 0.5}
TREE = {"reproducibility": {"world_size_invariant": True}}
CASES: dict[str, dict[str, Any]] = {
    "stage0-fp32": {},
    "stage0-bf16": BF16,
    "stage0-bf16-accumulate": ACCUMULATE,
    "stage0-fp16-per-parameter": {**FP16, **runs.TORCH_ADAM},
    "stage1-fp32": zero(1, overlap_comm=True),
    "stage1-fp16": {**FP16, **zero(1)},
    "stage1-fp16-accumulate": {**FP16, **runs.SUMS, **zero(1)},
    "stage1-bf16-accumulate": {**ACCUMULATE, **zero(1)},
    "stage1-bf16-immediate": {**IMMEDIATE, **zero(1)},
    "stage1-bf16-accumulate-offload": {**ACCUMULATE, **zero(1, **CPU)},
    "stage2-fp32": zero(2, overlap_comm=True),
    "stage2-bf16-offload": {**BF16, **zero(2, **CPU)},
    "stage2-fp16": {**FP16, **zero(2)},
    "stage3-fp32": zero(3),
    "stage3-bf16": {**BF16, **zero(3, stage3_param_persistence_threshold=0)},
    "stage3-fp16-offload": {**FP16, **zero(3, **CPU)},
    "stage0-bf16-tree": {**BF16, **TREE},
    "stage2-fp32-tree": {**TREE, **zero(2, overlap_comm=True)},
    "stage3-bf16-offload-tree": {**BF16, **TREE, **zero(3, **CPU)},
    "stage3-bf16-offload-half": {**BF16, **zero(3, offload_optimizer=HALF)},
}
WINDOW = 3
MIDDLE, NO_SYNC, BOUNDARY, READ = "middle", "no_sync", "boundary", "read"


def keys_of(case: str, **more: Any) -> dict[str, Any]:
    return {**CASES[case], "gradient_accumulation_steps": WINDOW, **more}


def go_to(engine: Any, point: str) -> list[float]:
    """Train to where the run is saved; returns the losses of the window."""
    if point in (MIDDLE, NO_SYNC):
        with engine.no_sync() if point == NO_SYNC else nullcontext():
            losses = [backward(engine)]
        engine.step()
        return losses
    losses = []
    for _ in range(WINDOW):
        if losses:
            engine.step()
        losses.append(backward(engine))
    if point == READ:
        for param in engine.module.parameters():
            safe_get_full_grad(param)
    return losses


def go_on(engine: Any, losses: Sequence[float]) -> list[dict[str, Any]]:
    """Take two steps from there."""
    losses = list(losses)
    for _ in range(WINDOW - len(losses)):
        losses.append(backward(engine))
        engine.step()
    if engine.global_steps == 1:
        losses.append(backward(engine))  # at the boundary once more
        engine.step()
    return [runs.stepped(engine, losses), *train(engine, 1)]


def resumed(keys: dict[str, Any], folder: Path, **options: Any) -> Any:
    """Another engine, that has a window of its own, which loading must replace."""
    engine = start(seed=2, **keys)
    train(engine, 1)
    backward(engine)
    engine.load_checkpoint(str(folder), **options)
    return engine


def part(engine: Any, way: str, count: int) -> None:
    """Some micro-batches in one of the ways in which scripts accumulate."""
    for _ in range(count):
        x = torch.full((2, 8), float(dist.get_rank() + 1)).to(engine.model_dtype)
        loss = engine(x).float().square().mean()
        if way in ("plain", "unnoticed", "divided at the step"):
            loss.backward()
        elif way == "forced":
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(loss, scale_wrt_gas=False)
        elif way != "one rank" or dist.get_rank() == 0:
            engine.backward(loss)
        if way in ("plain", "unnoticed", "one rank") or (
            way == "divided at the step" and engine.micro_steps < WINDOW - 1
        ):
            engine.step()


def end(engine: Any, way: str) -> dict[str, Any]:
    """The rest of the window; returns what is seen after its step."""
    if way == "forced":
        assert not engine.is_gradient_accumulation_boundary()
    if way != "divided at the step":
        part(engine, way, 1)
    if way == "forced":
        engine.set_gradient_accumulation_boundary(True)
    if way in ("forced", "unmanaged", "divided at the step"):
        engine.step()
    assert engine.global_steps == 1
    return runs.look(engine)


class TestWindow(DistributedTest):
    """Kills: sums, counters or marks not saved or restored; an own window added to."""

    world_size = 2

    @pytest.mark.parametrize("stage", ["stage0", "stage1", "stage2", "stage3"])
    def test_bit_equal(self, tmp_path: Path, stage: str) -> None:
        # Reading reduced gradients gets them ready for the step: another state at stage 0.
        points = (MIDDLE, READ if stage == "stage0" else BOUNDARY)
        for number, case in enumerate(case for case in CASES if case.startswith(stage)):
            point = points[number % 2]
            for where in (point, NO_SYNC) if case == "stage3-bf16" else (point,):
                self.resume(Path(tmp_path, case, where), keys_of(case), where)

    def resume(self, folder: Path, keys: dict[str, Any], point: str) -> None:
        engine = start(**keys)
        train(engine, 1)
        losses = go_to(engine, point)
        engine.save_checkpoint(str(folder))
        straight = go_on(engine, losses)
        assert straight[-1]["counters"][1] == 0, "skipped steps compare nothing"
        engine.destroy()
        again = resumed(keys, folder)
        found = differences(straight, go_on(again, losses))
        assert found == [], (folder, found)
        again.destroy()

    def test_in_the_background(self, tmp_path: Path) -> None:
        # Kills: sums that are written when training has moved them on.
        keys = keys_of("stage2-fp32", checkpoint={"writer": {"decoupled": True}})
        self.resume(tmp_path, keys, MIDDLE)

    @each(case=("stage0-bf16", "stage2-fp32"))
    def test_on_streams_and_saving_changes_nothing(self, tmp_path: Path, case: str) -> None:
        # Kills: a window that is restored beside reductions of the own one that are still added,
        # or read before they are.
        with simulate(), check_streams():
            self.resume(tmp_path / case, keys_of(case), MIDDLE)
        found = []
        for saves in (False, True):
            engine = start(**keys_of(case))
            train(engine, 1)
            losses = go_to(engine, READ)
            if saves:
                engine.save_checkpoint(tmp_path / case)
            found.append(go_on(engine, losses))
        assert differences(*found) == [], case

    @each(case=("stage0-bf16", "stage1-fp32", "stage2-fp32"))
    def test_who_divides(self, tmp_path: Path, case: str) -> None:
        # Kills: a sum that is divided for another number of micro-batches, a boundary that the
        # caller has set and the resumed run has not, samples that are counted anew, a rank without
        # a gradient that has no file.
        # At stage 2 all ranks reduce in each backward; the other stages have every second way.
        for way in {
            "stage0-bf16": ("plain", "divided at the step", "unmanaged", "one rank"),
            "stage1-fp32": ("unnoticed", "forced", "unmanaged", "one rank"),
            "stage2-fp32": ("plain", "unnoticed", "divided at the step", "forced"),
        }[case]:
            keys = keys_of(case, managed_gradient_accumulation=way != "unmanaged")
            if way == "forced":
                keys["gradient_accumulation_steps"] = 1
            if way == "unmanaged":
                keys["zero_optimization"] = {"stage": int(case[5])}
            engine, again = start(**keys), start(seed=2, **keys)
            for one in (engine, again):
                one.module.drop.p = 0.0
                one.train(way != "unnoticed")  # outputs in evaluation are not watched
            part(engine, way, 3 if way == "divided at the step" else 2)
            folder = tmp_path / f"{case} {way}"
            engine.save_checkpoint(folder)
            assert len(list(folder.glob("*/window_rank_*.pt"))) == self.world_size
            again.load_checkpoint(folder)
            assert differences(end(engine, way), end(again, way)) == [], way

    @staticmethod
    def saved_in_the_middle(folder: Path, keys: dict[str, Any]) -> list[float]:
        """A run that is saved in its first window; its losses so far."""
        engine = start(**keys)
        losses = go_to(engine, MIDDLE)
        engine.save_checkpoint(folder, tag="t")
        return losses

    def test_options_and_a_file_that_is_lost(self, tmp_path: Path) -> None:
        # Kills: gradients of a checkpoint whose optimizer was not asked for; an own window that is
        # lost for weights alone.
        keys = keys_of("stage2-fp32")
        self.saved_in_the_middle(tmp_path, keys)
        for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
            one = resumed(keys, tmp_path, **options)
            assert one.tracker.window.is_plain is False and one.micro_steps == WINDOW
            own = [group.grad.clone() for group in one.optimizer.groups]
            other = start(seed=2, **keys)
            train(other, 1)
            backward(other)
            assert differences(own, [group.grad for group in other.optimizer.groups]) == []
        runs.on_rank_0((tmp_path / "t" / "window_rank_1.pt").unlink)
        for level in ("full", "off"):
            other = start(seed=2, **{**keys, "checkpoint": {"verify": level}})
            with refused(r"window_rank_1\.pt"):
                other.load_checkpoint(tmp_path)

    def test_what_other_runs_say(self, tmp_path: Path) -> None:
        # Kills: sums that are divided by other micro-batches or laid out otherwise, taken as they
        # are; a checkpoint of a step that asks for anything; a change before the error.
        keys = keys_of("stage2-fp32")
        engine = start(**keys)
        train(engine, 1)
        engine.save_checkpoint(tmp_path, tag="step")
        assert not list(tmp_path.glob("*/window*"))
        losses = go_to(engine, MIDDLE)
        engine.save_checkpoint(tmp_path, tag="window")
        straight = go_on(engine, losses)
        small = zero(2, reduce_bucket_size=10, overlap_comm=True)
        others = {
            "gradient_accumulation_steps was 3, now 2": {"gradient_accumulation_steps": 2},
            "zero_optimization.stage was 2, now 1": zero(1, overlap_comm=True),
            "reproducibility.world_size_invariant was False, now True": TREE,
            "optimizer was DeepSpeedZeroOptimizer, now ReplicatedOptimizer": zero(0),
            r"the layout of their gradients \(buckets, groups\)": small,
        }
        for what, different in others.items():
            other = start(seed=2, **{**keys, **different})
            before = runs.look(other)
            with refused(rf"rank 1: .*Different are: .*{what}.*Resume as it was saved"):
                other.load_checkpoint(tmp_path, tag="window")
            assert differences(before, runs.look(other)) == []
            backward(other)
            other.load_checkpoint(tmp_path, tag="step")
            assert not other._sequence.has_gradients
            with Warnings() as said:
                begins = {"checkpoint": {"open_window": "discard"}}
                anew = start(seed=2, **{**keys, **different, **begins})
                anew.load_checkpoint(tmp_path, tag="window")
            told = [text for text in said.texts if "window begins anew" in text]
            assert len(told) == (dist.get_rank() == 0)
            assert anew.micro_steps % anew.gradient_accumulation_steps() == 0
            assert anew.tracker.window.is_plain is None and anew.global_steps == 1
            first = train(anew, 1)[0]
            assert first["counters"][0] == 2
        # An equal run still goes on.
        again = resumed(keys, tmp_path, tag="window")
        assert differences(straight, go_on(again, losses)) == []

    def test_the_ledger_skips_what_it_has_not_seen(self, tmp_path: Path) -> None:
        # Kills: a ledger that takes the checkpoint's gradients for foreign ones, or goes on
        # skipping.
        keys = keys_of("stage2-fp32", verify={"ledger": True})
        losses = self.saved_in_the_middle(tmp_path, keys)
        again = resumed(keys, tmp_path)
        ledger: Any = again._sequence.observer
        checked = ledger.steps
        go_on(again, losses)
        assert ledger.steps == checked + 1 and ledger.findings == []

    @each(case=("fp32-0", "bf16-1", "accumulate-1", "fp32-2", "fp32-3"))
    def test_experts(self, tmp_path: Path, case: str) -> None:
        # Kills: sums of experts, which other ranks reduce, laid where dense ones are.
        keys = {**test_experts.CASES[case], "gradient_accumulation_steps": 2}
        engine = test_experts.make(2, 1, **keys)
        test_experts.train(engine, 1)
        engine.save_checkpoint(tmp_path / case)
        again = test_experts.make(2, 2, **keys)
        again.load_checkpoint(tmp_path / case)
        for one in (engine, again):
            test_experts.train(one, 3)
            assert one.global_steps == 2
        assert differences(test_experts.whole(engine), test_experts.whole(again)) == []

    def test_a_universal_checkpoint_begins_the_window_anew(self, tmp_path: Path) -> None:
        keys = keys_of("stage2-fp32")
        engine = start(**keys)
        train(engine, 1)
        go_to(engine, MIDDLE)
        engine.save_checkpoint(tmp_path)
        with Warnings() as said:
            runs.on_rank_0(lambda: runs.convert(tmp_path))
        assert dist.get_rank() or any("begins the window anew" in text for text in said.texts)
        other = start(seed=2, **{**keys, "checkpoint": {"load_universal": True}})
        other.load_checkpoint(tmp_path)
        assert (other.global_steps, other.micro_steps) == (1, WINDOW)
        assert train(other, 1)[0]["counters"][0] == 2

    def test_inside_a_backward(self, tmp_path: Path) -> None:
        engine = start(**keys_of("stage2-fp32"))
        loss = engine(torch.ones(2, 8)).square().mean()
        loss.register_hook(lambda grad: engine.save_checkpoint(tmp_path))
        with refused("inside a backward: its gradients are not"):
            engine.backward(loss)


class SavedWindow(DistributedFixture):
    """A window that two ranks have saved, in processes that have ended."""

    world_size = 2

    def run(self, class_tmpdir: Any) -> None:
        engine = start(**keys_of("stage2-fp32"))
        train(engine, 1)
        go_to(engine, MIDDLE)
        engine.save_checkpoint(str(class_tmpdir))


class TestOtherWorlds(DistributedTest):
    world_size = [1, 4]

    def test_a_window_of_two_ranks(self, SavedWindow: Any, class_tmpdir: Any) -> None:
        # Kills: ranks that go on without the gradients of those that are not there.
        keys, world = keys_of("stage2-fp32"), dist.get_world_size()
        with refused(f"Different are: world was 2, now {world}"):
            start(**keys).load_checkpoint(str(class_tmpdir))
        anew = start(**{**keys, "checkpoint": {"open_window": "discard"}})
        anew.load_checkpoint(str(class_tmpdir))
        assert (anew.global_steps, anew.micro_steps) == (1, WINDOW)
        train(anew, 1)
        assert anew.global_steps == 2


def test_a_window_that_does_not_say_where_it_began() -> None:
    # Kills: a window of the release before that is repeated from nowhere.
    host = {"window": True, "dataloader": {"consumed_samples": 7, "batches": 7}}
    with pytest.raises(CheckpointError, match='"repeat" cannot find .* use "discard"'):
        where_step_began(host)
    begun = where_step_began({**host, "step_samples": 4})["dataloader"]
    assert begun == {"consumed_samples": 4, "batches": 4}
    assert where_step_began({**host, "window": False}) == {**host, "window": False}
