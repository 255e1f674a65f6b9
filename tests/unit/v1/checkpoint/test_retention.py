"""Where checkpoints lie and which go: `keep_last`, and a folder for each of two nodes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed import comm as dist
from deepspeed.checkpoint import manifest
from deepspeed.checkpoint.manifest import newest_common_tag, published_tags, remove_oldest
from deepspeed.runtime.checkpointing import background_save
from deepspeed.runtime.checkpointing.folders import StorageNode
from unit.common import DistributedTest

from . import test_experts
from . import test_pipeline as pipeline
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


LOCAL: dict[str, Any] = {"use_node_local_storage": True}


def place_on_nodes(folder: Any) -> Path:
    """Say that ranks 0 and 1 are one node, 2 and 3 another; returns the node's folder."""
    node, local = divmod(dist.get_rank(), 2)
    os.environ.update(CROSS_RANK=str(node), LOCAL_RANK=str(local), LOCAL_SIZE="2")
    return Path(str(folder), f"node{node}")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.pt"))


def hosts() -> list[str]:
    first = dist.get_rank() // 2 * 2
    return [f"host_state_rank_{rank}.pt" for rank in (first, first + 1)]


class TestTwoNodes(DistributedTest):
    """Kills: a file that another node has, one that two ranks write, one rename for both."""

    world_size = 4

    def resumes(
        self, folder: Path, make: Callable[[int], Any], run: Callable[[Any, int], Any]
    ) -> list[str]:
        """Save, go on, and go on from that with another engine; returns this node's files."""
        engine = make(1)
        run(engine, 1)
        engine.save_checkpoint(str(folder), tag="t")
        straight = run(engine, 1)
        other = make(2)
        other.load_checkpoint(str(folder))
        assert differences(straight, run(other, 1)) == []
        assert sorted(os.listdir(folder)) == ["latest", "t", "zero_to_fp32.py"]
        return files(folder / "t")

    def test_each_node_has_what_its_ranks_load(self, tmpdir: Any) -> None:
        folder = place_on_nodes(tmpdir)
        first = dist.get_rank() // 2 * 2
        zero = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)]
        for stage in (0, 2):
            keys = {
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": stage},
                "checkpoint": LOCAL,
            }
            found = self.resumes(
                folder / f"stage{stage}", lambda seed, keys=keys: start(config(**keys), seed), train
            )
            own = zero[first : first + 2] if stage else []
            assert found == sorted([*own, *hosts(), "mp_rank_00_model_states.pt"])

    def test_instances_on_two_nodes(self, tmpdir: Any) -> None:
        folder = place_on_nodes(tmpdir)
        keys = {
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "num_optimizer_instances": 2},
            "checkpoint": LOCAL,
        }
        found = self.resumes(folder, lambda seed: start(config(**keys), seed), train)
        shards = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
        assert found == sorted([*shards, *hosts(), "mp_rank_00_model_states.pt"])

    def test_stages_of_a_pipeline_on_two_nodes(self, tmpdir: Any) -> None:
        folder = place_on_nodes(tmpdir)
        stage = dist.get_rank() // 2
        found = self.resumes(
            folder, lambda seed: pipeline.make(2, seed, checkpoint=LOCAL), pipeline.train
        )
        assert (
            f"mp_rank_0{stage}_model_states.pt" in found
            and f"mp_rank_0{1 - stage}_model_states.pt" not in found
        )

    def test_experts_on_two_nodes(self, tmpdir: Any) -> None:
        folder = place_on_nodes(tmpdir)
        for number, case in enumerate(("fp32-0", "bf16-1")):
            keys = {**test_experts.CASES[case], "checkpoint": LOCAL}

            def run(engine: Any, steps: int) -> Any:
                test_experts.train(engine, steps)
                return test_experts.by_name(engine)

            # All experts are on both nodes: each node writes all of them.
            found = self.resumes(
                folder / str(number),
                lambda seed, keys=keys: test_experts.make(2, seed, **keys),
                run,
            )
            assert sum("_expert_" in name for name in found) == 2 * test_experts.EXPERTS

    def test_a_node_that_was_killed_before_it_published(self, tmpdir: Any) -> None:
        """Kills: nodes that load different checkpoints, half of the ranks at a newer one."""
        folder = place_on_nodes(tmpdir)
        checkpoint = {**LOCAL, "writer": {"decoupled": True}}
        keys = {
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "checkpoint": checkpoint,
        }
        engine = start(config(**keys))
        train(engine, 1)
        engine.save_checkpoint(str(folder), tag="old")
        before = look(engine)
        train(engine, 1)
        engine.save_checkpoint(str(folder), tag="new")
        for save in background_save.in_flight:
            save.join()
        assert (folder / "latest").read_text() == "new"
        dist.barrier()
        if dist.get_rank() == 2:
            shutil.rmtree(folder / "new")
            (folder / "latest").write_text("old")
        dist.barrier()
        other = start(config(**keys), seed=2)
        assert other.load_checkpoint(str(folder))[0] == str(folder / "old")
        assert differences(before, look(other)) == []

    def test_one_node_cannot_be_told_from_two(self, tmpdir: Any) -> None:
        place_on_nodes(tmpdir)
        os.environ["CROSS_RANK"] = "0"
        engine = start(config(checkpoint=LOCAL))
        with pytest.raises(
            ValueError, match=r"use_node_local_storage: ranks of one node have the same local rank"
        ):
            engine.save_checkpoint(str(tmpdir))


def test_who_writes_and_who_shares() -> None:
    """Kills: the first of all ranks instead of the first that shares the folder."""
    node = StorageNode(2, (2, 3), (0, 2))
    assert node.publishes and node.is_first([0, 1, 2, 3]) and node.share([0, 1, 2]) == (0, 1)
    assert StorageNode(3, (2, 3), (0, 2)).share([1, 3, 2]) == (1, 2)
    assert not StorageNode(3, (2, 3), (0, 2)).publishes
    assert not StorageNode(3, (2, 3), (0, 2)).is_first([0, 2, 3])
    assert StorageNode(3, (2, 3), (0, 2)).is_first([0, 1, 3])
