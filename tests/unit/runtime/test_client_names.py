"""Names beside the engine's own that client libraries import and call, each used as they use it."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import git_version_info
from deepspeed.accelerator import get_accelerator
from deepspeed.launcher import nodes, runner
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import checkpoint_engine
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine
from deepspeed.runtime.config import DeepSpeedConfig
from unit.common import DistributedTest
from unit.models import config_of, sgd


def started(**more: Any) -> Any:
    config = config_of(0, 2, optimizer=sgd(0.5), **more)
    return deepspeed.initialize(model=nn.Linear(4, 4), config=config)[0]


def test_what_reports_of_an_environment_read() -> None:
    # OpenRLHF and SwissArmyTransformer read the version, ArcticTraining the accelerator.
    assert deepspeed.version == deepspeed.__version__ and deepspeed.version[0].isdigit()
    assert get_accelerator().device_name(0).startswith(git_version_info.accelerator_name)
    assert OpBuilder.is_rocm_pytorch() is (torch.version.hip is not None)
    found = checkpoint_engine.TorchCheckpointEngine
    assert found is torch_checkpoint_engine.TorchCheckpointEngine


def test_a_named_random_state_is_added_and_forked() -> None:
    """As SwissArmyTransformer seeds, and as gpt-neox takes the names over."""
    tracker = checkpointing._CUDA_RNG_STATE_TRACKER
    name = checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME
    assert tracker is deepspeed.checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    before = torch.get_rng_state()
    try:
        tracker.add(name, 5)
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            drawn = torch.rand(3)
        checkpointing._set_cuda_rng_state(before)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), drawn)
        checkpointing._set_cuda_rng_state(before)
        assert torch.equal(torch.get_rng_state(), before)
    finally:
        torch.set_rng_state(before)
        tracker.reset()


@pytest.mark.parametrize("rebound", [False, True])
def test_variables_that_a_program_adds_reach_all_nodes(rebound: bool, monkeypatch: Any) -> None:
    """gpt-neox appends to the launcher's list before it calls it; others put a new one there."""
    told = []
    monkeypatch.setattr(nodes, "run_nodes", lambda *args: told.append(args) or 0)
    monkeypatch.setattr(runner, "EXPORT_ENVS", [*runner.EXPORT_ENVS])
    if rebound:
        runner.EXPORT_ENVS = [*runner.EXPORT_ENVS, "MINE"]
    else:
        runner.EXPORT_ENVS.append("MINE")
    arguments = ["--force_multi", "--num_gpus", "1", "--no_ssh_check", "script.py"]
    assert runner.launch(runner.parse_args(arguments)) == 0
    ((*_, prefixes),) = told
    assert "MINE" in prefixes and "NCCL" in prefixes


def test_a_hostfile_is_read_from_lines_and_dtypes_from_the_configuration() -> None:
    lines = ["# a comment", "a slots=2", "b slots=3  # more"]
    assert runner._parse_hostfile(lines) == {"a": 2, "b": 3}
    with pytest.raises(ValueError, match="contains a bad entry: 'a slots'"):
        runner._parse_hostfile(["a slots"])
    config = {"train_batch_size": 1, "data_types": {"param_dtype": "fp32", "buffer_dtype": "bf16"}}
    read = DeepSpeedConfig(config)
    assert (read.param_dtype, read.buffer_dtype) == ("fp32", "bf16")
    assert DeepSpeedConfig({"train_batch_size": 1}).buffer_dtype is None


class TestClientNames(DistributedTest):
    world_size = 1

    def test_autocast_of_a_forward_written_anew(self) -> None:
        """As ArcticTraining's: the module is called inside of the engine's autocast."""
        off = started()
        with engine_module.autocast_if_enabled(off):
            assert off.module(torch.ones(2, 4)).dtype is torch.float32
        on = started(torch_autocast={"enabled": True, "dtype": "bfloat16"})
        path: Any = importlib.import_module("deepspeed.runtime.torch_autocast")
        assert path.autocast_if_enabled is engine_module.autocast_if_enabled
        with engine_module.autocast_if_enabled(on):
            assert on.module(torch.ones(2, 4)).dtype is torch.bfloat16
        assert on(torch.ones(2, 4)).dtype is torch.bfloat16

        engine = started()
        assert engine.sparse_gradients is False
        name = engine._get_optimizer_ckpt_name("out", "tag", 3)
        assert name == "out/tag/expp_rank_3_mp_rank_00_optim_states.pt"


def test_all_names_of_utils_at_once() -> None:
    found: dict[str, Any] = {}
    exec("from deepspeed.utils import *", found)
    assert {"groups", "logger", "safe_get_full_fp32_param", "z3_leaf_module"} <= found.keys()
