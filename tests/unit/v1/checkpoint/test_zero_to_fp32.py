"""`zero_to_fp32`: the fp32 weights of every kind of folder, and what it writes itself."""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import inspect
import json
import os
import re
import runpy
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.checkpoint.constants import PICKLED_CLASSES
from deepspeed.runtime.checkpointing.save_job import put_converter
from deepspeed.utils import zero_to_fp32
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.utils.zero_to_fp32 import GatheredTensor, to_torch_tensor
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as fp32_weights
from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint as load_into
from unit.common import DistributedTest
from unit.models import drawn

from . import runs
from .runs import BF16, FP16, by_name, contents, differences, exported_otherwise, output_of, zero
from .test_interop import COMPAT, PIPELINE, WHOLE, recordings

MODEL = "mp_rank_00_model_states.pt"


class TestDense(DistributedTest):
    """Kills: padding taken for elements, masters of one rank, rounded weights, other orders."""

    world_size = [2, 3]
    exec_timeout = 120

    def test_equals_the_masters(self, tmp_path: Path) -> None:
        cases: dict[str, dict[str, Any]] = {
            "fp32-0": {},
            "bf16-0": BF16,
            "fp16-0": FP16,
            "bf16-1-accumulate": {**runs.ACCUMULATE, **zero(1)},
            "fp16-1-elastic": {**FP16, **zero(1, elastic_checkpoint=True)},
            "bf16-2": {**BF16, **zero(2)},
            "fp32-2-round-robin": zero(2, round_robin_gradients=True),
        }
        # With padding on more than one rank some of the cases will do.
        for case, keys in list(cases.items())[:: 1 if dist.get_world_size() == 2 else 3]:
            folder = tmp_path / case
            engine = runs.saved(folder, 2, **keys)
            held = by_name(engine)
            assert exported_otherwise(folder, held) == [], case
            found = fp32_weights(folder)
            assert found.keys() == {*runs.of_kind(held, "weight"), "again.weight", "calls"}
            assert torch.equal(found["calls"], engine.module.calls.float())
            assert found["again.weight"].data_ptr() == found["tied.weight"].data_ptr()
            trained = fp32_weights(folder, exclude_frozen_parameters=True)
            assert found.keys() - trained.keys() == {"frozen.weight", "frozen.bias"}
            aside = {"tag": "trained", "save_latest": False}
            engine.save_checkpoint(folder, **aside, exclude_frozen_parameters=True)
            assert differences(trained, fp32_weights(folder, tag="trained")) == [], case

    def test_empty_groups_and_several_instances(self, tmp_path: Path) -> None:
        """Kills: groups counted without the empty ones, shards under the ranks of all instances."""
        for stage in (2, 3):
            model, instances = runs.Net(), 2 if dist.get_world_size() == 2 else 1
            trained: list[Any] = [[], model.first.parameters(), [], model.last.parameters()]
            groups = [{"params": list(params)} for params in trained]
            for name in ("tied", "again", "frozen"):
                getattr(model, name).requires_grad_(False)
            keys = {**BF16, **zero(stage, num_optimizer_instances=instances)}
            engine = runs.start(model=model, model_parameters=groups, **keys)
            runs.train(engine, 1)
            folder = f"{tmp_path}/{stage}"
            engine.save_checkpoint(folder)
            assert exported_otherwise(folder, by_name(engine)) == [], stage


class TestBeside(DistributedTest):
    """Kills: a copy that cannot be run, or an older one left there."""

    world_size = 2

    def test_run_as_users_do(self, tmp_path: Path) -> None:
        copy = tmp_path / "zero_to_fp32.py"
        runs.on_rank_0(lambda: copy.write_text("raise SystemExit('an older one')"))
        wanted = runs.of_kind(by_name(runs.saved(tmp_path, **BF16, **zero(2))), "master")
        if dist.get_rank() == 0:
            path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
            output_of(copy, tmp_path, tmp_path / "out", env={**os.environ, "PATH": path})
            found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
            assert differences(wanted, {name: found[name] for name in wanted}) == []


# Folders made by hand


def shards_of(weights: dict[str, torch.Tensor], ranks: int) -> list[dict[str, Any]]:
    """What ZeRO-1 saves of one group of fp32 `weights` by rank; padding is NaN."""
    flat = torch.cat([value.reshape(-1) for value in weights.values()])
    size = -(-flat.numel() // ranks)
    padding = size * ranks - flat.numel()
    found = []
    for rank, shard in enumerate(
        nn.functional.pad(flat, (0, padding), value=torch.nan).split(size)
    ):
        mapping, at = OrderedDict(), -rank * size
        for name, value in weights.items():
            start, end = max(at, 0), min(at + value.numel(), size)
            if start < end:
                mapping[name] = fragment_address(start=start, numel=end - start)
            at += value.numel()
        state = {
            "single_partition_of_fp32_groups": [shard.clone()],
            "param_slice_mappings": [mapping],
            "group_paddings": [padding if rank == ranks - 1 else 0],
            "partition_count": [ranks],
        }
        found.append(state)
    return found


def make_folder(
    folder: Path, weights: dict[str, torch.Tensor], ranks: int = 2, mapped: bool = True, **more: Any
) -> dict[str, Any]:
    """A ZeRO-1 folder of fp32 `weights`, one group, padded; returns the model file's content."""
    step = folder / "step"
    step.mkdir(parents=True)
    for rank, state in enumerate(shards_of(weights, ranks)):
        if not mapped:
            del state["param_slice_mappings"]
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": {"zero_stage": 1, **state}}, step / name)
    model = {
        "module": OrderedDict((name, value.bfloat16()) for name, value in weights.items()),
        "buffer_names": [],
        "param_shapes": [OrderedDict((name, value.shape) for name, value in weights.items())],
        "shared_params": {},
        "mp_world_size": 1,
        **more,
    }
    torch.save(model, step / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("step")
    return model


def some_weights() -> dict[str, torch.Tensor]:
    """Five parameters of 400, 4, 0, 400 and 20 bytes; one has no dimension, one odd values."""
    shapes = {"a": (10, 10), "scale": (), "none": (0, 3), "b": (100,)}
    found = {name: drawn(seed, *shape) for seed, (name, shape) in enumerate(shapes.items())}
    return {**found, "c": torch.tensor([1.0, 1 + 2.0**-23, torch.inf, -0.0, 2.0**-149])}


@pytest.mark.parametrize("ranks", [1, 2, 12])  # 12: some parameters lie on several ranks
@pytest.mark.parametrize("mapped", [True, False])  # False: releases before param_slice_mappings
def test_padded_shards(tmp_path: Path, ranks: int, mapped: bool) -> None:
    """Kills: file names sorted as text (10 before 2), padding among the elements."""
    weights = some_weights()
    make_folder(tmp_path, weights, ranks, mapped)
    assert differences(weights, fp32_weights(tmp_path)) == []


# SHA-256 over names and values, of what upstream 0.19.6's tool returned for the folders that it can
# read: run as a program.
UPSTREAM = {
    "zero2_fp32_w2": "ecba7c26c3ac27da07a6f821e92bae0dac64478e50eb0e13f7732be71ecbec16",
    "zero3_bf16_w2": "f15f00f8d2ae34de98d1bffbde7f6d45efb2295c9027ef2b66c04df6aba589bf",
}


@recordings
@pytest.mark.parametrize("case", [*WHOLE, PIPELINE])
def test_upstreams_folders(case: str) -> None:
    found = fp32_weights(str(COMPAT / case))
    if case in UPSTREAM:
        digest = hashlib.sha256()
        for name in sorted(found):
            digest.update(name.encode() + found[name].numpy().tobytes())
        assert digest.hexdigest() == UPSTREAM[case]
    shapes = {"0.weight": (32, 16), "0.bias": (32,), "2.weight": (16, 32), "2.bias": (16,)}
    assert {name: tuple(value.shape) for name, value in found.items()} == shapes
    assert {value.dtype for value in found.values()} == {torch.float32}
    folder = COMPAT / case / "step4"
    if case.startswith("pipe"):
        layers = {layer: torch.load(folder / f"layer_0{layer}-model_states.pt") for layer in (0, 2)}
        own = {f"{layer}.{name}": v for layer, file in layers.items() for name, v in file.items()}
    elif "zero3" not in case:
        own = dict(torch.load(folder / MODEL, weights_only=False)["module"])
    else:
        return
    # The model's own weights are the masters, rounded.
    assert differences(own, {name: found[name].to(v.dtype) for name, v in own.items()}) == []
    if "bf16" in case:
        # Were they equal, they would be the rounded ones.
        assert any(not torch.equal(value.float(), found[name]) for name, value in own.items())


def test_stage3_parts() -> None:
    """Kills: parts cut from one buffer only where a parameter lies in two."""
    first, second = torch.arange(10.0), torch.arange(100.0, 110.0)
    groups = [[buffer[:4], buffer[4:]] for buffer in (first, second)]
    tensor = GatheredTensor(groups, [0, 4, 10], 3, 3, (5,))
    assert tensor.contiguous().tolist() == [3.0, 4.0, 5.0, 103.0, 104.0]
    assert to_torch_tensor({"a": tensor}, return_empty_tensor=True)["a"].shape == (5,)
    assert zero_to_fp32.zero3_partitioned_param_info(10, 4) == (3, 2)


def test_stage3_of_eleven_ranks(tmp_path: Path) -> None:
    """Kills: rank 10's files read before rank 2's, of trained parameters or of frozen ones."""
    whole = {"trained": torch.arange(25.0), "frozen": torch.arange(100.0, 130.0)}
    parts = {name: nn.functional.pad(v, (0, 33 - len(v))).split(3) for name, v in whole.items()}
    shapes = {name: OrderedDict({name: value.shape}) for name, value in whole.items()}
    for rank in range(11):
        model = {
            "module": {},
            "buffer_names": [],
            "param_shapes": [shapes["trained"]],
            "frozen_param_shapes": shapes["frozen"],
            "frozen_param_fragments": {"frozen": parts["frozen"][rank].half()},
        }
        torch.save(model, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        own = [parts["trained"][rank].clone()]
        state = {"zero_stage": 3, "partition_count": 11, "fp32_flat_groups": own}
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, tmp_path / name)
    assert differences(whole, fp32_weights(tmp_path.parent, tag=tmp_path.name)) == []


def test_lazily(tmp_path: Path) -> None:
    weights = some_weights()
    make_folder(tmp_path, weights, shared_params={"also": "a"})
    lazy = fp32_weights(tmp_path, lazy_mode=True)
    assert isinstance(lazy, OrderedDict) and lazy["also"] is lazy["a"]
    found = {name: value.contiguous() for name, value in lazy.items()}
    assert differences({**weights, "also": weights["a"]}, found) == []
    tensors = to_torch_tensor(lazy)
    assert tensors["also"] is tensors["a"]


def test_dtypes(tmp_path: Path) -> None:
    """Kills: counters made floats, double precision rounded."""
    model = make_folder(tmp_path, some_weights())
    buffers = {
        "count": torch.tensor(2**40 + 1),
        "table": torch.tensor([1 / 3], dtype=torch.float64),
        "half": torch.ones(2).half(),
    }
    model["module"].update(buffers)
    model["buffer_names"] = list(buffers)
    torch.save(model, tmp_path / "step" / MODEL)
    found = fp32_weights(tmp_path)
    wanted = {**buffers, "half": torch.ones(2)}
    assert differences(wanted, {name: found[name] for name in wanted}) == []


def test_load_into_a_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(2)
    source, model = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    make_folder(tmp_path, {f"0.{name}": v.detach() for name, v in source.named_parameters()})
    assert load_into(model, tmp_path) is model
    assert differences(dict(source.state_dict()), dict(model[0].state_dict())) == []
    assert "4 names are not in the checkpoint: 1.weight" in caplog.text
    with pytest.raises(ValueError, match="is of another model"):
        load_into(source, tmp_path)


def edited(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """What changes the content of a file in a folder."""

    def apply(folder: Path) -> None:
        content = torch.load(folder / name, weights_only=False)
        change(content)
        torch.save(content, folder / name)

    return apply


def mapping_of(shard: dict[str, Any]) -> dict[str, Any]:
    """Where parameters lie, of a shard's file."""
    return shard["optimizer_state_dict"]["param_slice_mappings"][0]


SHARD_0, SHARD_1 = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
UNLIKE = {"files": {SHARD_1: [5, "xxh3_128:0", 1]}}
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no latest": (lambda f: (f.parent / "latest").unlink(), "Unable to find 'latest' file"),
    "no tag": (lambda f: (f.parent / "latest").write_text("other"), "other' doesn't exist"),
    "no model": (lambda f: (f / MODEL).unlink(), r"can't find mp_rank_\*_model_states.pt"),
    "a shard too few": (
        lambda f: (f / SHARD_1).unlink(),
        "is one of 2 shards, but there are files of 1",
    ),
    "no shards": (
        lambda f: [(f / name).unlink() for name in (SHARD_0, SHARD_1)],
        r"holds none of the fp32 .*: \*_optim_states.pt are missing",
    ),
    "cut off": (
        lambda f: os.truncate(f / SHARD_1, 1000),
        rf"{SHARD_1} \(1000 bytes\) cannot be read",
    ),
    "elements missing": (
        edited(SHARD_1, lambda c: mapping_of(c).popitem()),
        "holds none of the fp32 elements of c",
    ),
    "part of a parameter": (
        edited(SHARD_1, lambda c: vars(mapping_of(c)["b"]).update(numel=7)),
        "b fp32 lacks elements|b fp32 has .*has 100",
    ),
    "twice": (
        lambda f: shutil.copy(f / SHARD_0, f / SHARD_1),
        "holds none of the fp32 elements of c",
    ),
    "sliced": (
        edited(MODEL, lambda c: c.update(checkpoint_parallel_dimensions={"tp_degree": 2})),
        "tensor parallelism.*ds_to_universal",
    ),
    "dcp": (
        edited(SHARD_1, lambda c: c.update({"torch.distributed.checkpoint folder": "x.dcp"})),
        "keeps its tensors in x.dcp.*checkpoint.writer",
    ),
    "a part missing": (
        edited(MODEL, lambda c: c.update(mp_world_size=2)),
        "by 2 model-parallel ranks",
    ),
    "manifest": (
        lambda f: (f / "manifest.json").write_text(json.dumps(UNLIKE)),
        f"{SHARD_1} is not the file that was saved",
    ),
    "bad manifest": (
        lambda f: (f / "manifest.json").write_text('{"files": [1]}'),
        "manifest.json is damaged",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(tmp_path: Path, fault: str) -> None:
    """Kills: each check, one by one; nothing is written."""
    make_folder(tmp_path / "saved", some_weights())
    change, message = FAULTS[fault]
    change(tmp_path / "saved" / "step")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        convert(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_without_masters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A 16-bit run without ZeRO that upstream saved: its masters have no names."""
    (tmp_path / "t").mkdir()
    model = {"module": {"a": torch.ones(2).half()}, "optimizer": {"state": {}}}
    torch.save({**model, "param_shapes": None}, tmp_path / "t" / MODEL)
    assert fp32_weights(tmp_path, tag="t")["a"].dtype == torch.float32
    assert "no fp32 weights by name" in caplog.text
    with pytest.raises(ValueError, match="exclude_frozen_parameters: .* not say what is trained"):
        fp32_weights(tmp_path, tag="t", exclude_frozen_parameters=True)


# What is written


BOTH_FORMATS = pytest.mark.parametrize("safe", [False, True])


def read_output(folder: Path, safe: bool) -> dict[str, torch.Tensor]:
    read = safetensors.torch.load_file if safe else torch.load
    files = folder.glob("*.safetensors" if safe else "*.bin")
    return {name: value for path in files for name, value in read(path).items()}


def made(folder: Path, **more: Any) -> tuple[Path, Path]:
    """A folder of `some_weights`, and one beside it to write to."""
    make_folder(folder / "saved", some_weights(), **more)
    return folder / "saved", folder / "out"


@BOTH_FORMATS
def test_one_file_or_several(tmp_path: Path, safe: bool) -> None:
    """Kills: a limit that is passed, an index that names a file wrongly or is an earlier one's."""
    saved, out = made(tmp_path)
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    out.mkdir()
    (out / "config.json").write_text("{}")

    def written(limit: Any) -> list[str]:
        convert(saved, out, limit, safe)
        weights, found = some_weights(), read_output(out, safe)
        assert differences(weights, found) == []
        # Nor was anything rounded, or lost its sign.
        assert torch.equal(found["c"].view(torch.int32), weights["c"].view(torch.int32))
        return sorted(path.name for path in out.iterdir())

    names = [f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2)]
    assert written(430) == sorted(["config.json", *names, f"{stem}.{suffix}.index.json"])
    index = json.loads((out / f"{stem}.{suffix}.index.json").read_text())
    first, second = names
    assert index == {
        "metadata": {"total_size": 824},
        "weight_map": {"a": first, "scale": first, "none": first, "b": second, "c": second},
    }
    for limit in ("5GB", None, 824):
        assert written(limit) == ["config.json", f"{stem}.{suffix}"]
    assert len(written("1b")) == 1 + 5 + 1


@BOTH_FORMATS
def test_tied_weights_stay_tied(tmp_path: Path, safe: bool) -> None:
    """Kills: a tied weight stored twice, or its names in two files."""
    saved, out = made(tmp_path, shared_params={"also": "a"})
    convert(saved, out, 430, safe)
    if safe:
        with safetensors.safe_open(out / "model-00001-of-00002.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", "also": "a"}
            assert "also" not in file.keys() and "a" in file.keys()
    else:
        found = torch.load(out / "pytorch_model-00001-of-00002.bin", weights_only=True)
        assert found["also"].data_ptr() == found["a"].data_ptr()


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: files written under their final names; a full disk told as torch does, or always."""
    saved, out = made(tmp_path)
    convert(saved, out, 430)
    before = contents(out)
    calls, save = [], torch.save

    def full(content: Any, path: str) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise RuntimeError("unexpected pos")
        save({name: value + 1 for name, value in content.items()}, path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RuntimeError, match="unexpected pos"):
        convert(saved, out, 430)
    calls.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=7))
    with pytest.raises(OSError, match=r"No space .* bytes .*, 7 are free: '.*/pytorch_model-00002"):
        convert(saved, out, 430)
    assert contents(out) == before


def test_two_at_once_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a temporary file that ranks share, what an earlier run left removed twice."""
    saved, out = made(tmp_path)
    calls, write = [], zero_to_fp32._write_bin

    def write_beside(state: Any, path: str) -> Any:
        calls.append(path)
        stored = write(state, path)
        if len(calls) == 1:
            convert(saved, out, 430)
            assert torch.load(path, weights_only=True).keys() == state.keys()
        return stored

    monkeypatch.setattr(zero_to_fp32, "_write_bin", write_beside)
    convert(saved, out, 430)
    assert len(calls) == 4
    parts = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    assert sorted(os.listdir(out)) == [*parts, "pytorch_model.bin.index.json"]
    remove = os.remove

    def removed_by_another(path: str) -> None:
        remove(path)
        remove(path)

    monkeypatch.setattr(os, "remove", removed_by_another)
    convert(saved, out)
    assert os.listdir(out) == ["pytorch_model.bin"]


def test_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, out = made(tmp_path)
    for size in ("5 parsecs", "", "-1GB", 0, True, "1.5GB"):
        with pytest.raises(ValueError, match=r"max_shard_size: .* is no size; give bytes"):
            convert(saved, out, size)
    sizes = {"5GB": 5e9, "2 MiB": 2 * 2**20, "7": 7, 8: 8}
    assert {size: zero_to_fp32._parse_size(size) for size in sizes} == sizes
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="safe_serialization needs .* safetensors: pip install"):
        convert(saved, out, safe_serialization=True)


# As a program of its own

ALONE = """
import runpy, sys
sys.modules["deepspeed"] = None  # importing it fails
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def copied(folder: Path) -> Path:
    put_converter(str(folder))
    return folder / "zero_to_fp32.py"


def test_the_file_is_what_the_package_reads_by(tmp_path: Path) -> None:
    """Kills: a module left out, one name for two things, a class of the format not stood in for."""
    path = copied(tmp_path)
    body = ast.parse(path.read_text()).body
    modules = re.findall(r"^# (deepspeed\.\S+)$", path.read_text(), re.MULTILINE)
    assert {"deepspeed.checkpoint.files", "deepspeed.utils.zero_to_fp32"} < {*modules}
    definitions = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    targets = [name for node in body if isinstance(node, ast.Assign) for name in node.targets]
    names = [node.name for node in definitions]
    names += [target.id for target in targets if isinstance(target, ast.Name)]
    assert len(names) == len({*names})
    there = {ast.dump(node) for node in definitions}
    for module in modules:
        for node in ast.parse(inspect.getsource(importlib.import_module(module))).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert ast.dump(node) in there, (module, node.name)
    namespace, *others = runpy.run_path(str(path))["safe_classes"]()
    assert {*PICKLED_CLASSES} == {"argparse.Namespace", *(path for _, path in others)}
    assert namespace is argparse.Namespace


def test_the_file_works_alone(tmp_path: Path) -> None:
    """Kills: an import of the package, a class in the files that only the package has."""
    saved, out = made(tmp_path)
    command = [sys.executable, "-I", "-c", ALONE, copied(saved), saved, out]
    output_of(*command, "--max_shard_size", "430B")
    assert differences(some_weights(), read_output(out, False)) == []


def test_the_command_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, out = map(str, made(tmp_path))
    with pytest.raises(SystemExit, match="1"):
        zero_to_fp32.main([saved, out, "-t", "missing"])
    assert "zero_to_fp32.py: Directory" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        zero_to_fp32.main([saved, out, "-t", "missing", "--debug"])


MEASURED = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import torch, zero_to_fp32

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024

torch.save({"warm": torch.ones(2**20)}, sys.argv[1] + "/warm")
before, peak, done, save = anonymous(), [0.0], threading.Event(), torch.save

def measured(*arguments):
    peak.append(anonymous())
    save(*arguments)
    peak.append(anonymous())

def watch():
    while not done.wait(0.001):
        peak.append(anonymous())

torch.save = measured
threading.Thread(target=watch, daemon=True).start()
zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
    sys.argv[1], sys.argv[1] + "/out", max_shard_size="16MiB"
)
done.set()
print(max(peak) - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="measured by /proc")
def test_memory_is_one_output_file(tmp_path: Path) -> None:
    """Kills: all shards read at once, output files kept until the last is written.

    Mapped pages of the shards do not count: they are the system's to drop.
    """
    # 96 MiB of weights.
    weights = {f"layer{number}": torch.full((2**20,), float(number)) for number in range(24)}
    make_folder(tmp_path, weights)
    copied(tmp_path)
    measured = output_of(sys.executable, "-I", "-c", MEASURED, tmp_path)
    assert len(list((tmp_path / "out").glob("*.bin"))) == 6
    # One file of 16 MiB, one parameter, and what the allocator keeps, which depends on the torch.
    assert float(measured) < 16 + 4 + 20
