"""A failed or killed save, damaged files, full and read-only disks never cost a good checkpoint."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import files, torch_files
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpointing.folders import StorageNode
from deepspeed.runtime.checkpointing.save_job import SaveJob, put_converter
from unit.common import DistributedFixture, DistributedTest, get_master_port
from unit.launcher import forked

from . import disk_run
from .kills import CASES, Campaign
from .runs import config, differences, look, start, train

KEYS = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


class TestFailedSaves(DistributedTest):
    """Kills: writing in place, `latest` before the files are there, one rank going on alone."""

    world_size = 2

    @pytest.mark.parametrize("tag", ["good", "next"])
    def test_a_full_disk_on_one_rank(
        self, tmpdir: Any, monkeypatch: pytest.MonkeyPatch, tag: str
    ) -> None:
        engine = start(config(**KEYS))
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir), tag="good")
        before = contents(Path(str(tmpdir)))
        dist.barrier()
        train(engine, 1)
        write = torch_files.write_file

        def full(path: str, content: Any, options: Any) -> Any:
            record = write(path, content, options)
            if dist.get_rank() == 1:
                raise OSError(28, "No space left on device", path)
            return record

        monkeypatch.setattr(torch_checkpoint_engine, "write_file", full)
        with pytest.raises(
            CheckpointError, match=rf"saving {tag} failed\. rank 1: OSError.*No space left"
        ):
            engine.save_checkpoint(str(tmpdir), tag=tag)
        dist.barrier()
        # `latest`, the older checkpoint of that tag, and nothing half-written.
        assert contents(Path(str(tmpdir))) == before
        monkeypatch.undo()
        engine.save_checkpoint(str(tmpdir), tag=tag)
        assert Path(str(tmpdir), "latest").read_text() == tag

    def test_a_kill_between_the_two_renames(
        self, tmpdir: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = start(config(**KEYS))
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir), tag="same")
        first = look(engine)
        train(engine, 1)
        rename = os.rename

        def killed(source: str, target: str) -> None:
            if source.endswith(".saving"):
                raise KeyboardInterrupt
            rename(source, target)

        if dist.get_rank() == 0:
            monkeypatch.setattr(os, "rename", killed)
            with pytest.raises(KeyboardInterrupt):
                files.replace_folder(str(tmpdir.join(".same.saving")), str(tmpdir.join("same")))
            monkeypatch.undo()
        dist.barrier()
        other = start(config(**KEYS), seed=2)
        path, _ = other.load_checkpoint(str(tmpdir))
        assert path == str(tmpdir.join("same"))
        assert differences(first, look(other)) == []


class Killed(DistributedFixture):
    """A run that was killed while both ranks wrote their second checkpoint."""

    world_size = 1

    def run(self, class_tmpdir: Any) -> None:
        engine = start(config(**KEYS))
        train(engine, 1)
        engine.save_checkpoint(str(class_tmpdir))
        train(engine, 1)
        pid = os.fork()
        if pid == 0:
            files_written = iter(range(10))
            write = torch_files.write_file

            def dying(path: str, content: Any, options: Any) -> Any:
                record = write(path, content, options)
                if next(files_written) == 1:
                    os._exit(9)
                return record

            torch_checkpoint_engine.write_file = dying  # in the forked process only
            engine.save_checkpoint(str(class_tmpdir))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


class TestAfterAKill(DistributedTest):
    world_size = 1

    def test_the_older_checkpoint_is_whole(self, Killed: Any, class_tmpdir: Any) -> None:
        folder = Path(str(class_tmpdir))
        assert (folder / "latest").read_text() == "global_step1"
        assert not (folder / "global_step2").exists()
        engine = start(config(**KEYS), seed=2)
        assert engine.load_checkpoint(str(folder))[0] == str(folder / "global_step1")
        train(engine, 1)
        engine.save_checkpoint(str(folder))  # over what the killed one left
        assert (folder / "latest").read_text() == "global_step2"
        assert not list(folder.glob(".*"))


class TestBadFiles(DistributedTest):
    """Kills: loading half of a checkpoint, one rank raising while the others wait."""

    world_size = 2

    def saved(self, folder: Any) -> Any:
        # Unchecked: the damage must be found without a manifest too, as in upstream's folders.
        engine = start(config(**KEYS, checkpoint={"verify": "off"}))
        train(engine, 1)
        engine.save_checkpoint(str(folder), tag="good")
        return engine

    def test_a_damaged_file_is_named_on_every_rank_and_nothing_changes(self, tmpdir: Any) -> None:
        engine = self.saved(tmpdir)
        train(engine, 1)
        before = look(engine)
        for name in (
            "mp_rank_00_model_states.pt",
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        ):
            path = Path(str(tmpdir), "good", name)
            whole = path.read_bytes()
            damages = {
                "truncated": whole[: len(whole) // 2],
                "empty": b"",
                "noise": b"x" * 999,
                "missing": None,
            }
            for damage, left in damages.items():
                self.replace(path, left)
                reason = "does not exist" if left is None else "cannot be read.*truncated, damaged"
                with pytest.raises(CheckpointError, match=rf"(?s){name}.*{reason}"):
                    engine.load_checkpoint(str(tmpdir))
                assert differences(before, look(engine)) == [], damage
            self.replace(path, whole)
        engine.load_checkpoint(str(tmpdir))
        assert engine.global_steps == 1

    @staticmethod
    def replace(path: Path, content: bytes | None) -> None:
        """Rank 0 writes other content, or removes the file, between two barriers."""
        dist.barrier()
        if dist.get_rank() == 0:
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
        dist.barrier()

    def test_a_wrong_tag_and_code_in_a_file(self, tmpdir: Any) -> None:
        engine = self.saved(tmpdir)
        with pytest.raises(CheckpointError, match=r"tag 'bad' is not in .*; there are: good"):
            engine.load_checkpoint(str(tmpdir), tag="bad")
        marker = Path(str(tmpdir), "ran")
        if dist.get_rank() == 0:
            torch.save(
                {"module": Evil(str(marker))},
                Path(str(tmpdir), "good", "mp_rank_00_model_states.pt"),
            )
        dist.barrier()
        with pytest.raises(CheckpointError, match="cannot be read"):
            engine.load_checkpoint(str(tmpdir))
        assert not marker.exists()

    def test_another_model_and_shards_without_their_files(self, tmpdir: Any) -> None:
        engine = self.saved(tmpdir)
        path = Path(
            str(tmpdir), "good", f"bf16_zero_pp_rank_{dist.get_rank()}_mp_rank_00_optim_states.pt"
        )
        content = torch.load(path, weights_only=False)
        content["optimizer_state_dict"]["partition_count"] = [4, 4]
        torch.save(content, path)
        dist.barrier()
        with pytest.raises(
            CheckpointError,
            match=r"rank_00_optim_states\.pt is one of 4 shards, but there are files of 2",
        ):
            engine.load_checkpoint(str(tmpdir))
        engine.module.last = torch.nn.Linear(7, 4).bfloat16()
        with pytest.raises(
            CheckpointError,
            match=r"of another model: last\.weight has shape \(3, 7\), this model's \(4, 7\)",
        ):
            engine.load_checkpoint(str(tmpdir), load_module_only=True)


class Evil:
    """Pickles into a call that makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


NAMES = [case.name for case in CASES]


class TestKills(DistributedTest):
    """Kills: `latest` before the rename (found by the campaign after 32 kills), an old folder of
    the same tag that is not put back (after 2). It found dropout that repeated itself in a resumed
    pipeline, and `destroy()` waiting for a dead rank.
    """

    world_size = 1
    init_distributed = False
    set_dist_env = False

    @pytest.mark.parametrize("name", NAMES)
    def test_the_next_run_goes_on(self, name: str, tmp_path: Path) -> None:
        campaign = Campaign(CASES[NAMES.index(name)], tmp_path, seed=1)
        campaign.run(kills=1)
        assert campaign.kills == 1
        assert campaign.problems == []


def test_full_and_read_only_disks(tmp_path: Path) -> None:
    """Kills: a rank going on alone, an older checkpoint or state changed by a failed save."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        command = ["unshare", "-m", *disk_run.MOUNT, str(folder)]
        possible = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("nothing can be mounted here: it takes unshare, and to be root")
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": get_master_port()}
    ranks = forked.start(
        [sys.executable, disk_run.__file__, str(folder)],
        {**os.environ, **world, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        restore_signals=False,  # as a program of Python begins
    )
    told, _ = ranks.communicate(timeout=150)
    assert (ranks.returncode, told.count("all held")) == (0, 2), told


def test_everything_is_on_disk_before_its_name_and_latest_is_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a file or folder not flushed before the rename that relies on it."""
    seen: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def short(path: Any) -> str:
        return os.path.relpath(path, tmp_path)

    def seen_fsync(handle: int) -> None:
        seen.append(f"flush {short(os.readlink(f'/proc/self/fd/{handle}'))}")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    for name, function in (("rename", rename), ("replace", replace)):

        def seen_rename(source: Any, target: Any, function: Any = function) -> None:
            seen.append(f"{short(source)} -> {short(target)}")
            function(source, target)

        monkeypatch.setattr(os, name, seen_rename)
    info = CheckpointCommitInfo("T", str(tmp_path), True)
    for _ in range(2):
        seen.clear()
        node = StorageNode(0, (0,), (0,))
        job = SaveJob(TorchCheckpointEngine(), info, node, 1, {}, put_converter)
        job.prepare()
        job.write({"files": {}}, lambda put: put("a.pt", {"x": 1}))
        job.publish()
    assert [step for step in seen if "zero_to_fp32" not in step] == [
        "flush .T.saving/a.pt",
        "flush .T.saving/manifest.json",
        "flush .T.saving",
        "T -> .T.replaced",
        ".T.saving -> T",
        "flush .",
        "flush .latest.saving",
        ".latest.saving -> latest",
        "flush .",
    ]
