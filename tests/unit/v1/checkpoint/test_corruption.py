"""Every file of a checkpoint truncated, flipped, exchanged, removed, or joined by another's.

Kills: a checksum that is not compared, a file that no rank checks, a tag or a foreign file that is
not looked at, a manifest without a checksum of its own, a check after the first change.
"""

import copy
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.checkpoint.manifest import merge_parts, read_manifest, write_part
from unit.common import DistributedTest

from . import runs, test_experts
from . import test_pipeline as pipeline
from .runs import BF16, differences

# Flips in each file, beside those at its start, middle and end.
RANDOM_FLIPS = int(os.environ.get("DS_CORRUPTIONS", "0"))
OLDER, NEWER = "global_step1", "global_step2"


class Case(NamedTuple):
    """How an engine is made, and how it takes steps."""

    make: Callable[[int], Any]
    train: Callable[[Any, int], Any]


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6}}


def plain(**keys: Any) -> Case:
    return Case(lambda seed: runs.start(runs.config(**keys), seed), runs.train)


def experts(**keys: Any) -> Case:
    return Case(lambda seed: test_experts.make(2, seed, **keys), test_experts.train)


CASES = {
    "stage 0": plain(),
    "ZeRO-1 bf16": plain(**BF16, zero_optimization={"stage": 1}),
    "ZeRO-2 fp16": plain(**FP16, zero_optimization={"stage": 2}),
    "pipeline": Case(
        lambda seed: pipeline.make(2, seed, **BF16, zero_optimization={"stage": 1}), pipeline.train
    ),
    "experts": experts(zero_optimization={"stage": 2}),
    "experts, stage 0": experts(),
}


class Damage(NamedTuple):
    """What becomes of a file: other bytes, or None when it is removed."""

    what: str
    name: str
    content: bytes | None


def flipped(content: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def damages(folder: Path, strangers: dict[str, Path], draw: random.Random) -> Iterator[Damage]:
    """All damages of all files in a folder; `strangers` have files of the same names."""
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    for number, (name, whole) in enumerate(files.items()):
        yield Damage("removed", name, None)
        for size in (0, len(whole) // 2, len(whole) - 1):
            yield Damage(f"truncated to {size}", name, whole[:size])
        yield Damage("longer", name, whole + b"\0")
        # A zip's directory, which says where its tensors are, stands before its end.
        places = [0, len(whole) // 2, len(whole) - 60, len(whole) - 1]
        for position in [*places, *(draw.randrange(len(whole)) for _ in range(RANDOM_FLIPS))]:
            yield Damage(
                f"flipped at {position}", name, flipped(whole, position, draw.randrange(8))
            )
        swapped = {f"replaced by that of {what}": other / name for what, other in strangers.items()}
        neighbour = list(files)[(number + 1) % len(files)]
        swapped[f"replaced by {neighbour}"] = folder / neighbour
        for what, path in swapped.items():
            # Equal bytes are no damage: a layer without parameters is the same in every run.
            if path.exists() and path.read_bytes() != whole:
                yield Damage(what, name, path.read_bytes())
    stranger = next(path for path in strangers.values())
    source = next(path for path in sorted(stranger.iterdir()) if path.suffix == ".pt")
    for name in (
        "bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt",
        "mp_rank_09_model_states.pt",
        "layer_99-model_states.pt",
    ):
        yield Damage("added", name, source.read_bytes())


def snapshot(engine: Any) -> dict[str, Any]:
    """All that loading could change."""
    state = copy.deepcopy(engine.optimizer.state_dict())
    host: Any = numpy.random.get_state()
    return {
        "weights": {name: value.clone() for name, value in engine.module.state_dict().items()},
        "optimizer": {
            key: vars(value) if hasattr(value, "cur_scale") else value
            for key, value in state.items()
        },
        "schedule": None if engine.lr_scheduler is None else dict(engine.lr_scheduler.state_dict()),
        "counters": (
            engine.global_steps,
            engine.global_samples,
            engine.skipped_steps,
            engine.micro_steps,
        ),
        "random": (torch.get_rng_state(), random.getstate(), host[1].tolist(), host[2]),
    }


def on_rank_0(action: Callable[[], Any]) -> None:
    """Change files while no rank reads them."""
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def put(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


class TestEveryFile(DistributedTest):
    world_size = 2
    exec_timeout = 600

    @pytest.mark.parametrize("case", CASES)
    def test_every_damage_is_found_and_changes_nothing(self, case: str, tmpdir: Any) -> None:
        own, foreign = Path(str(tmpdir), "own"), Path(str(tmpdir), "foreign")
        engine = self.saved(case, 1, own)
        self.saved(case, 2, foreign)
        kept = snapshot(engine)
        CASES[case].train(engine, 1)
        before = snapshot(engine)
        assert differences(kept, before) != []
        # All ranks draw the same, from the same bytes.
        strangers = {"the older tag": own / OLDER, "another run": foreign / NEWER}
        found = list(damages(own / NEWER, strangers, random.Random(case)))
        whole = {path.name: path.read_bytes() for path in (own / NEWER).iterdir()}
        dist.barrier()
        for damage in found:
            # No rank reads files any more when loading has raised on all.
            if dist.get_rank() == 0:
                put(own / NEWER / damage.name, damage.content)
            dist.barrier()
            with pytest.raises(CheckpointError) as caught:
                engine.load_checkpoint(str(own), tag=NEWER)
            assert damage.name in str(caught.value), (damage[:2], str(caught.value))
            assert differences(before, snapshot(engine)) == [], damage[:2]
            if dist.get_rank() == 0:
                put(own / NEWER / damage.name, whole.get(damage.name))
        dist.barrier()
        print(f"{case}: {len(found)} of {len(found)} damages detected")
        assert len(found) > 10 * len(whole)
        engine.load_checkpoint(str(own))
        loaded = snapshot(engine)
        assert differences({**kept, "random": None}, {**loaded, "random": None}) == []
        CASES[case].train(engine, 1)
        assert engine.global_steps == 3

    @staticmethod
    def saved(case: str, seed: int, folder: Path) -> Any:
        """An engine that was saved after each of two steps."""
        engine = CASES[case].make(seed)
        for _ in range(2):
            CASES[case].train(engine, 1)
            engine.save_checkpoint(str(folder), client_state={"seed": seed})
        return engine


def forget_fragment(folder: str) -> None:
    """Write the manifest anew, as if rank 1 had left a fragment out."""
    manifest = read_manifest(folder)
    assert manifest is not None
    for rank, part in manifest.parts.items():
        files = {
            name: record
            for name, record in manifest.files.items()
            if manifest.writers[name] == rank
        }
        for content in part["files"].values():
            if rank == 1 and "fragments" in content:
                content["fragments"].pop()
        write_part(folder, rank, files, part)
    merge_parts(folder, manifest.parts, manifest.head)


class TestLatest(DistributedTest):
    """The file that names the newest checkpoint, and a newest checkpoint that is damaged."""

    world_size = 2

    def test_a_damaged_latest_and_a_lost_one(self, tmpdir: Any) -> None:
        engine = TestEveryFile.saved("ZeRO-1 bf16", 1, Path(str(tmpdir)))
        runs.train(engine, 1)
        before = snapshot(engine)
        latest = Path(str(tmpdir), "latest")
        whole = latest.read_bytes()
        contents = [
            b"",
            whole[:-1],
            whole[: len(whole) // 2],
            b"global_step9",
            b"../elsewhere",
            b".",
        ]
        contents += [flipped(whole, place, bit) for place in range(len(whole)) for bit in (0, 7)]
        # A tag that is there is as good as the one that was written.
        named_by_chance = OLDER.encode()
        dist.barrier()
        for content in contents:
            if content == named_by_chance:
                continue
            on_rank_0(lambda content=content: put(latest, content))
            with pytest.raises(CheckpointError, match=rf"(?s)latest.*{OLDER}, {NEWER}"):
                engine.load_checkpoint(str(tmpdir))
            assert differences(before, snapshot(engine)) == [], content
        # Lost, as after a kill in the first save: what it was to name is known.
        on_rank_0(latest.unlink)
        assert engine.load_checkpoint(str(tmpdir))[0] == str(Path(str(tmpdir), NEWER))
        engine.save_checkpoint(str(tmpdir), tag="aside", save_latest=False)
        assert engine.load_checkpoint(str(tmpdir))[0] == str(Path(str(tmpdir), NEWER))

    def test_no_other_checkpoint_is_loaded_unasked(self, tmpdir: Any) -> None:
        engine = TestEveryFile.saved("ZeRO-1 bf16", 1, Path(str(tmpdir)))
        engine.save_checkpoint(str(tmpdir), tag="third")
        for tag in ("third", NEWER):
            damaged = Path(str(tmpdir), tag, "host_state_rank_1.pt")
            content = flipped(damaged.read_bytes(), 5, 1)
            on_rank_0(lambda damaged=damaged, content=content: put(damaged, content))
        with pytest.raises(
            CheckpointError,
            match=rf"third/host_state_rank_1.*was written.*as it was written has tag='{OLDER}'",
        ):
            engine.load_checkpoint(str(tmpdir))
        assert engine.load_checkpoint(str(tmpdir), tag=OLDER)[1]["seed"] == 1

    def test_a_manifest_that_does_not_cover_a_parameter(self, tmpdir: Any) -> None:
        """Kills: coverage not checked when loading."""
        engine = TestEveryFile.saved("ZeRO-1 bf16", 1, Path(str(tmpdir)))
        before = snapshot(engine)
        on_rank_0(lambda: forget_fragment(str(Path(str(tmpdir), NEWER))))
        with pytest.raises(
            CheckpointError,
            match=r"optimizer state of \w+\.\w+: elements \d+ to \d+ are in no file",
        ):
            engine.load_checkpoint(str(tmpdir))
        assert differences(before, snapshot(engine)) == []

    def test_what_is_not_asked_for_is_not_checked(self, tmpdir: Any) -> None:
        """Kills: levels that do the same."""
        engine = TestEveryFile.saved("stage 0", 1, Path(str(tmpdir)))
        path = Path(str(tmpdir), NEWER, "host_state_rank_0.pt")
        whole = path.read_bytes()
        checkpoint = engine._config.tree.checkpoint
        on_rank_0(lambda: put(path, flipped(whole, len(whole) // 2, 0)))
        checkpoint.verify = "sizes"
        engine.load_checkpoint(str(tmpdir))
        on_rank_0(lambda: put(path, whole + b"x"))
        with pytest.raises(CheckpointError, match="host_state_rank_0"):
            engine.load_checkpoint(str(tmpdir))
        checkpoint.verify = "off"
        engine.load_checkpoint(str(tmpdir))
        on_rank_0((path.parent / "manifest.json").unlink)
        engine.load_checkpoint(str(tmpdir))
        checkpoint.verify = "full"
        with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
            engine.load_checkpoint(str(tmpdir))
