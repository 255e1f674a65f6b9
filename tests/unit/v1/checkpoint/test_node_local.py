"""`checkpoint.use_node_local_storage`: a folder for each of two nodes, told apart by a word."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed import comm as dist
from deepspeed.runtime.checkpointing import background_save
from deepspeed.runtime.checkpointing.folders import StorageNode
from unit.common import DistributedTest

from . import pipeline, test_experts
from .runs import config, differences, look, start, train

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
