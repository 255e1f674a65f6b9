"""Upstream's properties, paths and getters of the configuration, and what importing them costs."""

import subprocess
import sys

import pytest
import torch

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_models.getters import GETTERS
from deepspeed.runtime.config_models.training import TrainingConfig
from deepspeed.runtime.zero.config import ZeroStageEnum
from unit.runtime.config_models.reading import config


def test_upstreams_names_delegate():
    read = config(
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
        scheduler={"type": "WarmupLR"},
        zero_optimization={"stage": 1},
        communication_data_type="bf16",
        gradient_clipping=0.5,
        checkpoint={"tag_validation": "Fail"},
        fp16={"enabled": True, "initial_scale_power": 4},
    )
    assert (read.optimizer_name, read.optimizer_params) == ("adamw", {"lr": 1e-3})
    assert (read.scheduler_name, read.scheduler_params) == ("WarmupLR", None)
    assert read.zero_enabled and read.zero_optimization_stage == ZeroStageEnum.optimizer_states
    assert read.zero_config is read.tree.zero_optimization
    assert read.communication_data_type is torch.bfloat16 and read.gradient_clipping == 0.5
    assert read.checkpoint_tag_validation_enabled and read.checkpoint_tag_validation_fail
    assert (
        read.float16_config.dynamic_loss_scale_args()["init_scale"] == 16
        and read.float16_config.dynamic
    )
    assert read.monitor_config.enabled is False and read.timers_config.enabled
    assert config(optimizer={"type": "Adadelta"}).optimizer_name == "Adadelta"
    assert config().optimizer_name is None
    with pytest.raises(AttributeError, match="no_such"):
        _ = read.no_such


def test_importing_the_configuration_does_not_import_pydantic():
    code = (
        "import sys, deepspeed.runtime.config, deepspeed.runtime.zero.config, "
        "deepspeed.runtime.zero.offload_config, deepspeed.runtime.precision_config, "
        "deepspeed.monitor.config, deepspeed.runtime.fp16.loss_scaler, "
        "deepspeed.runtime.dataloader, deepspeed.runtime.lr_schedules; sys.exit('pydantic' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "module, name",
    [
        ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
        ("deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
        ("deepspeed.runtime.zero.leaf_module_config", "DeepSpeedZeroLeafModuleConfig"),
        ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
        ("deepspeed.runtime.config_utils", "DeepSpeedConfigModel"),
        ("deepspeed.monitor.config", "WandbConfig"),
        ("deepspeed.profiling.config", "DeepSpeedFlopsProfilerConfig"),
        ("deepspeed.nebula.config", "DeepSpeedNebulaConfig"),
        (
            "deepspeed.runtime.activation_checkpointing.config",
            "DeepSpeedActivationCheckpointingConfig",
        ),
    ],
)
def test_models_are_found_under_upstreams_paths(module, name):
    loaded = __import__(module, fromlist=[name])
    assert getattr(loaded, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = loaded.no_such_name


def test_getters_read_raw_dicts_as_the_tree_does():
    from deepspeed.runtime import config as module

    raw = {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "communication_data_type": "fp16",
        "optimizer": {"type": "AdamW", "params": {"lr": 1}},
        "torch_autocast": {"enabled": True, "dtype": "bf16"},
        "dump_state": True,
    }
    tree = DeepSpeedConfig(raw).tree
    for name in GETTERS:
        key = name.removeprefix("get_")
        if key in TrainingConfig.model_fields and key != "communication_data_type":
            for given in (raw, {"train_batch_size": 8}):
                expected = getattr(tree if given is raw else config().tree, key)
                if key not in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
                    assert getattr(module, name)(given) == expected, name
    assert module.get_communication_data_type(raw) is torch.float16
    assert module.get_optimizer_name(raw) == "AdamW" and module.get_optimizer_params(raw) == {
        "lr": 1
    }
    assert module.get_scheduler_name(raw) is None
    assert module.get_torch_autocast_dtype(
        raw
    ) is torch.bfloat16 and module.get_torch_autocast_enabled(raw)
    assert module.get_train_micro_batch_size_per_gpu(raw) is None
