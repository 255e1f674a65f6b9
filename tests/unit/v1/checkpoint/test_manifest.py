"""The manifest: its integrity, that it describes the files, shares of readers, offline checks."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed import comm as dist
from deepspeed.checkpoint import verification
from deepspeed.checkpoint.cli import main as ds_checkpoint
from deepspeed.checkpoint.file_writer import (
    Checksum,
    FileRecord,
    file_checksum,
    file_record,
    write_bytes,
)
from deepspeed.checkpoint.manifest import Manifest, merge_parts, read_manifest, write_part
from deepspeed.checkpoint.resharding.saved_optimizer import SavedOptimizer
from deepspeed.checkpoint.verification import check_coverage, check_folder, verify_checkpoint
from deepspeed.utils import groups
from unit.common import DistributedTest

from .runs import FP16, refused, zero
from .test_corruption import CASES, flipped, pipelined, plain

Description = dict[str, Any]


class TestChecksum:
    @settings(deadline=None)
    @given(st.binary(max_size=200), st.lists(st.integers(0, 200)))
    def test_is_that_of_xxhsum_however_it_is_cut(self, data: bytes, cuts: list[int]) -> None:
        checksum = Checksum()
        places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        for start, end in zip(places, places[1:], strict=False):
            checksum.update(memoryview(data)[start:end])
        assert checksum.value() == f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}"

    def test_of_tensors_and_of_files_longer_than_a_chunk(self, tmp_path: Path) -> None:
        """Kills: rest of the buffer of the chunk before taken for the file's end."""
        values = numpy.arange(700_001, dtype=numpy.float32)
        checksum = Checksum()
        checksum.update(values)
        (tmp_path / "file").write_bytes(values.tobytes())
        assert file_checksum(str(tmp_path / "file")) == checksum.value()
        assert file_record(str(tmp_path / "file")) == FileRecord(values.nbytes, checksum.value())


def two_ranks(folder: Path, tag: str | None = None) -> Path:
    """A folder with a manifest: two ranks, three files."""
    folder.mkdir(parents=True)
    for rank, names in enumerate((("a.pt", "c.bin"), ("b.pt",))):
        for name in names:
            (folder / name).write_bytes(name.encode() * 3)
        records = {name: file_record(str(folder / name)) for name in names}
        write_part(str(folder), rank, records, description(f"{names[0]}"))
    head = {"tag": tag or folder.name, "world_size": 2, "latest": True}
    merge_parts(str(folder), range(2), head)
    return folder


def description(file: str) -> Description:
    return {"part": 0, "files": {file: {"loss_scale": 1.0}, "another rank's": {"loss_scale": 2.0}}}


class TestFile:
    def test_holds_what_the_ranks_wrote(self, tmp_path: Path) -> None:
        folder = two_ranks(tmp_path / "tag")
        manifest = read_manifest(str(folder))
        assert manifest is not None
        checksum = f"xxh3_128:{xxhash.xxh3_128(b'b.pt' * 3).hexdigest()}"
        assert manifest.files["b.pt"] == FileRecord(12, checksum)
        assert manifest.writers == {"a.pt": 0, "c.bin": 0, "b.pt": 1}
        # What a rank says of files that it did not write is another's to say.
        assert manifest.parts == {
            0: {"part": 0, "files": {"a.pt": {"loss_scale": 1.0}}},
            1: description("b.pt") | {"files": {"b.pt": {"loss_scale": 1.0}}},
        }
        assert sorted(os.listdir(folder)) == ["a.pt", "b.pt", "c.bin", "manifest.json"]
        # For other readers it is JSON.
        assert json.loads((folder / "manifest.json").read_text())["head"]["tag"] == "tag"
        assert check_folder(str(folder), manifest) == []
        assert read_manifest(str(tmp_path)) is None

    def test_a_full_disk_is_named(self) -> None:
        with pytest.raises(OSError, match="No space left on device: 2 bytes .* free: '/dev/full'"):
            write_bytes("/dev/full", b"ab")

    def test_every_flip_and_every_truncation_shows(self, tmp_path: Path) -> None:
        """Kills: a checksum of parsed content, blind to blanks, or one that is not compared."""
        path = two_ranks(tmp_path / "tag") / "manifest.json"
        whole = path.read_bytes()
        damaged = [whole[:size] for size in range(len(whole))] + [whole + b"\n"]
        damaged += [flipped(whole, at, at % 8) for at in range(len(whole))]
        for content in damaged:
            path.write_bytes(content)
            with refused(r"manifest\.json .* is damaged"):
                read_manifest(str(path.parent))

    def test_a_missing_part_and_a_file_of_two_ranks(self, tmp_path: Path) -> None:
        record = FileRecord(1, "xxh3_128:0")
        write_part(str(tmp_path), 0, {"a.pt": record}, {})
        with refused(r"part_1\.json is missing: rank 1 has not finished its files"):
            merge_parts(str(tmp_path), range(2), {})
        write_part(str(tmp_path), 1, {"a.pt": record}, {})
        with refused(r"a\.pt was written by rank 0 and by rank 1"):
            merge_parts(str(tmp_path), range(2), {})
        assert not (tmp_path / "manifest.json").exists()


class TestReaders:
    @pytest.mark.parametrize("readers", range(1, 6))
    def test_every_file_is_read_by_exactly_one(
        self, readers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Kills: shares that leave a file out, or read one twice."""
        names = [f"{number}.pt" for number in range(7)]
        for name in names:
            (tmp_path / name).touch()
        read: list[str] = []

        def seen(path: str) -> str:
            read.append(os.path.basename(path))
            return "x"

        monkeypatch.setattr(verification, "file_checksum", seen)
        files = dict.fromkeys(names, FileRecord(0, "x"))
        manifest = Manifest({"tag": tmp_path.name}, files, {}, {})
        for reader in range(readers):
            assert check_folder(str(tmp_path), manifest, (reader, readers)) == []
        assert sorted(read) == names

    def test_names_tags_and_foreign_files(self, tmp_path: Path) -> None:
        folder = two_ranks(tmp_path / "tag")
        manifest = read_manifest(str(folder))
        assert manifest is not None
        (folder / "notes.txt").touch()  # a user's
        (folder / "inner").mkdir()
        (folder / "inner" / "0_0.distcp").touch()
        (folder / "d.pt").touch()
        foreign = [f"{folder}/{name}" for name in ("d.pt", "inner/0_0.distcp")]
        found = check_folder(str(folder), manifest)
        assert found == [f"{path} is not of this checkpoint" for path in foreign]
        renamed = str(folder.rename(tmp_path / "other"))
        found = check_folder(renamed, manifest)
        assert "is that of tag 'tag', the folder's name is 'other'" in found[0]


def part_of(cuts: list[tuple[str, int, int]], numels: dict[str, int], **more: Any) -> Description:
    """A part of a model, its states cut so: file, first element, elements; all of `a`."""
    weights = {name: [[numel], "float32", "trained"] for name, numel in numels.items()}
    files: dict[str, Any] = {"model.pt": {"weights": weights}}
    for file, start, numel in cuts:
        empty = {"slots": [{"fp32": "float32"}], "fragments": [], "whole": False, **more}
        files.setdefault(file, empty)["fragments"].append(["a", start, numel, 0])
    return {"part": 0, "files": files}


class TestCoverage:
    @settings(deadline=None)
    @given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
    def test_any_cut_is_fine_and_any_change_of_one_is_not(
        self, lengths: list[int], data: st.DataObject
    ) -> None:
        """Kills: gaps, overlaps, or the end not looked at."""
        files = enumerate(lengths)
        cuts = [(f"{index}.pt", sum(lengths[:index]), length) for index, length in files]
        numels = {"a": sum(lengths)}
        assert check_coverage([part_of(data.draw(st.permutations(cuts)), numels)]) == []
        index = data.draw(st.integers(0, len(cuts) - 1))
        file, start, length = cuts[index]
        longer, shorter = (file, start, length + 1), (file, start, length - 1)
        for changed in ([longer], [shorter], [], [cuts[index], (file, start, length)]):
            others = [*cuts[:index], *changed, *cuts[index + 1 :]]
            problems = check_coverage([part_of(others, numels)])
            assert len(problems) == 1
            assert "optimizer state of a: " in problems[0]

    def test_gap_overlap_and_slot_name_their_elements_and_files(self) -> None:
        """Kills: moments that only some shards have."""
        for cuts, numels, told in (
            ([("x", 0, 3), ("y", 5, 2)], {"a": 7}, "a: elements 3 to 5 are in no file"),
            ([("x", 0, 5), ("y", 3, 4)], {"a": 7}, "a: elements 3 to 5 are in x and in y"),
            ([("x", 0, 7)], {"a": 7, "b": 2}, "b: elements 0 to 2 are in no file"),
        ):
            assert check_coverage([part_of(cuts, numels)]) == [f"optimizer state of {told}"]
        part = part_of([("x", 0, 3), ("y", 3, 4)], {"a": 7})
        part["files"]["x"]["slots"] = [{"fp32": "float32", "exp_avg": "float32"}]
        told = "optimizer state of a (exp_avg): elements 3 to 7 are in no file"
        assert check_coverage([part]) == [told]

    def test_copies_parts_and_what_is_not_trained(self) -> None:
        """Kills: copies of dense weights, or equal names on other ranks, taken for overlaps."""
        copies = part_of([("x", 0, 7), ("y", 0, 7)], {"a": 7}, whole=True)
        assert check_coverage([copies, {**copies, "part": 1}]) == []
        weights = {
            "b": [[2], "float32", "frozen"],
            "c": [[2], "float32", "buffer"],
            "d": [[7], "float32", "trained", "a"],
        }
        copies["files"]["model.pt"]["weights"].update(weights)
        assert check_coverage([copies]) == []
        # Each with a folder of its own.
        nodes = [part_of([("x", 0, 7)], {"a": 7}) for _ in range(2)]
        assert check_coverage(nodes) == []

    def test_ten_thousand_parameters_take_little(self) -> None:
        """Kills: a search through all for each."""
        weights = {f"{index}.weight": [[8, 8], "float32", "trained"] for index in range(10_000)}
        fragments = [[name, start, 16, 0] for name in weights for start in range(0, 64, 16)]
        part = part_of([(f"{rank}.pt", 0, 0) for rank in range(4)], {})
        part["files"]["model.pt"]["weights"] = weights
        for rank in range(4):
            part["files"][f"{rank}.pt"]["fragments"] = fragments[rank::4]
        began = time.process_time()
        assert check_coverage([part]) == []
        assert time.process_time() - began < 5


class TestOffline:
    def test_function_and_command(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = two_ranks(tmp_path / "tag")
        (tmp_path / "latest").write_text("tag")
        above = str(tmp_path)
        assert verify_checkpoint(above) == verify_checkpoint(above, "tag", "sizes") == []
        assert ds_checkpoint(["verify", above]) == 0
        assert ds_checkpoint(["verify", f"{folder}/"]) == 0
        assert "as it was written" in capsys.readouterr().out
        (folder / "a.pt").write_bytes(b"A.pt" * 3)
        (folder / "b.pt").unlink()
        found = [problem.split(f"{folder}/")[1][:15] for problem in verify_checkpoint(above)]
        assert found == ["a.pt has checks", "b.pt is missing"]
        assert verify_checkpoint(str(folder)) == verify_checkpoint(above)
        assert len(verify_checkpoint(above, level="sizes")) == 1
        assert ds_checkpoint(["verify", above, "--tag", "tag"]) == 1
        assert "a.pt has checksum" in capsys.readouterr().out
        (folder / "manifest.json").unlink()
        assert "has no manifest.json" in verify_checkpoint(above)[0]
        instead = "nowhere is not there. Give one of the tags that are there: tag"
        assert instead in verify_checkpoint(above, "nowhere")[0]
        (tmp_path / "latest").unlink()
        assert "has no file 'latest'" in verify_checkpoint(above)[0]
        assert "nodir is not there" in verify_checkpoint(str(tmp_path / "nodir"))[0]
        with pytest.raises(ValueError, match="level: 'all' is not known"):
            verify_checkpoint(above, level="all")
        with pytest.raises(SystemExit):
            ds_checkpoint(["mend", above])


DESCRIBED = {
    **CASES,
    "fp16, stage 0": plain(**FP16),
    "ZeRO-2 round robin": plain(**zero(2, round_robin_gradients=True)),
    "pipeline": pipelined(grouped=True),
}


class TestDescription(DistributedTest):
    """What the engine says is in the files is what readers of the files find there.

    Kills: fragments at other elements or of other names, slots or weights left out.
    """

    world_size = 2

    def test_is_what_is_in_the_files(self, tmp_path: Path) -> None:
        for case, (make, train) in DESCRIBED.items():
            groups.reset()  # a pipeline's ranks and those that share experts are not divided alike
            engine = make(1)
            train(engine, 1)
            engine.save_checkpoint(tmp_path, tag=case, client_state={"mine": 1})
            folder = tmp_path / case
            manifest = read_manifest(str(folder))
            assert manifest is not None
            assert sorted([*manifest.files, "manifest.json"]) == sorted(os.listdir(folder))
            assert manifest.head["client_state"] == ["mine"]
            assert manifest.head["global_steps"] == 1
            parts: dict[int, dict[str, Any]] = {}
            for part in manifest.parts.values():
                parts.setdefault(part["part"], {}).update(part["files"])
            assert described_state(parts) == found_state(str(folder)), case
            for files in parts.values():
                assert described_weights(files) == found_weights(folder, files), case
            dist.barrier()


def described_state(parts: dict[int, dict[str, Any]]) -> set[Any]:
    """Parameter, first element, elements, slots with dtypes."""
    found, seen = set(), set()
    for part in sorted(parts):  # what an earlier stage has is not read from a later one
        rows = [
            (name, start, numel, tuple(sorted(content["slots"][which].items())))
            for content in parts[part].values()
            for name, start, numel, which in content.get("fragments", ())
        ]
        found |= {row for row in rows if row[0] not in seen}
        seen |= {row[0] for row in rows}
    return found


def found_state(folder: str) -> set[Any]:
    """The same, read from the files."""
    found = set()
    for piece in SavedOptimizer(folder).fragments():
        slots = sorted((key, str(value.dtype)[6:]) for key, value in piece.values.items())
        found.add((piece.name, piece.start, piece.numel, tuple(slots)))
    return found


def described_weights(files: dict[str, Any]) -> dict[str, Any]:
    """File -> shapes and dtypes, sorted: layer files have names that are not the whole model's."""
    return {
        file: sorted((tuple(shape), dtype) for shape, dtype, *_ in content["weights"].values())
        for file, content in files.items()
        if "weights" in content
    }


def found_weights(folder: Path, files: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for file in (file for file, content in files.items() if "weights" in content):
        content = torch.load(folder / file, weights_only=False)
        state = content.get("module", content) if file.startswith("mp_rank") else content
        found[file] = sorted((tuple(value.shape), str(value.dtype)[6:]) for value in state.values())
    return found
