"""`ds_to_universal` in one process: its files for every kind of slice, what it refuses."""

import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.dcp_files import write_dcp
from deepspeed.checkpoint.deepspeed_checkpoint import DeepSpeedCheckpoint
from deepspeed.checkpoint.ds_to_universal import command, main, parse_arguments
from deepspeed.checkpoint.files import read_file
from deepspeed.checkpoint.resharding.tensor_parallel import SlicePatterns, slice_of_rank
from deepspeed.checkpoint.resharding.universal import UniversalCheckpoint
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.checkpoint.verification import verify_checkpoint

from .runs import Call, refused
from .test_interop import COMPAT, recordings
from .test_zero_to_fp32 import edited, mapping_of, shards_of

STACKED = {"patterns": [r"qkv\."], "shape": ((8, 4, 4), -1), "partition_dim": 0}
INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "parameter_with_row_parallelism_patterns": [r"row\."],
    "tp_replicated_parameter_patterns": [r"norm\."],
    "parameter_to_average_patterns": [r"avg\."],
    "vocabulary_parameter_patterns": [r"vocab\."],
    "original_vocab_size": 9,
    "padded_vocab_size": 10,
    "parameter_with_2_sub_params_cat_dim_0": [r"gate\."],
    "parameter_with_sub_params": [STACKED],
}
# Shapes of the slices of two tensor-parallel ranks.
SHAPES = {
    "col.w": (4, 3),
    "row.w": (3, 4),
    "norm.w": (3,),
    "avg.w": (3,),
    "vocab.w": (5, 3),
    "gate.w": (4, 3),
    "qkv.w": (8, 3),
}
SHARDS = 2


def values(rank: int) -> dict[str, torch.Tensor]:
    """Slices of one tensor-parallel rank, all elements different but for what is replicated."""
    found = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        start = 1000 * index + (0 if name == "norm.w" else 100 * rank)
        found[name] = start + torch.arange(torch.Size(shape).numel()).float().view(shape)
    return found


def write(folder: Path, info: dict[str, Any] | None = INFO) -> Path:
    """A folder as upstream writes it: two tensor-parallel ranks, sharded by two."""
    folder.mkdir()
    for rank in range(2):
        slices = values(rank)
        model = {
            "module": slices,
            "optimizer": None,
            "param_shapes": [OrderedDict((name, part.shape) for name, part in slices.items())],
            "global_steps": 4,
            "dp_world_size": SHARDS,
            "mp_world_size": 2,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 2},
            **({} if info is None else {"universal_checkpoint_info": info}),
        }
        torch.save(model, folder / file_names.model_file(rank))
        for shard, state in enumerate(shards_of(slices, SHARDS)):
            (own,) = state["single_partition_of_fp32_groups"]
            adam = {"step": torch.tensor(4.0), "exp_avg": own / 2, "exp_avg_sq": own / 4}
            groups = [{"lr": 0.01, "betas": (0.9, 0.95), "params": [0]}]
            state["base_optimizer_state"] = {"state": {0: adam}, "param_groups": groups}
            state["clip_grad"] = 1.0
            torch.save({"optimizer_state_dict": state}, folder / shard_file(shard, rank))
    return folder


def shard_file(shard: int, rank: int) -> str:
    return file_names.optimizer_file(shard, rank, bf16=False)


def convert(source: Path, *options: str) -> Path:
    output = source.parent / "universal"
    main(parse_arguments(["--input_folder", str(source), "--output_folder", str(output), *options]))
    return output


def param_of(output: Path, name: str, slot: str = "fp32") -> dict[str, Any]:
    """What a file of a parameter holds."""
    return read_file(str(output / "zero" / name / f"{slot}.pt"))


def expected() -> dict[str, dict[str, Any]]:
    """Whole parameters and how they are cut, as upstream 0.19.6 wrote them of the same folder."""
    a, b = values(0), values(1)
    qkv = [part["qkv.w"].split([4, 2, 2]) for part in (a, b)]
    gate = [part["gate.w"].chunk(2) for part in (a, b)]
    return {
        "col.w": {"cat_dim": 0, "param": torch.cat([a["col.w"], b["col.w"]])},
        "row.w": {"cat_dim": 1, "param": torch.cat([a["row.w"], b["row.w"]], 1)},
        "norm.w": {"param": a["norm.w"]},
        "avg.w": {"param": a["avg.w"] + 50},
        "vocab.w": {
            "cat_dim": 0,
            "vocab_tensor": True,
            "param": torch.cat([a["vocab.w"], b["vocab.w"][:4]]),
        },
        "gate.w": {
            "cat_dim": 0,
            "param_n_sub_params": 2,
            "param": torch.cat([gate[0][0], gate[1][0], gate[0][1], gate[1][1]]),
        },
        "qkv.w": {
            "sub_param_shape": SubparamShape(**STACKED),
            "param": torch.cat([part[index] for index in range(3) for part in qkv]),
        },
    }


class TestFiles:
    """Kills: the wrong dimension, summed averages, padding kept, parameters in rank order."""

    def test_layout(self, tmp_path: Path) -> None:
        output = convert(write(tmp_path / "t"))
        wanted = expected()
        assert sorted(path.name for path in (output / "zero").iterdir()) == sorted(
            [*wanted, "optimizer_state.pt"]
        )
        for name, content in wanted.items():
            files = sorted(path.stem for path in (output / "zero" / name).iterdir())
            assert files == ["exp_avg", "exp_avg_sq", "fp32", "step"]
            for slot, factor in (("fp32", 1), ("exp_avg", 2), ("exp_avg_sq", 4)):
                found = param_of(output, name, slot)
                assert found.keys() == content.keys()
                assert torch.equal(found.pop("param") * factor, content["param"]), (name, slot)
                assert found == {key: value for key, value in content.items() if key != "param"}
            assert param_of(output, name, "step").item() == 4
        common = read_file(str(output / "zero" / "optimizer_state.pt"))
        assert common["param_groups"] == [{"lr": 0.01, "betas": (0.9, 0.95), "params": [0]}]
        assert "param_slice_mappings" not in common and common["clip_grad"] == 1.0
        assert (tmp_path / "latest_universal").read_text() == "universal"
        assert verify_checkpoint(str(output)) == []
        (output / "zero" / "row.w" / "fp32.pt").unlink()
        assert "row.w/fp32.pt is missing" in verify_checkpoint(str(output))[0]
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]

    def test_tensors_in_folders_of_dcp(self, tmp_path: Path) -> None:
        # Kills: shapes taken as they are, which are plain tuples here; folders taken for files.
        source = write(tmp_path / "t")
        torch.save({"random": torch.arange(3)}, source / file_names.host_file(0))
        for path in list(source.iterdir()):
            write_dcp(str(path), torch.load(path, weights_only=False))
        output = convert(source)
        for name, content in expected().items():
            assert torch.equal(param_of(output, name)["param"], content["param"]), name
        kept = read_file(str(output / file_names.host_file(0)))
        assert torch.equal(kept["random"], torch.arange(3))
        assert not list(output.glob("*.dcp"))

    def test_any_number_of_slices(self, tmp_path: Path) -> None:
        # Kills: a slice of the stack instead of one of each stacked parameter; a vocabulary that is
        # not padded for its ranks.
        state = UniversalCheckpoint(str(convert(write(tmp_path / "t"))))
        patterns = SlicePatterns(INFO)
        for name, content in expected().items():
            entry = state.entry(name, "fp32")
            for rank in range(2):
                own = slice_of_rank(name, entry, SHAPES[name], rank, 2)
                last = -1 if name == "vocab.w" and rank == 1 else None
                assert name == "avg.w" or torch.equal(own[:last], values(rank)[name][:last]), name
                assert last is None or not own[-1].any()  # the row of padding
            by_four = []
            for rank in range(4):
                shape = list(SHAPES[name])
                if name not in ("norm.w", "avg.w"):
                    dim = 1 if name == "row.w" else 0
                    shape[dim] = 3 if name == "vocab.w" else shape[dim] // 2
                by_four.append(slice_of_rank(name, entry, shape, rank, 4))
            if name != "avg.w":
                assert torch.equal(patterns.merged(name, by_four)["param"], content["param"]), name

    def test_slices_are_kept_if_asked(self, tmp_path: Path) -> None:
        workers = ("--num_extract_workers", "1", "--num_merge_workers", "1")
        output = convert(write(tmp_path / "t"), "--keep_temp_folder", *workers)
        kept = read_file(str(output / "tmp" / "row.w" / "1" / "fp32.00"))
        assert torch.equal(kept, values(1)["row.w"].flatten())

    def test_deepspeed_checkpoint(self, tmp_path: Path) -> None:
        found = DeepSpeedCheckpoint(str(write(tmp_path / "t")))
        assert (found.tp_degree, found.pp_degree, found.dp_degree) == (2, 1, 2)
        assert found.get_checkpoint_info("universal_checkpoint_info") == INFO
        assert not found.is_change_tp_degree()
        files = [*found.get_2d_parallel_files(1, 0), *found.get_zero_files(0, 1, 1)]
        assert [Path(path).name for path in files] == [MODEL, SHARD]
        found.validate_files()
        assert DeepSpeedCheckpoint(str(tmp_path / "t"), tp_degree=1).is_change_tp_degree()

    @recordings
    @pytest.mark.parametrize(
        "case", ["zero1_bf16_fp32acc_w2", "zero2_fp32_w2", "pipe2_zero1_bf16_w2"]
    )
    def test_folders_of_upstream(self, tmp_path: Path, case: str) -> None:
        source = tmp_path / "step4"
        shutil.copytree(COMPAT / case / "step4", source, copy_function=shutil.copyfile)
        source.chmod(0o755)
        state = UniversalCheckpoint(str(convert(source)))
        assert state.names() == ["0.bias", "0.weight", "2.bias", "2.weight"]
        assert state.slots("0.weight") == ["exp_avg", "exp_avg_sq", "fp32"]
        assert (state.shared("2.bias")["step"].item(), state.group("2.bias")) == (4, 0)
        weight = state.entry("0.weight", "fp32")["param"]
        assert weight.shape == (32, 16) and weight.dtype == torch.float32


def adam_of(shard: dict[str, Any]) -> dict[str, Any]:
    return shard["optimizer_state_dict"]["base_optimizer_state"]["state"][0]


def rename(content: dict[str, Any]) -> None:
    if "qkv.w" in mapping_of(content):
        mapping_of(content)["../qkv.w"] = mapping_of(content).pop("qkv.w")


def differ(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] += 1


EVIL = Call(open, "ran", "w")
CUT = shard_file(1, 0)
FIRST_SHARD, SHARD = (shard_file(shard, 1) for shard in range(2))
MODEL = file_names.model_file(1)
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda folder: os.truncate(folder / CUT, 1000), rf"{CUT} .* cannot be read"),
    "missing": (lambda folder: (folder / CUT).unlink(), "2 shards, but there are files of 1"),
    "moment": (
        edited(SHARD, lambda content: adam_of(content).pop("exp_avg")),
        "exp_avg lacks elements|has no exp_avg",
    ),
    "step": (edited(SHARD, lambda content: adam_of(content)["step"].add_(1)), "have state 'step'"),
    "rank": (edited(SHARD, lambda content: mapping_of(content).pop("qkv.w")), "qkv.w"),
    # Its first elements are in the shard before.
    "tail": (
        edited(SHARD, lambda content: mapping_of(content).pop("vocab.w")),
        r"vocab\.w \w+ has 11 elements, its shape \(5, 3\) has 15",
    ),
    "replicated": (
        edited(FIRST_SHARD, differ),
        "norm.w is in tp_replicated_parameter_patterns, but",
    ),
    "evil model": (edited(MODEL, lambda content: content.update(x=EVIL)), "cannot be read"),
    "evil shard": (edited(SHARD, lambda content: content.update(x=EVIL)), "cannot be read"),
}


class TestRefusals:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damaged_input(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
    ) -> None:
        # Kills: elements taken for zeros, a shard forgotten, code in a file run.
        monkeypatch.chdir(tmp_path)
        source = write(tmp_path / "t")
        apply, message = DAMAGES[damage]
        apply(source)
        with refused(message):
            convert(source)
        # No output, nothing half done, nothing run.
        assert sorted(path.name for path in tmp_path.iterdir()) == ["t"]

    def test_patterns_and_options(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        replicated = {"tp_replicated_parameter_patterns": [r"norm\.", r"nrm\."]}
        mistyped = write(tmp_path / "mistyped", {**INFO, **replicated})
        with refused(r"no parameter matches nrm"):
            convert(mistyped)
        convert(mistyped, "--no_strict")
        silent = write(tmp_path / "silent", None)
        with refused("give --inject_missing_state"):
            convert(silent)
        self.check_inferred(convert(silent, "--inject_missing_state"))
        sizeless = {key: value for key, value in INFO.items() if key != "original_vocab_size"}
        with refused("original_vocab_size"):
            convert(write(tmp_path / "words", sizeless))
        with pytest.raises(ValueError, match="num_merge_workers"):
            convert(silent, "--num_merge_workers", "0")
        folders = ["--input_folder", str(silent), "--output_folder", str(tmp_path / "o")]
        monkeypatch.setattr("sys.argv", ["x", *folders])
        with pytest.raises(SystemExit, match="give --inject_missing_state"):
            command()

    @staticmethod
    def check_inferred(output: Path) -> None:
        """Kills: copies put behind one another, slices taken for copies, moments misshaped."""
        a, b = values(0), values(1)
        for name in a:
            copied = torch.equal(a[name], b[name])
            for slot, factor in (("fp32", 1.0), ("exp_avg", 0.5)):
                whole = a[name] if copied else torch.cat([a[name], b[name]])
                assert torch.equal(param_of(output, name, slot)["param"], whole * factor), name
        assert any(torch.equal(a[name], b[name]) for name in a)

    def test_names_are_no_paths(self, tmp_path: Path) -> None:
        source = write(tmp_path / "t")
        for rank in range(2):
            for shard in range(SHARDS):
                edited(shard_file(shard, rank), rename)(source)
        with refused("cannot have a folder of its name"):
            convert(source, "--no_strict")

    def test_evil_slice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        output = convert(write(tmp_path / "t"))
        (output / "zero" / "col.w" / "fp32.pt").write_bytes(pickle.dumps(EVIL))
        with refused(r"fp32\.pt"):
            UniversalCheckpoint(str(output)).entry("col.w", "fp32")
        assert not (tmp_path / "ran").exists()
