"""No file of a checkpoint can run code: every reader refuses a pickle that tries to, and nothing
has changed afterwards.

Each planted file is the real one with one more object in it, or another file in its place. When
code runs, a file appears.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import manifest
from deepspeed.checkpoint.constants import PICKLED_CLASSES
from deepspeed.checkpoint.file_writer import file_record
from deepspeed.checkpoint.files import CheckpointError, read_file, safe_classes
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import zero_to_fp32
from deepspeed.utils.tensor_fragment import fragment_address
from unit.common import DistributedTest

from . import runs, test_experts
from . import test_pipeline as pipeline
from .runs import BF16, TAG, UNIVERSAL, Call, convert, differences, look, on_rank_0, refused, zero

MODEL = "mp_rank_00_model_states.pt"


class Stateful:
    """Runs code when its state is restored."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __setstate__(self, state: dict[str, str]) -> None:
        Path(state["marker"]).touch()


def attacks(marker: str) -> dict[str, Any]:
    """Objects that make the file `marker` when a plain unpickler reads them."""
    inner, touch = io.BytesIO(), f"touch {marker}"
    system = Call(os.system, touch)
    torch.save(system, inner)
    rebuilt = torch._utils._rebuild_parameter_with_state
    return {
        "system": system,
        "open": Call(open, marker, "w"),
        "eval": Call(eval, f"open({marker!r}, 'w')"),
        "exec": Call(exec, f"open({marker!r}, 'w')"),
        "process": Call(subprocess.check_call, ["touch", marker]),
        "state": Stateful(marker),
        # What torch's own files call, given something else to call or to read.
        "storage": Call(torch.storage._load_from_bytes, inner.getvalue()),  # type: ignore[no-untyped-call]
        "rebuilt type": Call(torch._tensor._rebuild_from_type_v2, os.system, int, (touch,), {}),
        "rebuilt parameter": Call(rebuilt, system, False, {}, {}),
        "key": {system: 1},
    }


ATTACKS = tuple(attacks("x"))


def save_plain(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))  # torch reads no later one


def save_legacy(content: Any, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


def save_beside(content: Any, path: Path) -> None:
    """A harmless archive with a second pickle, under its name and under a script's."""
    torch.save({"harmless": torch.ones(1)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        data = pickle.dumps(content)
        root = archive.namelist()[0].split("/")[0]
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr(f"{root}/data.pkl", data)
        archive.writestr(f"{root}/constants.pkl", data)


FORMATS: dict[str, Callable[[Any, Path], None]] = {
    "zip": torch.save,
    "legacy": save_legacy,
    "plain": save_plain,
    "beside": save_beside,
}
READERS: dict[str, Callable[[str], Any]] = {
    "read_file": read_file,
    "read_file mapped": lambda path: read_file(path, mmap=True),
    "zero_to_fp32": lambda path: zero_to_fp32._read(path),
    "torch": lambda path: TorchCheckpointEngine().load(path),
    "fast": lambda path: FastCheckpointEngine().load(path),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_one(tmp_path: Path, attack: str) -> None:
    """Else everything below would pass with readers that allow everything."""
    marker = tmp_path / "ran"
    torch.save({"a": attacks(str(marker))[attack]}, tmp_path / "file.pt")
    try:
        torch.load(tmp_path / "file.pt", weights_only=False)
    except (TypeError, AttributeError):
        pass  # what came back is not what torch wanted, but the code has run
    assert marker.exists()


@pytest.mark.filterwarnings(
    "ignore:'torch.load' received a zip file that looks like a TorchScript archive"
)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("reader", READERS)
def test_readers(tmp_path: Path, reader: str, form: str) -> None:
    """Kills: weights_only left out, or a second way to read tried when the first fails."""
    marker, path = tmp_path / "ran", tmp_path / "file.pt"
    for name, attack in attacks(str(marker)).items():
        FORMATS[form]({"a": torch.ones(2), "b": [attack]}, path)
        with pytest.raises((CheckpointError, ValueError), match=r"file\.pt.* cannot be read: "):
            READERS[reader](str(path))
        assert not marker.exists(), name


def test_a_class_that_the_client_allows(tmp_path: Path) -> None:
    """The list is explicit, and the client's own is added to it."""
    torch.save({"a": Stateful(str(tmp_path / "ran"))}, tmp_path / "file.pt")
    with torch.serialization.safe_globals([Stateful]):
        read_file(str(tmp_path / "file.pt"))
    assert (tmp_path / "ran").exists()


def test_classes_that_the_format_contains(tmp_path: Path) -> None:
    """Exactly these, under the paths that files name."""
    known = [f"{known.__module__}.{known.__qualname__}" for known in safe_classes()]
    assert known == [
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "argparse.Namespace",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    ]


READ_ALONE = """
import sys
from deepspeed.checkpoint.files import read_file
content = read_file(sys.argv[1])
assert "deepspeed.runtime.engine" not in sys.modules, "a tool that reads a file loads the engine"
print(*(f"{type(value).__module__}.{type(value).__qualname__}" for value in content))
"""


def test_a_tool_reads_all_of_them_without_the_engine(tmp_path: Path) -> None:
    """Kills: a class that is known only once something else has been imported."""
    content = [
        fragment_address(numel=2, start=1),
        LossScaler(2.0),
        DynamicLossScaler(4.0, 2, 1.0, 1, False),
        ZeroStageEnum.gradients,
        argparse.Namespace(a=1),
        SubparamShape(["a"], (2, 3), 0),
    ]
    torch.save(content, tmp_path / "file.pt")
    read = runs.output_of(sys.executable, "-c", READ_ALONE, tmp_path / "file.pt")
    assert read.split() == list(PICKLED_CLASSES)


@contextlib.contextmanager
def planted(
    folder: Path, name: str, marker: str, attack: str = "system", form: str = "zip"
) -> Iterator[None]:
    """Add an attack to file `name`, and put it into the manifest; put both back in the end."""
    path, listed = folder / name, folder / manifest.MANIFEST
    kept = {file: file.read_bytes() for file in (path, listed) if file.is_file()}
    content = torch.load(path, weights_only=False)
    content = content if isinstance(content, dict) else {"real": content}
    content["planted"] = attacks(marker)[attack]
    FORMATS[form](content, path)
    if listed in kept:
        known = json.loads(kept[listed])
        known.pop("checksum")
        assert name in known["files"]
        known["files"][name][:2] = file_record(str(path))
        body = manifest._dumped(known)[1:]
        listed.write_bytes(manifest._first_line(body) + body)
    try:
        yield
    finally:
        for file, real in kept.items():
            file.write_bytes(real)


def refuse(
    engine: Any, see: Callable[[Any], Any], folder: Path, names: Sequence[str], **options: Any
) -> None:
    """With an attack in one of these files no rank loads the folder of a tag, and what `see` gives
    stays; with the real ones back, all load. All ranks call this.
    """
    load_dir, marker = folder.parent, str(folder.parent / "ran")
    for number, name in enumerate(names):
        for form in ("zip", "legacy"):
            attack = ATTACKS[(2 * number + len(form)) % len(ATTACKS)]
            before = copy.deepcopy(see(engine))
            dist.barrier()
            with contextlib.ExitStack() as stack:
                if dist.get_rank() == 0:
                    stack.enter_context(planted(folder, name, marker, attack, form))
                dist.barrier()
                with refused(f"{Path(name).name}.* cannot be read"):
                    engine.load_checkpoint(load_dir, tag=folder.name, **options)
                assert differences(before, see(engine)) == [], (name, attack, form)
                dist.barrier()
            assert not os.path.exists(marker), (name, attack, form)
    dist.barrier()
    engine.load_checkpoint(load_dir, tag=folder.name, **options)


def weights(engine: Any) -> dict[str, Any]:
    """The model's."""
    return dict(engine.module.state_dict())


class TestEngines(DistributedTest):
    """Kills: a kind of file that is read otherwise, a rank that loads before another refuses."""

    world_size = 2
    exec_timeout = 120

    def test_shards_programs_and_universal(self, tmp_path: Path) -> None:
        engine = runs.saved(tmp_path, **BF16, **zero(2))
        folder, marker = tmp_path / "global_step1", tmp_path / "ran"
        shard = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        every = [MODEL, shard, "host_state_rank_1.pt"]
        refuse(engine, look, folder, every)
        refuse(engine, look, folder, [MODEL], load_module_only=True)
        options = {"load_module_strict": False, "load_optimizer_states": True}
        refuse(engine, look, folder, every, **options)
        dist.barrier()
        # Commands and functions that read a folder without an engine, and what they write.
        out = str(tmp_path / "out")
        for name in (MODEL, shard) if dist.get_rank() == 0 else ():
            with planted(folder, name, str(marker)):
                unread = rf"{name} \(\d+ bytes\) cannot be read"
                with pytest.raises(ValueError, match=unread):
                    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), out)
                with pytest.raises(ValueError, match=unread):
                    zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, str(tmp_path))
                with pytest.raises(SystemExit, match="1"):
                    zero_to_fp32.main([str(tmp_path), out])
                with refused(f"{name}.* cannot be read"):
                    convert(tmp_path, "--inject_missing_state")
            assert not any(os.path.exists(path) for path in (marker, out, tmp_path / TAG))
        on_rank_0(lambda: convert(tmp_path, "--inject_missing_state"))
        loading = runs.start(seed=2, **BF16, **zero(1), **UNIVERSAL)
        runs.train(loading, 1)
        of_weight = ["zero/first.weight/fp32.pt", "zero/first.weight/exp_avg.pt"]
        parts = [*of_weight, "zero/optimizer_state.pt", MODEL]
        refuse(loading, look, tmp_path / TAG, parts)
        assert differences(weights(engine)["first.weight"], weights(loading)["first.weight"]) == []

    def test_layers(self, tmp_path: Path) -> None:
        engine = pipeline.make(2, **BF16, **zero(1))
        pipeline.train(engine, 1)
        engine.save_checkpoint(tmp_path, tag="t")
        folder, marker = tmp_path / "t", tmp_path / "ran"
        refuse(engine, weights, folder, ["layer_05-model_states.pt", MODEL])
        refuse(engine, weights, folder, ["layer_05-model_states.pt"], load_module_only=True)
        dist.barrier()
        if dist.get_rank() == 0:
            with planted(folder, "layer_00-model_states.pt", str(marker), "eval"):
                with refused("layer_00"):
                    engine.module.load_state_dir(str(folder))
            assert not marker.exists()

    def test_experts(self, tmp_path: Path) -> None:
        engine = test_experts.make(2, 1)
        test_experts.train(engine, 1)
        engine.save_checkpoint(tmp_path, tag="t")
        expert = "layer_1_expert_3_mp_rank_00_model_states.pt"
        names = [expert, "expp_rank_1_mp_rank_00_optim_states.pt"]
        refuse(engine, weights, tmp_path / "t", names)
