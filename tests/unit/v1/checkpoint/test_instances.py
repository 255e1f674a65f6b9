"""Checkpoints of several optimizer instances: one's files, from which any number goes on."""

import itertools
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed import comm as dist
from unit.common import DistributedFixture, DistributedTest

from . import runs
from .runs import ACCUMULATE, BF16, by_name, differences, keep, kept, loaded, saved, train, zero

SCALE = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage1-accumulate": (1, ACCUMULATE),
    "stage2": (2, BF16),
    "stage3": (3, BF16),
    "stage2-fp16": (2, {"fp16": SCALE}),
}
STEPS, SAVED_AT = 3, 2


def configuration(case: str, instances: int) -> dict[str, Any]:
    stage, keys = CASES[case]
    return {**keys, **zero(stage, num_optimizer_instances=instances)}


class TestSameInstances(DistributedTest):
    world_size = 4

    def test_bit_equal(self, tmp_path: Path) -> None:
        # Kills: an instance that reads another rank's shard; shards of the second instance written
        # over those of the first.
        for case in CASES:
            engine = saved(tmp_path / case, SAVED_AT, **configuration(case, 2))
            straight = train(engine, STEPS - SAVED_AT)
            files = tmp_path / case / f"global_step{SAVED_AT}"
            shards = sorted(path.name for path in files.glob("*optim_states.pt"))
            # Upstream's tools take the ranks' files for the shards, and look for as many as the
            # model file says.
            own = [name.partition("zero_")[2][:9] for name in shards]
            assert own == ["pp_rank_0", "pp_rank_1"]
            models = sorted(files.glob("*model_states.pt"))
            # At stage 3 each shard's owner in the first instance writes its own.
            assert len(models) == (2 if CASES[case][0] == 3 else 1)
            assert torch.load(models[0], weights_only=False)["dp_world_size"] == 2
            resumed = loaded(tmp_path / case, 1, **configuration(case, 2))
            assert differences(straight, train(resumed, STEPS - SAVED_AT)) == [], case

    def test_shards_of_another_size_are_cut_anew(self, tmp_path: Path) -> None:
        # Kills: an instance's shards taken for those of all ranks, or the other way round.
        for case in ("stage2", "stage3"):
            wanted = by_name(saved(tmp_path / case, 2, **configuration(case, 2)))
            for instances in (1, 4):
                other = loaded(tmp_path / case, 1, **configuration(case, instances))
                assert differences(wanted, by_name(other)) == [], (case, instances)


class SavedByTwoInstances(DistributedFixture):
    """Two instances of two ranks, saved, in processes that have ended."""

    world_size = 4

    def run(self, class_tmpdir: Any) -> None:
        engine = saved(class_tmpdir, SAVED_AT, **configuration("stage2", 2))
        torch.save(owned(engine), f"{class_tmpdir}/owned{dist.get_rank()}.pt")


def owned(engine: Any) -> dict[str, Any]:
    """Masters, moments and weights of this rank."""
    kinds = ("master.", "state.", "module.")
    return {name: value for name, value in runs.look(engine).items() if name.startswith(kinds)}


class TestOtherNumberOfInstances(DistributedTest):
    world_size = 2

    def test_one_instance_of_the_same_size_goes_on(
        self, SavedByTwoInstances: Any, class_tmpdir: Any
    ) -> None:
        # Kills: files that only the number of ranks which wrote them can read.
        engine = loaded(class_tmpdir, seed=7, **configuration("stage2", 1))
        wanted = torch.load(f"{class_tmpdir}/owned{dist.get_rank()}.pt", weights_only=False)
        assert differences(wanted, owned(engine)) == []
        assert any(name.startswith("state.") for name in wanted)


# Ways to divide state over ranks: keys of the block, of which `ranks` stands for half of the world.
WAYS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 1, instances": {"stage": 1, "num_optimizer_instances": 2},
    "stage 2": {"stage": 2},
    "stage 2, instances": {"stage": 2, "num_optimizer_instances": 2},
    "stage 3": {"stage": 3},
    "stage 3, instances": {"stage": 3, "num_optimizer_instances": 2},
    "stage 3, MiCS": {"stage": 3, "mics_shard_size": "ranks"},
    "stage 3, hpZ": {"stage": 3, "zero_hpz_partition_size": "ranks"},
}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": BF16}
WORLDS = (2, 4)
TABLE = os.environ.get("DS_RESHARD_MATRIX")


class Crossing(NamedTuple):
    """A folder that `world` ranks have saved."""

    precision: str
    way: str
    world: int

    @property
    def folder(self) -> str:
        """Its name."""
        return f"{self.precision}, {self.way}, {self.world} ranks"

    def start(self, seed: int) -> Any:
        """An engine that divides its state so."""
        half = self.world // 2
        keys = {key: half if value == "ranks" else value for key, value in WAYS[self.way].items()}
        block = {"stage3_param_persistence_threshold": 7} if keys["stage"] == 3 else {}
        return runs.start(seed, **PRECISIONS[self.precision], **zero(**block, **keys))


def crossings(into: Crossing) -> list[Crossing]:
    """What is loaded into a way by a number of ranks: all in the campaign, else a share."""
    precision, ways = into.precision, list(WAYS)
    every = (Crossing(precision, *one) for one in itertools.product(WAYS, WORLDS))
    others = [one for one in every if one != into]
    if TABLE:
        return others
    number = ways.index(into.way)
    if precision != "bf16" or (number + into.world // 2) % 2:
        return []
    return [one for one in others if one.world == 4 and (ways.index(one.way) + number) % 4 == 0]


EVERY = [Crossing(*one) for one in itertools.product(PRECISIONS, WAYS, WORLDS)]
NEEDED = {one for into in EVERY for one in crossings(into)}


class SavedEveryWay(DistributedFixture):
    """A folder of each way, with what it holds by name."""

    world_size = list(WORLDS) if TABLE else 4
    exec_timeout = 1200 if TABLE else 240

    def run(self, class_tmpdir: Any) -> None:
        for number, one in enumerate(sorted(NEEDED)):
            if one.world == dist.get_world_size():
                engine = one.start(seed=number + 1)
                train(engine, SAVED_AT)
                engine.save_checkpoint(f"{class_tmpdir}/{one.folder}")
                keep(f"{class_tmpdir}/{one.folder}", by_name(engine))
                engine.destroy()


class TestEveryWayIntoEveryOther(DistributedTest):
    """Weights, masters and moments, bit-equal by name.

    Kills: an instance's shards taken for all ranks', copies of gathered shards written or kept
    over loading, a stage's cuts read as another's.
    """

    world_size = list(WORLDS)
    exec_timeout = 1200 if TABLE else 240

    def test(self, SavedEveryWay: Any, class_tmpdir: Any) -> None:
        outcomes = {}
        for into in EVERY:
            if into.world != dist.get_world_size() or not crossings(into):
                continue
            engine = into.start(seed=77)
            train(engine, 1)
            for one in crossings(into):
                engine.load_checkpoint(f"{class_tmpdir}/{one.folder}")
                wanted = kept(f"{class_tmpdir}/{one.folder}")
                outcomes[one, into] = differences(wanted, by_name(engine))
            train(engine, 1)
            engine.destroy()
        if TABLE and dist.get_rank() == 0:
            held = sum(not found for found in outcomes.values())
            with open(TABLE, "a") as file:
                file.write(f"ways, into {dist.get_world_size()} ranks: {held} of {len(outcomes)}\n")
        assert outcomes and not any(outcomes.values()), {k: v[:3] for k, v in outcomes.items() if v}
