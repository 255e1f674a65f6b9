"""Weights of safetensors files, of which each rank of stage 3 reads its own elements."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.checkpointing import safetensors_loading
from deepspeed.utils import load_sharded_safetensors, safe_get_full_fp32_param
from unit.common import DistributedTest
from unit.v1.zero.stage3.models import Net, config_of, engine_of, train

from .runs import BF16, on_rank_0, put, refused, whole

CONFIG = {**config_of(3, stage3_param_persistence_threshold=10), **BF16}


def write(folder: Path, files: int = 2, width: int = 9) -> dict[str, torch.Tensor]:
    """Weights in fp32, in several files with an index, which the first rank writes."""
    torch.manual_seed(3)
    weights = dict(Net(width=width).state_dict())
    del weights["head.weight"]  # tied
    names = sorted(weights)
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        shares = {f"model-{k + 1}.safetensors": names[k::files] for k in range(files)}
        for file, share in shares.items():
            save_file({name: weights[name].contiguous() for name in share}, folder / file)
        found = {name: file for file, share in shares.items() for name in share}
        index = {"metadata": {}, "weight_map": found}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
    return weights


class Counted(io.FileIO):
    """Counts what is read of files of tensors."""

    total = 0

    def readinto(self, buffer: Any) -> int:
        got = super().readinto(buffer)
        Counted.total += got
        return got


def counted(path: str, mode: str = "r", **options: Any) -> Any:
    """`open`, but files of which elements are read count."""
    return Counted(path) if options.get("buffering") == 0 else open(path, mode, **options)


class TestLoading(DistributedTest):
    """Into a model of `zero.Init`, and into an engine's."""

    world_size = [1, 2, 3]

    def test_each_rank_reads_what_it_owns(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: whole tensors read on every rank, cuts of another rank, padding read, tied weights
        # asked for twice, masters that stay what they were.
        weights = write(tmp_path / "model")
        monkeypatch.setattr(safetensors_loading, "_CHUNK_BYTES", 64)  # many reads of a tensor
        with deepspeed.zero.Init(config_dict_or_path=CONFIG):
            model = Net(width=9)
        files = (path.read_bytes() for path in (tmp_path / "model").glob("*.safetensors"))
        headers = sum(8 + int.from_bytes(file[:8], "little") for file in files)
        Counted.total = 0
        monkeypatch.setattr(safetensors_loading, "open", counted, raising=False)
        loaded = load_sharded_safetensors(model, tmp_path / "model")
        monkeypatch.undo()
        params = {name: param for name, param in model.named_parameters()}
        own = sum(param.ds_tensor.numel() for param in params.values())
        padded = own * dist.get_world_size() - sum(param.ds_numel for param in params.values())
        assert own - padded <= (loaded.bytes_read - headers) / 4 <= own
        assert Counted.total == loaded.bytes_read - headers
        every = torch.tensor(loaded.bytes_read - headers)
        dist.all_reduce(every)
        assert every == sum(weight.nbytes for weight in weights.values())
        assert loaded.missing_keys == loaded.unexpected_keys == []
        rounded = {name: weights[name].bfloat16() for name in params}
        for name, param in params.items():
            assert torch.equal(whole(param), rounded[name]), name
        engine = engine_of(model, CONFIG)
        train(engine, 1)
        load_sharded_safetensors(engine.module, tmp_path / "model")
        for name, param in params.items():
            assert torch.equal(whole(param), rounded[name]), name
            if param.requires_grad:
                assert torch.equal(safe_get_full_fp32_param(param), rounded[name].float()), name
        engine.destroy()

    @pytest.mark.world_size(2)
    def test_refusals(self, tmp_path: Path) -> None:
        # Kills: a rank that goes on where another has raised, weights of another model.
        write(tmp_path / "model", files=1)
        (file,) = (tmp_path / "model").glob("*.safetensors")
        with deepspeed.zero.Init(config_dict_or_path=CONFIG):
            model, other = Net(width=9), Net(width=8)
        before = {name: whole(param) for name, param in model.named_parameters()}
        with refused("embed.weight has shape .11, 9."):
            load_sharded_safetensors(other, file)
        with refused(r"unused, .* missing from them, blocks"):
            load_sharded_safetensors(model, file, rename=lambda name: f"model.{name}")
        with refused("one name"):
            load_sharded_safetensors(model, file, rename=lambda name: "x")
        with deepspeed.zero.GatheredParameters(model.unused), refused("unused is gathered"):
            load_sharded_safetensors(model, file)
        content = file.read_bytes()
        for damaged in (content[:-4], content[:100], b"\xff" * 8 + content[8:]):
            on_rank_0(lambda damaged=damaged: put(file, damaged))
            with refused("model-1.safetensors cannot be read as"):
                load_sharded_safetensors(model, tmp_path / "model")
        with refused("no \\*.safetensors"):
            load_sharded_safetensors(model, tmp_path)
        for name, param in model.named_parameters():
            assert torch.equal(whole(param), before[name]), name

    @pytest.mark.world_size(1)
    def test_what_is_not_sharded(self, tmp_path: Path) -> None:
        # Kills: buffers left out, masters of stage 2 that silently stay behind.
        wanted = nn.BatchNorm1d(3)
        wanted.running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
        named = {f"norm.{name}": value for name, value in wanted.state_dict().items()}
        save_file(named, tmp_path / "x.safetensors")
        model = nn.BatchNorm1d(3)
        cut = slice(len("norm."), None)
        load_sharded_safetensors(model, tmp_path, rename=lambda name: name[cut])
        assert torch.equal(model.running_mean, wanted.running_mean)
        partial = load_sharded_safetensors(model, tmp_path, strict=False)
        assert len(partial.missing_keys) == len(partial.unexpected_keys) == 5
        engine = engine_of(model, {**config_of(2), **BF16})
        with refused("master weight"):
            load_sharded_safetensors(engine.module, tmp_path, rename=lambda name: name[cut])
        engine.destroy()
