"""Saving in the background: the state at the call is saved, errors come on all ranks at one step.

Only the tests of the heartbeat wait for time to pass: elsewhere writers stand at a gate.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.checkpoint.utils import HostCopy
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
    DecoupledCheckpointEngine,
)
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpointing import background_save
from deepspeed.runtime.checkpointing.background_save import BackgroundSave
from deepspeed.runtime.checkpointing.save_job import SaveJob
from unit.common import DistributedTest

from . import test_pipeline as pipeline
from .runs import BF16, differences, environment_of_two, look, refused, saved, start, train, zero

KEYS = {**BF16, **zero(2), "checkpoint": {"writer": {"decoupled": True}}}


class Gate(FastCheckpointEngine):
    """Waits before its first file until it is opened, then fails if it was told to."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.error: Exception | None = None

    def save(self, state_dict: Any, path: str) -> None:
        assert self.opened.wait(50)
        if self.error is not None:
            raise self.error
        super().save(state_dict, path)


def gated(engine: Any) -> Gate:
    gate = Gate()
    engine.checkpoint_engine = DecoupledCheckpointEngine(gate)
    return gate


def join_threads() -> None:
    for save in background_save.in_flight:
        save.join()


class TestInTheBackground(DistributedTest):
    world_size = 2

    def test_a_rank_that_falls_silent_is_given_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: waiting half an hour in destroy() for a rank that was killed while it wrote.
        monkeypatch.setattr(background_save, "_HEARTBEAT_S", 0.2)
        monkeypatch.setattr(background_save, "SILENCE_S", 1.0)
        if dist.get_rank() == 1:
            monkeypatch.setattr(BackgroundSave, "_run", lambda self: None)
            monkeypatch.setattr(BackgroundSave, "_beat", lambda self: None)
        engine = saved(tmp_path, 0, **KEYS)
        (save,) = background_save.in_flight
        engine.destroy()
        given_up = "rank 1 has not written its files in time; it may have been killed"
        assert dist.get_rank() == 1 or given_up in str(save._error)
        assert not (tmp_path / "latest").exists()

    def test_a_rank_with_a_slow_disk_is_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a heartbeat that is not sent, or not read, so a rank that writes for longer than
        # SILENCE_S is given up.
        monkeypatch.setattr(background_save, "_HEARTBEAT_S", 0.1)
        monkeypatch.setattr(background_save, "SILENCE_S", 0.5)
        write = SaveJob.write

        def slow(job: SaveJob, *args: Any) -> None:
            time.sleep(1.2)
            write(job, *args)

        if dist.get_rank() == 1:
            monkeypatch.setattr(SaveJob, "write", slow)
        engine = saved(tmp_path, 0, tag="slow", **KEYS)
        engine.destroy()  # without collectives, in which a rank that lives would be seen
        dist.barrier()
        assert (tmp_path / "latest").read_text() == "slow"

    def test_no_heartbeat_is_under_way_after_the_save(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a thread that is in the store when the interpreter ends, which aborts the process.
        def last_beat(save: BackgroundSave) -> None:
            save._ended.wait()
            time.sleep(0.3)

        monkeypatch.setattr(BackgroundSave, "_beat", last_beat)
        saved(tmp_path, 0, **KEYS).destroy()
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("heartbeat")]

    def test_the_state_at_the_call_is_saved_and_training_goes_on(self, tmp_path: Path) -> None:
        """Kills: tensors or schedules shared with the running model, a later step's file."""
        unbroken = train(start(**KEYS), 4)
        engine = start(**KEYS)
        train(engine, 1)
        gate, client = gated(engine), {"seen": [1], "value": torch.ones(2)}
        engine.save_checkpoint(tmp_path, client_state=client)
        client["seen"].append(2)  # type: ignore[attr-defined]
        client["value"].zero_()  # type: ignore[attr-defined]
        seen = train(engine, 2)
        assert not (tmp_path / "latest").exists()
        assert len(background_save.in_flight) == 1
        gate.opened.set()
        join_threads()
        # Published before any further step or call.
        assert (tmp_path / "latest").read_text() == "global_step1"
        assert (tmp_path / "global_step1" / "manifest.json").is_file()
        seen += train(engine, 1)
        assert background_save.in_flight == []
        assert differences(unbroken[1:], seen) == []
        other = start(seed=2, **KEYS)
        _, state = other.load_checkpoint(tmp_path)
        was = {"seen": [1], "value": torch.ones(2)}
        assert differences(was, {key: state[key] for key in was}) == []
        assert differences(unbroken[1:], train(other, 3)) == []

    def test_writing_begins_with_backward_in_the_next_step_or_soon(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kills: a start before its time, a backward that starts nothing, a wait for ever."""
        engine = start(**KEYS)

        def begun(tag: str) -> BackgroundSave:
            engine.save_checkpoint(tmp_path, tag=tag)
            return background_save.in_flight[-1]

        monkeypatch.setattr(background_save, "_START_S", 1000.0)
        ways = {"backward": engine.backward, "plain": lambda loss: loss.backward()}
        for tag, backward in ways.items():
            save = begun(tag)
            count = engine.gradient_accumulation_steps()
            for number in range(2 * count):
                x, target = next(engine.batches)
                loss = torch.nn.functional.mse_loss(engine(x.bfloat16()).float(), target)
                assert save._may_start.is_set() == (number > count)
                backward(loss)
                assert save._may_start.is_set() == (number >= count)
                if number >= count:
                    save._thread.join(20)
                    assert not save._thread.is_alive()
                engine.step()
        begun("wait")
        background_save.finish_saves(engine.device)
        monkeypatch.setattr(background_save, "_START_S", 0.01)
        save = begun("soon")
        save._thread.join(20)
        assert not save._thread.is_alive()
        folders = (one.name for one in tmp_path.iterdir() if one.is_dir())
        assert {name for name in folders if name[0] != "."} == {*ways, "wait", "soon"}
        engine.destroy()

    def test_the_next_save_a_load_by_another_engine_and_the_end_wait(self, tmp_path: Path) -> None:
        """Kills: two saves in flight that write one folder, loading what is not there yet."""
        engine = start(**KEYS)
        train(engine, 1)
        gate = gated(engine)
        engine.save_checkpoint(tmp_path, tag="first")
        threading.Timer(0.2, gate.opened.set).start()
        engine.save_checkpoint(tmp_path, tag="second")
        assert (tmp_path / "first" / "manifest.json").is_file()
        assert [save.job.info.tag for save in background_save.in_flight] == ["second"]
        other = start(seed=2, **KEYS)
        assert other.load_checkpoint(tmp_path)[0] == str(tmp_path / "second")
        assert background_save.in_flight == []
        assert differences(look(engine), {**look(other), "random": look(engine)["random"]}) == []
        gate = gated(engine)
        engine.save_checkpoint(tmp_path, tag="last")
        threading.Timer(0.2, gate.opened.set).start()
        engine.destroy()
        assert (tmp_path / "latest").read_text() == "last"  # on every rank

    def test_an_error_comes_on_all_ranks_at_one_step_and_training_goes_on(
        self, tmp_path: Path
    ) -> None:
        """Kills: an error on one rank alone, a folder published without one rank's files."""
        unbroken = train(start(**KEYS), 6)
        engine = saved(tmp_path, tag="good", **KEYS)
        train(engine, 1)
        gate = gated(engine)
        gate.error = OSError(28, "No space left on device") if dist.get_rank() == 1 else None
        engine.save_checkpoint(tmp_path, tag="bad")
        seen = train(engine, 1)
        gate.opened.set()
        join_threads()
        with refused(r"saving bad in the background failed\. rank 1: OSError.*No space left"):
            train(engine, 1)
        assert engine.global_steps == 4  # the step was taken
        gate.error = None
        seen += train(engine, 1)
        assert differences(unbroken[2:3] + unbroken[4:5], seen) == []
        assert sorted(os.listdir(tmp_path)) == ["good", "latest", "zero_to_fp32.py"]
        engine.save_checkpoint(tmp_path, tag="next")
        assert differences(unbroken[5:], train(engine, 1)) == []
        engine.destroy()
        assert (tmp_path / "latest").read_text() == "next"

    def test_no_step_waits_for_its_device(self, tmp_path: Path) -> None:
        """Kills: a step that waits for what it has issued to learn whether the save has ended."""
        with simulate() as device:
            engine = start(**{**KEYS, "bf16": {"enabled": True, "check_grad_overflow": False}})
            gate = gated(engine)
            gate.error = OSError(5, "Input/output error") if dist.get_rank() == 1 else None
            engine.save_checkpoint(tmp_path, tag="bad")

            def step() -> None:
                for _ in range(engine.gradient_accumulation_steps()):
                    x, target = next(engine.batches)
                    loss = torch.nn.functional.mse_loss(engine(x.bfloat16()).float(), target)
                    engine.backward(loss)
                    engine.step()

            for _ in range(3):
                step()
                assert not device.default_stream().query()
            gate.opened.set()
            join_threads()
            step()  # asks, and the next one hears
            with refused("rank 1: OSError"):
                step()
            assert background_save.in_flight == [] and engine.global_steps == 5
            engine.destroy()

    def test_no_rank_ends_before_all_have(self, tmp_path: Path) -> None:
        """Kills: a rank that leaves while another saves; their collectives would differ."""
        engine = start(**KEYS)
        gate = gated(engine)
        part, going_on = BackgroundSave._part, threading.Event()

        def wait_and_part(self: Any) -> None:
            part(self)
            assert dist.get_rank() == 0 or going_on.wait(50)

        BackgroundSave._part = wait_and_part  # type: ignore[method-assign]
        engine.save_checkpoint(tmp_path, tag="t")
        gate.opened.set()
        if dist.get_rank() == 0:
            join_threads()
        dist.barrier()
        train(engine, 1)
        assert len(background_save.in_flight) == 1
        going_on.set()
        join_threads()
        train(engine, 1)
        assert background_save.in_flight == []

    def test_a_rank_that_does_not_answer_is_given_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kills: waiting for ever for the files of a rank that was killed."""
        engine = start(**KEYS)
        monkeypatch.setattr(background_save, "WAIT_S", 0.5)
        if dist.get_rank() == 1:
            # As if it was killed: it says no word.
            monkeypatch.setattr(BackgroundSave, "_run", lambda self: None)
        engine.save_checkpoint(tmp_path, tag="t")
        join_threads()
        with refused("rank 1 has not written its files in time|another rank has lost"):
            train(engine, 1)
        assert not (tmp_path / "t").exists()

    def test_a_failure_that_nobody_is_left_to_raise_is_logged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine, told = start(**KEYS), list[str]()
        gate = gated(engine)
        gate.error = OSError(28, "No space left on device")
        monkeypatch.setattr(background_save.logger, "error", told.append)
        engine.save_checkpoint(tmp_path, tag="t")
        # A thread that does not run, as at exit.
        monkeypatch.setattr(threading, "main_thread", threading.Thread)
        gate.opened.set()
        background_save.in_flight[0]._thread.join()
        failed = "saving t in the background failed. rank 0: OSError: [Errno 28] No space left on"
        assert len(told) == 1 and told[0].startswith(failed)

    def test_a_pipeline_saves_in_the_background(self, tmp_path: Path) -> None:
        """Kills: an error of the save that a pipeline's step does not raise."""
        engine = pipeline.make(2, checkpoint={"writer": {"decoupled": True}})
        pipeline.train(engine, 1)
        gate = gated(engine)
        gate.error = OSError(5, "Input/output error") if dist.get_rank() == 0 else None
        engine.save_checkpoint(tmp_path, tag="bad")
        gate.opened.set()
        join_threads()
        with refused("rank 0: OSError"):
            pipeline.train(engine, 1)


SCRIPT = """
import sys, torch, deepspeed
model = torch.nn.Linear(300, 300)
engine = deepspeed.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"},
    "zero_optimization": {"stage": 1},
    "checkpoint": {"writer": {"decoupled": True}}})[0]
engine.save_checkpoint(sys.argv[1], tag="last")
raise SystemExit(3)
"""


def test_an_exiting_interpreter_finishes_the_save(tmp_path: Path) -> None:
    """Kills: a daemon thread, threads that cannot start at exit, a store gone too early."""
    env = environment_of_two()
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    envs = [{**env, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    ranks = [subprocess.Popen(command, env=own, **how) for own in envs]
    try:
        told = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [3, 3], told
    assert (tmp_path / "latest").read_text() == "last"
    assert (tmp_path / "last" / "manifest.json").is_file()
    assert "failed" not in "".join(told)


def test_a_host_copy_is_no_view_and_its_memory_is_used_again() -> None:
    """Kills: copies that share storage, memory that is not used again."""
    copy = HostCopy()
    flat = torch.arange(3_000_000, dtype=torch.float32)
    tens, many = flat[10:20].view(2, 5), [flat[20:2_000_000], torch.tensor(7)]
    content = {"a": tens, "b": many, "c": torch.empty(0, 3), "d": flat.view(3, -1).t()}
    content["e"] = tens.view(2, 5)
    first = copy(content)
    assert differences(content, first) == []
    assert first["e"] is first["a"]
    for tensor in (first["a"], *first["b"], first["d"]):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    flat.zero_()
    assert first["a"].flatten().tolist() == list(range(10, 20))
    copy.reset()
    second = copy(content)
    copy.reset()
    third = copy(content)
    assert second["b"][0].data_ptr() == third["b"][0].data_ptr()
    assert differences(content, third) == []


def test_saves_lock_what_they_save_and_no_more() -> None:
    """Kills: blocks that are rounded up, merged, or made anew for each save."""
    with simulate() as device:
        flats = [torch.randn(numel) for numel in (8_100_000, 300_000, 70_000)]
        content = [*flats, *(torch.full((1 + i,), float(i)) for i in range(300))]
        total, copy, places = sum(tensor.nbytes for tensor in content), HostCopy(), set[Any]()
        for _ in range(3):
            copy.reset()
            copied = copy(content)
            places.add(tuple(tensor.data_ptr() for tensor in copied[:3]))
            assert device.simulator.allocator.host.nbytes <= 1.05 * total
            assert all(device.is_pinned(tensor) for tensor in copied[:3])
        here = [[device.to_host(tensor) for tensor in one] for one in (content, copied)]
        assert differences(*here) == [] and len(places) == 1


def test_as_a_checkpoint_engine_it_is_a_queue(tmp_path: Path) -> None:
    """Kills: `commit` before the files are there, an error that is lost."""
    engine, path = DecoupledCheckpointEngine(TorchCheckpointEngine()), str(tmp_path / "a.pt")
    info: Any = None
    engine.create(info)
    value = torch.ones(3)
    engine.save({"x": value}, path)
    value.zero_()
    assert engine.is_decoupled() and engine.preserves_storage_sharing()
    assert engine.commit(info)
    assert torch.equal(torch.load(path)["x"], torch.ones(3))
    assert engine.records_of(path)[path].bytes == os.path.getsize(path)
    engine.save({}, str(tmp_path / "none" / "a.pt"))
    with pytest.raises(OSError, match="No such file"):
        engine.commit(info)
    assert torch.equal(engine.load(path)["x"], torch.ones(3))
    engine.cleanup()
