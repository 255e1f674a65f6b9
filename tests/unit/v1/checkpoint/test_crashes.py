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
from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpointing.folders import StorageNode
from deepspeed.runtime.checkpointing.save_job import SaveJob, put_converter
from unit.common import DistributedTest
from unit.launcher import forked
from unit.v1.looping import each

from . import disk_run, runs
from .kills import CASES, Campaign
from .runs import BF16, contents, differences, look, on_rank_0, put, refused, saved, start, train

KEYS = {**BF16, **runs.zero(2)}


class TestFailedSaves(DistributedTest):
    """Kills: writing in place, `latest` before the files are there, one rank going on alone."""

    world_size = 2

    @each(tag=("good", "next"))
    def test_a_full_disk_on_one_rank(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str
    ) -> None:
        folder = tmp_path / tag
        engine = saved(folder, tag="good", **KEYS)
        before = contents(folder)
        dist.barrier()
        train(engine, 1)
        write = torch_files.write_file

        def full(path: str, content: Any, options: Any) -> Any:
            record = write(path, content, options)
            if dist.get_rank() == 1:
                raise OSError(28, "No space left on device", path)
            return record

        monkeypatch.setattr(torch_checkpoint_engine, "write_file", full)
        with refused(rf"saving {tag} failed\. rank 1: OSError.*No space left"):
            engine.save_checkpoint(folder, tag=tag)
        dist.barrier()
        # `latest`, the older checkpoint of that tag, and nothing half-written.
        assert contents(folder) == before
        monkeypatch.undo()
        engine.save_checkpoint(folder, tag=tag)
        assert (folder / "latest").read_text() == tag

    def test_a_kill_between_the_two_renames(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = look(saved(tmp_path, tag="same", **KEYS))
        rename = os.rename

        def killed(source: str, target: str) -> None:
            if source.endswith(".saving"):
                raise KeyboardInterrupt
            rename(source, target)

        if dist.get_rank() == 0:
            monkeypatch.setattr(os, "rename", killed)
            with pytest.raises(KeyboardInterrupt):
                files.replace_folder(str(tmp_path / ".same.saving"), str(tmp_path / "same"))
            monkeypatch.undo()
        dist.barrier()
        other = start(seed=2, **KEYS)
        assert other.load_checkpoint(tmp_path)[0] == str(tmp_path / "same")
        assert differences(first, look(other)) == []


class TestAfterAKill(DistributedTest):
    world_size = 1

    def test_the_older_checkpoint_is_whole(self, tmp_path: Path) -> None:
        engine = saved(tmp_path, **KEYS)
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
            engine.save_checkpoint(tmp_path)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        assert (tmp_path / "latest").read_text() == "global_step1"
        assert not (tmp_path / "global_step2").exists()
        other = start(seed=2, **KEYS)
        assert other.load_checkpoint(tmp_path)[0] == str(tmp_path / "global_step1")
        train(other, 1)
        other.save_checkpoint(tmp_path)  # over what the killed one left
        assert (tmp_path / "latest").read_text() == "global_step2"
        assert not list(tmp_path.glob(".*"))


class TestBadFiles(DistributedTest):
    """Kills: loading half of a checkpoint, one rank raising while the others wait."""

    world_size = 2

    def test_named_on_every_rank_and_nothing_changes(self, tmp_path: Path) -> None:
        # Unchecked: the damage must be found without a manifest too, as in upstream's folders.
        engine = saved(tmp_path, tag="good", **KEYS, checkpoint={"verify": "off"})
        train(engine, 1)
        before = look(engine)
        shards = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
        for name in ("mp_rank_00_model_states.pt", shards[1]):
            path = tmp_path / "good" / name
            whole = path.read_bytes()
            half = whole[: len(whole) // 2]
            damages = {"truncated": half, "empty": b"", "noise": b"x" * 999, "missing": None}
            for damage, left in damages.items():
                on_rank_0(lambda path=path, left=left: put(path, left))
                reason = "does not exist" if left is None else "cannot be read.*truncated, damaged"
                with refused(rf"(?s){name}.*{reason}"):
                    engine.load_checkpoint(tmp_path)
                assert differences(before, look(engine)) == [], damage
            on_rank_0(lambda path=path, whole=whole: put(path, whole))
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 1

        with refused(r"tag 'bad' is not in .*; there are: good"):
            engine.load_checkpoint(tmp_path, tag="bad")
        own = tmp_path / "good" / shards[dist.get_rank()]
        content = torch.load(own, weights_only=False)
        content["optimizer_state_dict"]["partition_count"] = [4, 4]
        torch.save(content, own)
        dist.barrier()
        with refused(r"rank_00_optim_states\.pt is one of 4 shards, but there are files of 2"):
            engine.load_checkpoint(tmp_path)
        engine.module.last = torch.nn.Linear(7, 4).bfloat16()
        with refused(r"of another model: last\.weight has shape \(3, 7\), this model's \(4, 7\)"):
            engine.load_checkpoint(tmp_path, load_module_only=True)


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
    ranks = forked.start(
        [sys.executable, disk_run.__file__, str(folder)],
        runs.environment_of_two(),
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
