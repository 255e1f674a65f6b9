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

import pytest

from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.checkpoint.manifest import merge_parts, read_manifest, write_part
from unit.common import DistributedTest

from . import runs, test_experts
from . import test_pipeline as pipeline
from .runs import BF16, FP16, differences, on_rank_0, progress, put, refused, zero

# Flips in each file, beside those at its start, middle and end.
RANDOM_FLIPS = int(os.environ.get("DS_CORRUPTIONS", "0"))
OLDER, NEWER = "global_step1", "global_step2"


class Case(NamedTuple):
    """How an engine is made, and how it takes steps."""

    make: Callable[[int], Any]
    train: Callable[[Any, int], Any]


def plain(**keys: Any) -> Case:
    return Case(lambda seed: runs.start(seed, **keys), runs.train)


def experts(**keys: Any) -> Case:
    return Case(lambda seed: test_experts.make(2, seed, **keys), test_experts.train)


def pipelined(**keys: Any) -> Case:
    return Case(lambda seed: pipeline.make(2, seed, **BF16, **zero(1), **keys), pipeline.train)


CASES = {
    "stage 0": plain(),
    "ZeRO-1 bf16": plain(**BF16, **zero(1)),
    "ZeRO-2 fp16": plain(**FP16, **zero(2)),
    "pipeline": pipelined(),
    "experts": experts(**zero(2)),
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
    shard = "bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt"
    for name in (shard, "mp_rank_09_model_states.pt", "layer_99-model_states.pt"):
        yield Damage("added", name, source.read_bytes())


def snapshot(engine: Any) -> dict[str, Any]:
    """All that loading could change."""
    state = copy.deepcopy(engine.optimizer.state_dict())
    scalers = {key: vars(value) for key, value in state.items() if hasattr(value, "cur_scale")}
    return {
        **progress(engine),
        "weights": {name: value.clone() for name, value in engine.module.state_dict().items()},
        "optimizer": {**state, **scalers},
        "schedule": None if engine.lr_scheduler is None else dict(engine.lr_scheduler.state_dict()),
    }


class TestEveryFile(DistributedTest):
    world_size = 2
    exec_timeout = 600

    # The files of stage 1 are those of stage 2.
    @pytest.mark.parametrize("case", [case for case in CASES if case != "ZeRO-1 bf16"])
    def test_every_damage_is_found_and_changes_nothing(self, case: str, tmp_path: Path) -> None:
        own, foreign = tmp_path / "own", tmp_path / "foreign"
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
            path = own / NEWER / damage.name
            # No rank reads files any more when loading has raised on all.
            if dist.get_rank() == 0:
                put(path, damage.content)
            dist.barrier()
            with pytest.raises(CheckpointError) as caught:
                engine.load_checkpoint(str(own), tag=NEWER)
            assert damage.name in str(caught.value), (damage[:2], str(caught.value))
            assert differences(before, snapshot(engine)) == [], damage[:2]
            if dist.get_rank() == 0:
                put(path, whole.get(damage.name))
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
        own = [name for name, writer in manifest.writers.items() if writer == rank]
        for content in part["files"].values():
            if rank == 1 and "fragments" in content:
                content["fragments"].pop()
        write_part(folder, rank, {name: manifest.files[name] for name in own}, part)
    merge_parts(folder, manifest.parts, manifest.head)


class TestLatest(DistributedTest):
    """The file that names the newest checkpoint, and a newest checkpoint that is damaged."""

    world_size = 2

    def test_no_other_checkpoint_is_loaded_unasked(self, tmp_path: Path) -> None:
        engine = TestEveryFile.saved("ZeRO-1 bf16", 1, tmp_path)
        runs.train(engine, 1)
        before = snapshot(engine)
        # Kills: coverage not checked when loading.
        described = tmp_path / NEWER / "manifest.json"
        whole = described.read_bytes()
        on_rank_0(lambda: forget_fragment(str(described.parent)))
        with refused(r"optimizer state of \w+\.\w+: elements \d+ to \d+ are in no file"):
            engine.load_checkpoint(tmp_path)
        assert differences(before, snapshot(engine)) == []
        on_rank_0(lambda: put(described, whole))

        latest = tmp_path / "latest"
        named = latest.read_bytes()
        wrong = [b"", named[:-1], named[: len(named) // 2], b"global_step9", b"../elsewhere", b"."]
        wrong += [flipped(named, place, bit) for place in range(len(named)) for bit in (0, 7)]
        # A tag that is there is as good as the one that was written.
        for content in (content for content in wrong if content != OLDER.encode()):
            on_rank_0(lambda content=content: put(latest, content))
            with refused(rf"(?s)latest.*{OLDER}, {NEWER}"):
                engine.load_checkpoint(tmp_path)
            assert differences(before, snapshot(engine)) == [], content
        # Lost, as after a kill in the first save: what it was to name is known.
        on_rank_0(latest.unlink)
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / NEWER)
        engine.save_checkpoint(tmp_path, tag="aside", save_latest=False)
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / NEWER)

        engine.save_checkpoint(tmp_path, tag="third")
        for tag in ("third", "aside", NEWER):
            damaged = tmp_path / tag / "host_state_rank_1.pt"
            content = flipped(damaged.read_bytes(), 5, 1)
            on_rank_0(lambda damaged=damaged, content=content: put(damaged, content))
        with refused(rf"third/host_state_rank_1.*was written.*as it was written has tag='{OLDER}'"):
            engine.load_checkpoint(tmp_path)
        assert engine.load_checkpoint(tmp_path, tag=OLDER)[1]["seed"] == 1

        # Kills: levels that do the same.
        path = tmp_path / OLDER / "host_state_rank_0.pt"
        whole, files = path.read_bytes(), engine._config.tree.checkpoint
        on_rank_0(lambda: put(path, flipped(whole, len(whole) // 2, 0)))
        files.verify = "sizes"
        engine.load_checkpoint(tmp_path, tag=OLDER)
        on_rank_0(lambda: put(path, whole + b"x"))
        with refused("host_state_rank_0"):
            engine.load_checkpoint(tmp_path, tag=OLDER)
        files.verify = "off"
        engine.load_checkpoint(tmp_path, tag=OLDER)
        on_rank_0((path.parent / "manifest.json").unlink)
        engine.load_checkpoint(tmp_path, tag=OLDER)
        files.verify = "full"
        with refused(r"manifest\.json is missing"):
            engine.load_checkpoint(tmp_path, tag=OLDER)
