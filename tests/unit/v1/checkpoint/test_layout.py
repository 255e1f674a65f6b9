"""File names, keys and types of checkpoints equal upstream's; no file holds more than it needs."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint import file_names
from deepspeed.utils.tensor_fragment import fragment_address
from unit.common import TORCH, DistributedTest
from unit.v1.looping import each

from .runs import ACCUMULATE, BF16, saved, zero

ADAM = {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.01}
WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 4}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 1000000,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": WARMUP},
}
ADAM_GROUP = (
    "lr float, betas tuple, eps float, weight_decay float, amsgrad bool, maximize bool, foreach "
    "NoneType, capturable bool, differentiable bool, fused NoneType, decoupled_weight_decay "
    "bool, params list"
).split(", ")
# Read off files that upstream 0.19.6 wrote with this model and configuration (rank 0 of 2).
MODEL_FILE = (  # the last is not upstream's
    "module OrderedDict, buffer_names list, optimizer NoneType, param_shapes list, "
    "frozen_param_shapes OrderedDict, shared_params dict, frozen_param_fragments OrderedDict, "
    "lr_scheduler dict, data_sampler NoneType, random_ltd NoneType, sparse_tensor_module_names "
    "set, skipped_steps int, global_steps int, global_samples int, dp_world_size int, "
    "mp_world_size int, checkpoint_parallel_dimensions dict, ds_config dict, ds_version str, "
    "note str, manifest_version int"
).split(", ")
WEIGHTS = {"0.weight": (32, 16), "0.bias": (32,), "2.weight": (16, 32), "2.bias": (16,)}
SHARD = (
    "clip_grad float, base_optimizer_state dict, single_partition_of_fp32_groups list, "
    "group_paddings list, partition_count list, ds_version str, param_slice_mappings list"
).split(", ")
SCALED = (
    "loss_scaler LossScaler, dynamic_loss_scale bool, overflow bool, zero_stage ZeroStageEnum"
).split(", ")


MODEL, HOSTS = "mp_rank_00_model_states.pt", [f"host_state_rank_{rank}.pt" for rank in range(2)]


def absent(*keys: str) -> dict[str, str]:
    """Types of keys that hold nothing; `frozen_param_shapes` is always one."""
    return dict.fromkeys(("frozen_param_shapes", *keys), "NoneType")


def keys_of(value: dict[str, Any]) -> list[str]:
    return [f"{key} {type(item).__name__}" for key, item in value.items()]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def save(folder: str, **keys: Any) -> dict[str, Any]:
    """A step of the model that golden lists were read off; returns files' contents by name."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    engine = deepspeed.initialize(model=model, config={**CONFIG, **keys})[0]
    for _ in range(2):
        x = torch.randn(4, 16, dtype=next(model.parameters()).dtype)
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
    engine.save_checkpoint(folder, tag="step1", client_state={"note": "ours"})
    assert Path(folder, "latest").read_text() == "step1"
    paths = Path(folder, "step1").glob("*.pt")
    read = {path.name: torch.load(path, weights_only=False) for path in paths}
    dist.barrier()
    return read


def adam_group() -> list[str]:
    """What torch's AdamW keeps of a group: `ADAM_GROUP`, of an older torch what it does keep."""
    if TORCH >= (2, 13):
        return ADAM_GROUP
    alone = torch.optim.AdamW([torch.zeros(1)])
    return keys_of(alone.state_dict()["param_groups"][0])


def check_shard(state: dict[str, Any]) -> None:
    """The part that all sharded optimizers share."""
    base = state["base_optimizer_state"]
    assert keys_of(base) == ["state dict", "param_groups list"]
    assert list(base["state"]) == [0]
    found = {**base["state"][0], "master": state["single_partition_of_fp32_groups"][0]}
    assert {t.dtype for t in found.values()} == {torch.float32}
    shapes = {"step": (), "exp_avg": (536,), "exp_avg_sq": (536,), "master": (536,)}
    assert {key: tuple(t.shape) for key, t in found.items()} == shapes
    assert sorted(keys_of(base["param_groups"][0])) == sorted(adam_group())
    assert len(state["single_partition_of_fp32_groups"]) == 1
    assert (state["group_paddings"], state["partition_count"]) == ([0], [2])
    mapping = state["param_slice_mappings"][0]
    places = {name: (address.numel, address.start) for name, address in mapping.items()}
    assert places == {"0.weight": (512, 0), "0.bias": (24, 512)}
    assert type(mapping["0.bias"]) is fragment_address
    assert fragment_address.__module__ == "deepspeed.utils.tensor_fragment"


class TestLayout(DistributedTest):
    """Kills: a renamed file or key, a padded master, whole buffers in files."""

    world_size = 2

    def check_model(self, model: dict[str, Any], dtype: torch.dtype, **types: str) -> None:
        usual = dict(entry.split() for entry in MODEL_FILE)
        assert sorted(keys_of(model)) == sorted(f"{k} {v}" for k, v in {**usual, **types}.items())
        assert {name: tuple(t.shape) for name, t in model["module"].items()} == WEIGHTS
        assert {t.dtype for t in model["module"].values()} == {dtype}
        counts = "skipped_steps global_steps global_samples dp_world_size mp_world_size".split()
        assert [model[key] for key in counts] == [0, 1, 16, 2, 1]
        assert model["lr_scheduler"] == {"last_batch_iteration": 0}
        assert model["checkpoint_parallel_dimensions"] == {"pp_degree": 1, "tp_degree": 1}
        assert model["note"] == "ours"

    def test_zero2_fp32(self, tmp_path: Path) -> None:
        files = save(str(tmp_path), zero_optimization={"stage": 2})
        shards = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
        assert sorted(files) == sorted([MODEL, *shards, *HOSTS])
        model, shard = files[MODEL], files[shards[0]]
        self.check_model(model, torch.float32)
        assert [dict(group) for group in model["param_shapes"]] == [WEIGHTS]
        assert keys_of(shard) == ["optimizer_state_dict dict", "ds_config dict", "ds_version str"]
        state = shard["optimizer_state_dict"]
        assert sorted(keys_of(state)) == sorted(SHARD + SCALED)
        assert type(state["loss_scaler"]).__module__ == "deepspeed.runtime.fp16.loss_scaler"
        assert type(state["zero_stage"]).__module__ == "deepspeed.runtime.zero.config"
        assert state["zero_stage"] == 2
        # Kills: members of an enum written by getattr, as Python 3.11.2 does by itself.
        assert b"getattr" not in pickle.dumps(state["zero_stage"], protocol=2)
        check_shard(state)

    def test_zero1_bf16_with_fp32_accumulation_and_zero0_fp32(self, tmp_path: Path) -> None:
        files = save(str(tmp_path / "1"), zero_optimization={"stage": 1}, **ACCUMULATE)
        shard = files["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
        self.check_model(files[MODEL], torch.bfloat16, **absent("frozen_param_fragments"))
        assert sorted(keys_of(shard)) == sorted(SHARD)
        check_shard(shard)

        files = save(str(tmp_path / "0"))
        assert sorted(files) == [*HOSTS, MODEL]
        optimizer = files[MODEL]["optimizer"]
        nothing = absent("param_shapes", "shared_params", "frozen_param_fragments")
        self.check_model(files[MODEL], torch.float32, optimizer="dict", **nothing)
        assert list(optimizer["state"]) == [0, 1, 2, 3]
        moments = [tuple(state["exp_avg"].shape) for state in optimizer["state"].values()]
        assert moments == list(WEIGHTS.values())
        assert sorted(keys_of(optimizer["param_groups"][0])) == sorted(adam_group())

    @each(stage=(0, 1, 2))
    def test_files_hold_no_more_than_they_need(self, tmp_path: Path, stage: int) -> None:
        fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
        folder = tmp_path / str(stage)
        saved(folder, 2, tag="t", **zero(stage), **(fp16 if stage == 0 else BF16))
        for path in folder.glob("t/*.pt"):
            found = list(tensors(torch.load(path, weights_only=False)))
            assert all(t.untyped_storage().nbytes() == t.nbytes for t in found), path.name
            # Tied weights once, and a stage-2 file only this rank's part: a whole buffer per view
            # would be many times this.
            once = {t.data_ptr(): t.nbytes for t in found if t.numel()}
            assert path.stat().st_size < sum(once.values()) + 400 * len(found) + 25000, path.name
        dist.barrier()
        model = torch.load(folder / "t" / MODEL, weights_only=False)
        tied, again = (model["module"][f"{name}.weight"] for name in ("tied", "again"))
        assert tied.data_ptr() == again.data_ptr()
        if stage:
            assert model["shared_params"] == {"again.weight": "tied.weight"}
            assert set(model["frozen_param_shapes"]) == {"frozen.weight", "frozen.bias"}
        assert model["buffer_names"] == ["calls"]


PACKAGE = Path(deepspeed.__file__).parent
MAY_WRITE_NAMES = ("checkpoint/constants.py", "checkpoint/file_names.py")
# Keys of transformers' configurations and of ours.
OTHER_WORDS = ("layer_types", "layer_specs")
PARTS_OF_NAMES = (
    *("mp_rank_", "zero_pp_rank_", "expp_rank_", "host_state_rank_", "window_rank_", "layer_"),
    *("_states.pt", ".dcp", ".distcp", ".saving", ".replaced", ".removed", ".converting"),
    "manifest.json",
)


def test_names_are_upstreams() -> None:
    layer = file_names.layer_id(7)
    shard = file_names.optimizer_file
    names = {
        file_names.model_file(3): "mp_rank_03_model_states.pt",
        file_names.stage3_model_file(12, 3): "zero_pp_rank_12_mp_rank_03_model_states.pt",
        shard(12, 3, bf16=False): "zero_pp_rank_12_mp_rank_03_optim_states.pt",
        shard(0, 113, bf16=True): "bf16_zero_pp_rank_0_mp_rank_113_optim_states.pt",
        file_names.expert_optimizer_file(2, 0): "expp_rank_2_mp_rank_00_optim_states.pt",
        file_names.expert_file(1, 12, 3): "layer_1_expert_12_mp_rank_03_model_states.pt",
        file_names.layer_file(layer, ""): "layer_07-model_states.pt",
        file_names.layer_file(layer, "model_01"): "layer_07-model_01-model_states.pt",
        file_names.layer_file_glob(7): "layer_07-*model_states.pt",
        file_names.host_file(11): "host_state_rank_11.pt",
        file_names.window_file(11): "window_rank_11.pt",
        file_names.state_file("exp_avg"): "exp_avg.pt",
        file_names.default_tag(1000): "global_step1000",
    }
    assert list(names) == list(names.values())


@pytest.mark.parametrize("rank", [0, 7, 130])
@pytest.mark.parametrize("part", [0, 7, 130])
def test_names_are_read_back(rank: int, part: int) -> None:
    for bf16 in (False, True):
        name = file_names.optimizer_file(rank, part, bf16)
        assert file_names.parse_optimizer_file(name) == (rank, part)
    name = file_names.expert_optimizer_file(rank, part)
    assert file_names.parse_expert_optimizer_file(name) == (rank, part)
    name = file_names.expert_file(rank, part, rank + part)
    assert file_names.parse_expert_file(name) == (rank, part, rank + part)
    layer = file_names.layer_id(rank)
    assert file_names.parse_layer_file(file_names.layer_file(layer, "")) == (rank, 0)
    for coordinates in (f"model_{part:02d}", f"expert_01-model_{part:02d}"):
        name = file_names.layer_file(layer, coordinates)
        assert file_names.parse_layer_file(name) == (rank, part)
    assert file_names.parse_state_file(file_names.state_file("exp_avg")) == "exp_avg"


def test_every_kind_is_told_from_all_others() -> None:
    """A parser that is too generous would take one kind of file for another."""
    kinds = {
        file_names.model_file(0): "is_model_file",
        file_names.optimizer_file(0, 0, bf16=False): "parse_optimizer_file",
        file_names.optimizer_file(0, 0, bf16=True): "parse_optimizer_file",
        file_names.expert_optimizer_file(0, 0): "parse_expert_optimizer_file",
        file_names.expert_file(0, 0, 0): "parse_expert_file",
        file_names.layer_file(file_names.layer_id(0), "model_00"): "parse_layer_file",
        file_names.host_file(0): "is_host_file",
    }
    for name, own in kinds.items():
        found = {kind for kind in kinds.values() if getattr(file_names, kind)(name)}
        assert found == {own}, name
        assert not any(getattr(file_names, kind)(f"{name}.copy") for kind in kinds.values())
    assert not file_names.is_model_file(file_names.stage3_model_file(0, 0))


def literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of all strings that are no docstrings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    first = [node.body[0] for node in ast.walk(tree) if isinstance(node, owners) and node.body]
    docstrings = {id(node.value) for node in first if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                yield node.lineno, node.value


def test_only_one_module_makes_names() -> None:
    """Kills: a second format or pattern of a name, which a change of the first one would miss."""
    found = []
    for folder in ("checkpoint", "runtime", "utils"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            for line, text in literals(ast.parse(path.read_text())):
                if name in MAY_WRITE_NAMES or text in OTHER_WORDS:
                    continue
                if text.startswith(PARTS_OF_NAMES) or text.endswith(PARTS_OF_NAMES):
                    found.append(f"{name}:{line}: {text!r}")
    assert found == []
