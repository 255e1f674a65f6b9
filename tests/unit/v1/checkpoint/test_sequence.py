"""In which order a save flushes and renames, from which follows what a crash leaves."""

import os
from pathlib import Path
from typing import Any

import pytest

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpointing.folders import StorageNode
from deepspeed.runtime.checkpointing.save_job import SaveJob, put_converter


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
