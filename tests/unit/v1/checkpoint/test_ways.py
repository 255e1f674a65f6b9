"""Checkpoints of every way to divide state over ranks go on in every other, bit-equal by name; of
several optimizer instances one's files are written.
"""

import itertools
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed import comm as dist
from unit.common import DistributedFixture, DistributedTest
from unit.models import seeded

from . import runs
from .runs import (
    ACCUMULATE,
    BF16,
    CPU,
    FP16,
    differences,
    keep,
    kept,
    loaded,
    of_kind,
    saved,
    train,
    zero,
)

SCALE = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage1-accumulate": (1, ACCUMULATE),
    "stage2": (2, BF16),
    "stage3": (3, BF16),
    "stage2-fp16": (2, {"fp16": SCALE}),
}
STEPS, SAVED_AT = 3, 2


class TestSameInstances(DistributedTest):
    world_size = 4

    def test_bit_equal(self, tmp_path: Path) -> None:
        # Kills: an instance that reads another rank's shard; shards of the second instance written
        # over those of the first.
        for case, (stage, keys) in CASES.items():
            how = {**keys, **zero(stage, num_optimizer_instances=2)}
            engine = saved(tmp_path / case, SAVED_AT, **how)
            straight = train(engine, STEPS - SAVED_AT)
            files = tmp_path / case / f"global_step{SAVED_AT}"
            shards = sorted(path.name for path in files.glob("*optim_states.pt"))
            # Upstream's tools take the ranks' files for the shards, and look for as many as the
            # model file says.
            own = [name.partition("zero_")[2][:9] for name in shards]
            assert own == ["pp_rank_0", "pp_rank_1"]
            models = sorted(files.glob("*model_states.pt"))
            # At stage 3 each shard's owner in the first instance writes its own.
            assert len(models) == (2 if stage == 3 else 1)
            assert torch.load(models[0], weights_only=False)["dp_world_size"] == 2
            resumed = loaded(tmp_path / case, 1, **how)
            assert differences(straight, train(resumed, STEPS - SAVED_AT)) == [], case


INSTANCES = {"num_optimizer_instances": 2}
# Ways to divide state over ranks, of each precision; of the block's keys `ranks` stands for half of
# the world.
WAYS: dict[str, dict[str, Any]] = {
    "fp32: 0": {},
    "fp32: 1": zero(1),
    "fp32: 2": zero(2),
    "fp32: 2, elastic": zero(2, elastic_checkpoint=True),
    "fp32: 2, dealt": zero(2, round_robin_gradients=True),
    "fp32: 3": zero(3),
    "bf16: 0": BF16,
    "bf16: 0, accumulate": ACCUMULATE,
    "bf16: 1": {**BF16, **zero(1)},
    "bf16: 1, accumulate": {**ACCUMULATE, **zero(1)},
    "bf16: 1, instances": {**BF16, **zero(1, **INSTANCES)},
    "bf16: 2": {**BF16, **zero(2)},
    "bf16: 2, instances": {**BF16, **zero(2, **INSTANCES)},
    "bf16: 3": {**BF16, **zero(3)},
    "bf16: 3, instances": {**BF16, **zero(3, **INSTANCES)},
    "bf16: 3, MiCS": {**BF16, **zero(3, mics_shard_size="ranks")},
    "bf16: 3, hpZ": {**BF16, **zero(3, zero_hpz_partition_size="ranks")},
    "bf16: 3, on the host": {**BF16, **zero(3, **CPU, offload_param={"device": "cpu"})},
    "bf16: 3, a part there": {**BF16, **zero(3, offload_optimizer={"device": "cpu", "ratio": 0.4})},
    "fp16: 0": FP16,
    "fp16: 0, whole": {**FP16, **runs.TORCH_ADAM},
    "fp16: 2": {**FP16, **zero(2)},
}
WORLDS = (1, 2, 3, 4)
TABLE = os.environ.get("DS_RESHARD_MATRIX")


class Net(runs.Net):
    """With a parameter that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


def make(way: str, seed: int = 1, **keys: Any) -> Any:
    """An engine that divides its state so; its global batch is the same on 1, 2 and 4 ranks."""
    keys, ranks = {**WAYS[way], **keys}, dist.get_world_size()
    if ": 3" in way:
        block = keys["zero_optimization"].items()
        own = {key: ranks // 2 if value == "ranks" else value for key, value in block}
        keys["zero_optimization"] = {"stage3_param_persistence_threshold": 7, **own}
    sizes = {"train_micro_batch_size_per_gpu": 4 // ranks, "gradient_accumulation_steps": 1}
    return runs.start(seed, seeded(Net, seed=seed), **sizes, **keys)


def held(engine: Any) -> dict[str, Any]:
    """What no way changes: parameters, masters and moments by name, counters, scale and data."""
    scaler = vars(engine.optimizer.loss_scaler) if engine.fp16_enabled() else {}
    return {
        **runs.by_name(engine),
        "scaler": {key: value for key, value in scaler.items() if key.startswith("cur_")},
        "counts": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "rates": engine.get_lr(),
        "data": engine.training_dataloader.state_dict(),
    }


class Layout(NamedTuple):
    """State divided in a way over `world` ranks."""

    way: str
    world: int

    @property
    def folder(self) -> str:
        """Where it is saved."""
        return f"{self.way}, {self.world} ranks"


LAYOUTS = [
    Layout(way, world)
    for way, world in itertools.product(WAYS, WORLDS)
    # Of copies in halves of the ranks there are even numbers.
    if world % 2 == 0 or not way.endswith(("instances", "MiCS", "hpZ"))
]


def crossings(into: Layout) -> list[Layout]:
    """What is loaded into a layout: all in the campaign, else a share in which ways of a precision
    go into each other. The same layout is `test_resume`'s.
    """
    precision = into.way.partition(":")[0]
    others = [one for one in LAYOUTS if one.way.startswith(precision) and one != into]
    return [one for one in others if TABLE or is_of_the_share(one, into)]


# As many shards, of another number of ranks; groups of another size.
ALWAYS = [
    (Layout("bf16: 2, instances", 4), Layout("bf16: 2", 2)),
    (Layout("bf16: 3, MiCS", 4), Layout("bf16: 3, MiCS", 2)),
]


def is_of_the_share(one: Layout, into: Layout) -> bool:
    """Of each two ways one pair of numbers of ranks, which are others in turns."""
    saved, loaded = (list(WAYS).index(layout.way) for layout in (one, into))
    is_next = (2 * saved + loaded + one.world) % 4 == 0
    is_next &= (saved + 2 * loaded + into.world) % 4 == 2
    return is_next or (one, into) in ALWAYS


NEEDED = {one for into in LAYOUTS for one in crossings(into)}


class SavedEveryWay(DistributedFixture):
    """A folder of each layout, with what it holds."""

    world_size = list(WORLDS)
    exec_timeout = 1200 if TABLE else 240

    def run(self, class_tmpdir: Any) -> None:
        for number, one in enumerate(sorted(NEEDED)):
            if one.world == dist.get_world_size():
                engine = make(one.way, seed=number + 1)
                train(engine, STEPS)
                engine.save_checkpoint(f"{class_tmpdir}/{one.folder}")
                wanted = held(engine)
                keep(f"{class_tmpdir}/{one.folder}", wanted)
                # Were masters equal to weights, a master rounded up would do.
                masters = of_kind(wanted, "master").items()
                same = [torch.equal(v, wanted[f"weight.{name}"].float()) for name, v in masters]
                assert all(same) == one.way.startswith("fp32"), one
                engine.destroy()


class TestEveryWayIntoEveryOther(DistributedTest):
    """Kills: elements in others' places, padding taken for elements, a group's in one shard,
    another group's moments; an instance's shards taken for all ranks', copies of gathered shards
    written or kept over loading, a stage's cuts read as another's; frozen parameters that stay what
    they were, weights that are not their masters rounded, or that do not reach shards on the host;
    state that is resharded into one part alone of a partial offload.
    """

    world_size = list(WORLDS)
    exec_timeout = 1200 if TABLE else 240

    def test(self, SavedEveryWay: Any, class_tmpdir: Any) -> None:
        outcomes = {}
        for into in LAYOUTS:
            if into.world != dist.get_world_size() or not crossings(into):
                continue
            engine = make(into.way, seed=77)
            train(engine, 1)  # state that loading must replace
            for one in crossings(into):
                folder = f"{class_tmpdir}/{one.folder}"
                wanted = kept(folder)
                if ": 3" in one.way + into.way:
                    engine.load_checkpoint(folder, load_module_only=True)
                    weights = (of_kind(seen, "weight") for seen in (wanted, held(engine)))
                    assert differences(*weights) == [], (one, into)
                engine.load_checkpoint(folder)
                outcomes[one, into] = differences(wanted, held(engine))
            train(engine, 1)
            engine.destroy()
        if TABLE and dist.get_rank() == 0:
            equal = sum(not found for found in outcomes.values())
            with open(TABLE, "a") as file:
                told = f"ways, into {dist.get_world_size()} ranks"
                file.write(f"{told}: {equal} of {len(outcomes)}\n")
        assert outcomes and not any(outcomes.values()), {k: v[:3] for k, v in outcomes.items() if v}
