"""`checkpoint.keep_last`: which checkpoints go, and that a kill leaves no half of one."""

import os
from pathlib import Path
from typing import Any

import pytest

from deepspeed.checkpoint import manifest
from deepspeed.checkpoint.manifest import newest_common_tag, published_tags, remove_oldest
from deepspeed.runtime.checkpointing import background_save
from unit.common import DistributedTest

from .runs import config, differences, look, start, train


def publish(folder: Path, *tags: str) -> None:
    """Folders with manifests, one second older than the next; `latest` names the last."""
    for index, tag in enumerate(tags):
        (folder / tag).mkdir()
        (folder / tag / "manifest.json").write_text("{}")
        os.utime(folder / tag / "manifest.json", (1000 + index, 1000 + index))
    (folder / "latest").write_text(tags[-1])


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_the_oldest_go_by_the_time_they_were_published(tmp_path: Path) -> None:
    """Kills: order by name or by number, one too many or too few."""
    publish(tmp_path, "step9", "step10", "a", "step2")
    assert published_tags(str(tmp_path)) == ["step9", "step10", "a", "step2"]
    assert remove_oldest(str(tmp_path), 2) == ["step9", "step10"]
    assert visible(tmp_path) == ["a", "step2"]
    assert remove_oldest(str(tmp_path), 2) == []


def test_what_latest_names_and_what_others_wrote_stays(tmp_path: Path) -> None:
    publish(tmp_path, "best", "one", "two", "three")
    (tmp_path / "latest").write_text("best")
    (tmp_path / "upstreams").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "manifest.json").write_text("{}")
    assert remove_oldest(str(tmp_path), 1) == ["one", "two"]
    assert visible(tmp_path) == [".hidden", "best", "three", "upstreams"]


def test_a_kill_leaves_no_part_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: removing files before renaming, leaving what an earlier kill left."""
    publish(tmp_path, "one", "two")
    with monkeypatch.context() as patch:
        # Killed before the first file is removed.
        patch.setattr(manifest.shutil, "rmtree", lambda path, ignore_errors: None)
        remove_oldest(str(tmp_path), 1)
    assert visible(tmp_path) == [".one.removed", "two"]
    remove_oldest(str(tmp_path), 1)
    assert visible(tmp_path) == ["two"]


def test_the_tag_that_all_nodes_have() -> None:
    """Kills: each node's own `latest`, the newest of any node."""
    assert newest_common_tag([("b", ["a", "b"]), ("b", ["a", "b"])]) == "b"
    assert newest_common_tag([("b", ["a", "b"]), ("a", ["a"])]) == "a"
    assert newest_common_tag([("c", ["a", "b", "c"]), ("b", ["b", "a"])]) == "b"
    assert newest_common_tag([("a", ["a"]), (None, [])]) is None
    assert newest_common_tag([(None, []), (None, [])]) is None


class TestSaving(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_three_saves_leave_two(self, tmpdir: Any, decoupled: bool) -> None:
        keys = {"checkpoint": {"keep_last": 2, "writer": {"decoupled": decoupled}}}
        engine = start(config(**keys))
        for _ in range(3):
            train(engine, 1)
            engine.save_checkpoint(str(tmpdir))
        for save in background_save.in_flight:
            save.join()
        assert sorted(os.listdir(str(tmpdir))) == [
            "global_step2",
            "global_step3",
            "latest",
            "zero_to_fp32.py",
        ]
        other = start(config(**keys), seed=2)
        assert other.load_checkpoint(str(tmpdir))[0] == str(tmpdir.join("global_step3"))
        assert differences(look(engine), {**look(other), "random": look(engine)["random"]}) == []

    def test_an_overwritten_tag_is_one(self, tmpdir: Any) -> None:
        engine = start(config(checkpoint={"keep_last": 2}))
        for tag in ("one", "two", "two", "two"):
            engine.save_checkpoint(str(tmpdir), tag=tag)
        assert sorted(os.listdir(str(tmpdir))) == ["latest", "one", "two", "zero_to_fp32.py"]
