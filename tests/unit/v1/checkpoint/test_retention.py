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
from unit.v1.looping import each

from . import test_experts
from . import test_pipeline as pipeline
from .runs import BF16, differences, look, saved, start, train, zero

BESIDE = ["latest", "zero_to_fp32.py"]


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

    @each(decoupled=(False, True))
    def test_three_saves_leave_two(self, tmp_path: Path, decoupled: bool) -> None:
        keys = {"checkpoint": {"keep_last": 2, "writer": {"decoupled": decoupled}}}
        engine = start(**keys)
        folder = tmp_path / str(decoupled)
        for _ in range(3):
            train(engine, 1)
            engine.save_checkpoint(folder)
        for save in background_save.in_flight:
            save.join()
        assert sorted(os.listdir(folder)) == ["global_step2", "global_step3", *BESIDE]
        other = start(seed=2, **keys)
        assert other.load_checkpoint(folder)[0] == str(folder / "global_step3")
        assert differences(look(engine), {**look(other), "random": look(engine)["random"]}) == []
        # A tag that is overwritten is one.
        for tag in ("A", "B", "B", "B"):
            engine.save_checkpoint(folder, tag=tag)
        engine.destroy()
        dist.barrier()
        assert sorted(os.listdir(folder)) == ["A", "B", *BESIDE]


LOCAL: dict[str, Any] = {"checkpoint": {"use_node_local_storage": True}}


def place_on_nodes(folder: Any) -> Path:
    """Say that ranks 0 and 1 are one node, 2 and 3 another; returns the node's folder."""
    node, local = divmod(dist.get_rank(), 2)
    os.environ.update(CROSS_RANK=str(node), LOCAL_RANK=str(local), LOCAL_SIZE="2")
    return Path(str(folder), f"node{node}")


class TestTwoNodes(DistributedTest):
    """Kills: a file that another node has, one that two ranks write, one rename for both."""

    world_size = 4

    def resumes(
        self, folder: Path, make: Callable[..., Any], run: Callable[[Any, int], Any], **keys: Any
    ) -> list[str]:
        """Save, go on, and go on from that with another engine; returns this node's files."""
        engine, other = (make(seed=seed, **keys, **LOCAL) for seed in (1, 2))
        run(engine, 1)
        engine.save_checkpoint(folder, tag="t")
        straight = run(engine, 1)
        other.load_checkpoint(folder)
        assert differences(straight, run(other, 1)) == []
        assert sorted(os.listdir(folder)) == sorted([*BESIDE, "t"])
        return sorted(path.name for path in (folder / "t").glob("*.pt"))

    def test_each_node_has_what_its_ranks_load(self, tmp_path: Path) -> None:
        folder = place_on_nodes(tmp_path)
        node = dist.get_rank() // 2
        ranks = (2 * node, 2 * node + 1)
        always = [*(f"host_state_rank_{rank}.pt" for rank in ranks), "mp_rank_00_model_states.pt"]
        for number, (keys, own) in enumerate(
            ((zero(0), ()), (zero(2), ranks), (zero(2, num_optimizer_instances=2), (0, 1)))
        ):
            found = self.resumes(folder / str(number), start, train, **BF16, **keys)
            shards = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in own]
            assert found == sorted([*shards, *always])

        found = self.resumes(folder / "stages", pipeline.make, pipeline.train, stages=2)
        parts = [f"mp_rank_0{stage}_model_states.pt" in found for stage in (node, 1 - node)]
        assert parts == [True, False]

    def test_experts_on_two_nodes(self, tmp_path: Path) -> None:
        def run(engine: Any, steps: int) -> Any:
            test_experts.train(engine, steps)
            return test_experts.by_name(engine)

        folder = place_on_nodes(tmp_path)
        for case in ("fp32-0", "bf16-1"):
            keys = test_experts.CASES[case]
            found = self.resumes(folder / case, test_experts.make, run, ep_size=2, **keys)
            # All experts are on both nodes: each node writes all of them.
            assert sum("_expert_" in name for name in found) == 2 * test_experts.EXPERTS

    def test_a_node_that_was_killed_before_it_published(self, tmp_path: Path) -> None:
        """Kills: nodes that load different checkpoints, half of the ranks at a newer one."""
        folder = place_on_nodes(tmp_path)
        checkpoint = {**LOCAL["checkpoint"], "writer": {"decoupled": True}}
        keys = {**BF16, **zero(1), "checkpoint": checkpoint}
        engine = saved(folder, tag="old", **keys)
        before = look(engine)
        train(engine, 1)
        engine.save_checkpoint(folder, tag="new")
        for save in background_save.in_flight:
            save.join()
        assert (folder / "latest").read_text() == "new"
        dist.barrier()
        if dist.get_rank() == 2:
            shutil.rmtree(folder / "new")
            (folder / "latest").write_text("old")
        dist.barrier()
        other = start(seed=2, **keys)
        assert other.load_checkpoint(folder)[0] == str(folder / "old")
        assert differences(before, look(other)) == []
        # One node that cannot be told from two.
        os.environ["CROSS_RANK"] = "0"
        same = "use_node_local_storage: ranks of one node have the same local rank"
        with pytest.raises(ValueError, match=same):
            saved(tmp_path, 0, **LOCAL)


def test_who_writes_and_who_shares() -> None:
    """Kills: the first of all ranks instead of the first that shares the folder."""
    node, other = (StorageNode(rank, (2, 3), (0, 2)) for rank in (2, 3))
    assert node.publishes and node.is_first([0, 1, 2, 3]) and node.share([0, 1, 2]) == (0, 1)
    assert not other.publishes and other.share([1, 3, 2]) == (1, 2)
    assert other.is_first([0, 1, 3]) and not other.is_first([0, 2, 3])
