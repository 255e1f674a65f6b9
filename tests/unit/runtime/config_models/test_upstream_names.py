"""Upstream's names of the configuration: each is there under its path and holds its value, as read
off DeepSpeed 0.19.6; texts such as ``ACTIVATION_CHKPT_FORMAT`` are this project's own.
"""

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.runtime import config as config_module
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from unit.common import DistributedTest


def of(prefix: str, **defaults: Any) -> dict[str, Any]:
    """Name the constants of keys and of their defaults."""
    names = {f"{prefix}{key.upper()}": key for key in defaults}
    return names | {f"{name}_DEFAULT": defaults[key] for name, key in names.items()}


def of_words(names: str, form: str = "{}") -> dict[str, Any]:
    """Name constants that hold their own names in small letters."""
    return {form.format(name.upper()): name.lower() for name in names.split()}


def all_are(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


CONSTANTS: dict[tuple[str, ...], dict[str, Any]] = {
    ("deepspeed.runtime.constants", "deepspeed.runtime.config"): {
        **of_words("OPTIMIZER SCHEDULER TYPE MAX_GRAD_NORM FP16 AMP DATA_TYPES TORCH_AUTOCAST"),
        **of_words("CHECKPOINT DATA_PARALLEL_GROUP GLOBAL_RANK"),
        **of("", train_batch_size=None, train_micro_batch_size_per_gpu=None),
        **of("", gradient_accumulation_steps=None, adam_w_mode=True, gradient_clipping=1.0),
        **of("", prescale_gradients=False, gradient_predivide_factor=1.0),
        **of("", gradient_allreduce_op="mean", communication_data_type=None),
        **of("", sparse_gradients=False, disable_allgather=False),
        **of("", managed_gradient_accumulation=True, grad_accum_dtype=None),
        **of("", zero_allow_untested_optimizer=False, zero_force_ds_cpu_optimizer=True),
        **of("", steps_per_print=None, wall_clock_breakdown=False, memory_breakdown=False),
        **of("", dump_state=False, log_level=None, dataloader_drop_last=False),
        **of("", vocabulary_size=None),
        **of("FP16_", enabled=False, auto_cast=False, loss_scale=0, initial_scale_power=16),
        **of("FP16_", loss_scale_window=1000, hysteresis=2, consecutive_hysteresis=False),
        **of("FP16_", min_loss_scale=1),
        **of("BFLOAT16_", enabled=False),
        **of("AMP_", enabled=False),
        **of("TORCH_AUTOCAST_", enabled=False),
        **of("CHECKPOINT_", tag_validation="WARN"),
        **of_words("TRAIN EVAL PREDICT ENCODE", "ROUTE_{}"),
        **all_are(None, "OPTIMIZER_TYPE_DEFAULT SCHEDULER_TYPE_DEFAULT"),
        **all_are("params", "OPTIMIZER_PARAMS SCHEDULER_PARAMS"),
        **of_words("ADAGRAD ADAM ADAMW LAMB MUADAM MUADAMW MUSGD LION MUON", "{}_OPTIMIZER"),
        "ONEBIT_ADAM_OPTIMIZER": "onebitadam",
        "ONEBIT_LAMB_OPTIMIZER": "onebitlamb",
        "ZERO_ONE_ADAM_OPTIMIZER": "zerooneadam",
        "DEEPSPEED_OPTIMIZERS": (
            "adagrad adam adamw lamb onebitadam onebitlamb zerooneadam "
            "muadam muadamw musgd lion muon"
        ).split(),
        "TORCH_ADAM_PARAM": "torch_adam",
        **of_words("MEAN SUM", "GRADIENT_ALLREDUCE_OP_{}"),
        "GRADIENT_ALLREDUCE_OP_SUPPORTED": ("mean", "sum"),
        "BFLOAT16": "bf16",
        "BFLOAT16_OLD": "bfloat16",
        "BFLOAT16_IMMEDIATE_GRAD_UPDATE": "immediate_grad_update",
        "TORCH_AUTOCAST_DTYPE": "dtype",
        "TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES": "lower_precision_safe_modules",
        "TENSOR_CORE_ALIGN_SIZE": 8,
        "CHECKPOINT_TAG_VALIDATION_MODES": ["WARN", "IGNORE", "FAIL"],
        "LOAD_UNIVERSAL_CHECKPOINT": "load_universal",
        "LOAD_UNIVERSAL_CHECKPOINT_DEFAULT": False,
        "USE_NODE_LOCAL_STORAGE_CHECKPOINT": "use_node_local_storage",
        "USE_NODE_LOCAL_STORAGE_CHECKPOINT_DEFAULT": False,
        "PIPE_REPLICATED": "ds_pipe_replicated",
    },
    ("deepspeed.runtime.precision_config",): {
        **of_words("CONSECUTIVE_HYSTERESIS DELAYED_SHIFT FP16 SCALE_WINDOW"),
        "BFLOAT16": "bf16",
        "BFLOAT16_OLD": "bfloat16",
        "INITIAL_LOSS_SCALE": "init_scale",
        "MIN_LOSS_SCALE": "min_scale",
    },
    ("deepspeed.runtime.zero.config",): {"ZERO_OPTIMIZATION": "zero_optimization"},
    ("deepspeed.runtime.zero.offload_config",): of_words("CPU NVME", "OFFLOAD_{}_DEVICE"),
    ("deepspeed.runtime.zero.leaf_module_config",): {
        "DEFAULT_LEAF_MODULE_CLASSES": [
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ],
        **all_are([], "DEFAULT_LEAF_MODULE_NAMES DEFAULT_LEAF_MODULE_NAME_SUFFIXES"),
    },
    ("deepspeed.runtime.activation_checkpointing.config",): {
        **of("ACT_CHKPT_", contiguous_memory_optimization=False, cpu_checkpointing=False),
        **of("ACT_CHKPT_", number_checkpoints=None, partition_activations=False, profile=False),
        **of("ACT_CHKPT_", synchronize_checkpoint_boundary=False),
        "ACTIVATION_CHKPT_FORMAT": "\n"
        "The configuration's block, with its defaults:\n"
        '"activation_checkpointing": {\n'
        '  "partition_activations": false,\n'
        '  "number_checkpoints": null,\n'
        '  "contiguous_memory_optimization": false,\n'
        '  "cpu_checkpointing": false,\n'
        '  "nvme_path": null,\n'
        '  "profile": false,\n'
        '  "synchronize_checkpoint_boundary": false\n'
        "}\n",
        "ACT_CHKPT": "activation_checkpointing",
    },
    ("deepspeed.profiling.constants", "deepspeed.profiling.config"): {
        **of("FLOPS_PROFILER_", enabled=False, recompute_fwd_factor=0.0, profile_step=1),
        **of("FLOPS_PROFILER_", module_depth=-1, top_modules=1, detailed=True, output_file=None),
        "FLOPS_PROFILER": "flops_profiler",
    },
    ("deepspeed.nebula.constants",): {**of("NEBULA_", enabled=False), "NEBULA": "nebula"},
    ("deepspeed.elasticity.constants",): {
        **of("", enabled=False, min_gpus=1, max_gpus=10000, num_gpus_per_node=1),
        **of("", model_parallel_size=1, min_time=0, prefer_larger_batch=True),
        **of("", ignore_non_elastic_batch_info=False, version=0.2),
        "ELASTICITY": "elasticity",
        "DEEPSPEED_ELASTICITY_CONFIG": "DEEPSPEED_ELASTICITY_CONFIG",
        "MAX_ACCEPTABLE_BATCH_SIZE": "max_train_batch_size",
        "MAX_ACCEPTABLE_BATCH_SIZE_DEFAULT": 2000,
        "MICRO_BATCHES": "micro_batch_sizes",
        "MICRO_BATCHES_DEFAULT": [2, 4, 6],
        "LATEST_ELASTICITY_VERSION": 0.2,
        "MINIMUM_DEEPSPEED_VERSION": "0.3.8",
    },
    ("deepspeed.comm.constants", "deepspeed.comm.config"): {
        **of("COMMS_LOGGER_", debug=False, enabled=False, prof_all=True, prof_ops=[]),
        **of("COMMS_LOGGER_", verbose=False),
        **of_words("CCL GLOO HCCL MPI NCCL SCCL", "{}_BACKEND"),
        "COMMS_LOGGER": "comms_logger",
        "COMMS_LOGGER_FORMAT": "\n"
        "The Comms Logger can be specified as:\n"
        '"comms_logger": {\n'
        '  "enabled": true,\n'
        '  "verbose": false,\n'
        '  "prof_all": true,\n'
        '  "debug": false,\n'
        '  "prof_ops": ["all_reduce", "custom_all_reduce_name"]\n'
        "}\n",
        "DEFAULT_AML_MASTER_PORT": "54965",
        "DEFAULT_AML_NCCL_SOCKET_IFNAME": "^docker0,lo",
    },
}


# The first of several paths is where they are.
PATHS = {path: names for paths, names in CONSTANTS.items() for path in paths}
HOMES = {paths[0] for paths in CONSTANTS}


@pytest.mark.parametrize("path", PATHS)
def test_constants_hold_their_values(path: str) -> None:
    module, names, scope = importlib.import_module(path), PATHS[path], {}
    found = {name: getattr(module, name, "missing") for name in names}
    assert found == names
    # Equal is not the same: False == 0, and scripts print these.
    kinds = {name: type(value) for name, value in names.items() if value != 0 or value is False}
    assert {name: type(found[name]) for name in kinds} == kinds
    exec(f"from {path} import *", scope)
    assert path not in HOMES or {name: scope.get(name, "missing") for name in names} == names
    with pytest.raises(AttributeError, match=f"module '{path}' has no attribute 'NO_SUCH_NAME'"):
        _ = module.NO_SUCH_NAME


GIVEN: dict[str, Any] = {
    **all_are(True, "prescale_gradients wall_clock_breakdown dump_state dataloader_drop_last"),
    **all_are(True, "zero_allow_untested_optimizer"),
    **all_are(False, "managed_gradient_accumulation zero_force_ds_cpu_optimizer"),
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "gradient_predivide_factor": 2.0,
    "gradient_allreduce_op": "sum",
    "communication_data_type": "fp16",
    "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "torch_autocast": {"enabled": True, "dtype": "bf16"},
    "steps_per_print": 7,
}
# What getters say about an empty dict; of GIVEN, most say what it holds.
OF_NOTHING: dict[str, Any] = {
    **all_are(None, "train_batch_size train_micro_batch_size_per_gpu steps_per_print"),
    **all_are(None, "gradient_accumulation_steps"),
    **all_are(False, "prescale_gradients wall_clock_breakdown dump_state dataloader_drop_last"),
    **all_are(False, "zero_allow_untested_optimizer"),
    **all_are(True, "managed_gradient_accumulation zero_force_ds_cpu_optimizer"),
    **all_are(1.0, "gradient_clipping gradient_predivide_factor"),
    "gradient_allreduce_op": "mean",
}
GETTERS: dict[str, tuple[Any, Any]] = {
    **{f"get_{key}": (GIVEN[key], default) for key, default in OF_NOTHING.items()},
    "get_communication_data_type": (torch.float16, None),
    "get_optimizer_name": ("AdamW", None),
    "get_optimizer_params": ({"lr": 0.25}, None),
    "get_scheduler_name": ("WarmupLR", None),
    "get_scheduler_params": ({"warmup_num_steps": 3}, None),
    "get_torch_autocast_enabled": (True, False),
    "get_torch_autocast_dtype": (torch.bfloat16, None),
}


@pytest.mark.parametrize("name", GETTERS)
def test_getters_read_raw_dicts(name: str) -> None:
    get = getattr(config_module, name)
    assert (get(GIVEN), get({})) == GETTERS[name]
    assert get.__name__ == name and get.__doc__


def test_the_communication_types_getter_takes_another_key() -> None:
    get, key = config_module.get_communication_data_type, "seq_parallel_communication_data_type"
    assert get({key: "bf16"}, key) is torch.bfloat16
    assert get({}, key, "fp32") is torch.float32


BLOCK_GETTERS = [
    ("deepspeed.runtime.zero.config", "get_zero_config", "zero_optimization", {"stage": 2}),
    ("deepspeed.runtime.config", "get_zero_config", "zero_optimization", {"stage": 2}),
    ("deepspeed.runtime.precision_config", "get_float16_config", "fp16", {"loss_scale": 4.0}),
    ("deepspeed.runtime.precision_config", "get_bfloat16_config", "bf16", {"enabled": True}),
    ("deepspeed.runtime.precision_config", "get_bfloat16_config", "bfloat16", {"enabled": True}),
    ("deepspeed.monitor.config", "get_monitor_config", "wandb", {"project": "p"}),
]


@pytest.mark.parametrize("path, name, block, given", BLOCK_GETTERS)
def test_block_getters_return_models(path: str, name: str, block: str, given: Any) -> None:
    get = getattr(importlib.import_module(path), name)
    read = get({block: given, "train_batch_size": 8})
    read = getattr(read, block, read)
    assert {key: getattr(read, key) for key in given} == given
    assert get({}) is not None


OF_ZERO = {
    **all_are(False, "reduce_scatter allgather_partitions contiguous_gradients"),
    **all_are(False, "load_from_fp32_weights ignore_unused_parameters"),
    **all_are(True, "overlap_comm elastic_checkpoint round_robin_gradients"),
    "reduce_bucket_size": 70,
    "allgather_bucket_size": 80,
}
OF_PROFILER = {"recompute_fwd_factor": 0.5, "profile_step": 9, "module_depth": 3}
OF_PROFILER |= {"top_modules": 2, "detailed": False, "output_file": "profile.txt"}
OFFLOAD = {"device": "cpu", "pin_memory": False}
FULL: dict[str, Any] = {
    **{key: value for key, value in GIVEN.items() if key != "torch_autocast"},
    "managed_gradient_accumulation": True,
    "communication_data_type": "fp32",
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 2, **OF_ZERO, "offload_optimizer": OFFLOAD},
    "checkpoint": {"tag_validation": "Fail", "load_universal": True},
    "flops_profiler": OF_PROFILER,
    "memory_breakdown": True,
    "dump_state": False,
}
# What both the configuration and the engine's methods say about FULL.
OF_BOTH: dict[str, Any] = {
    **all_are(True, "memory_breakdown checkpoint_tag_validation_enabled"),
    **all_are(True, "checkpoint_tag_validation_fail load_universal_checkpoint"),
    **all_are(False, "elasticity_enabled torch_autocast_enabled"),
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 7,
    "zero_optimization_stage": 2,
    "optimizer_name": "adamw",
    "optimizer_params": {"lr": 0.25},
    "scheduler_name": "WarmupLR",
    "scheduler_params": {"warmup_num_steps": 3},
    "torch_autocast_dtype": None,
}
CONFIG_ATTRIBUTES: dict[str, Any] = {
    **OF_BOTH,
    **all_are(False, "prescale_gradients use_node_local_storage"),
    **all_are(False, "sparse_gradients_enabled amp_enabled"),
    **all_are(torch.float32, "communication_data_type seq_parallel_communication_data_type"),
    **all_are(1, "world_size sequence_parallel_size"),
    "zero_enabled": True,
    "global_rank": 0,
    "grad_accum_dtype": "fp32",
    "torch_autocast_lower_precision_safe_modules": None,
}
# Attribute -> the block of the tree that it is.
CONFIG_BLOCKS = {"zero_config": "zero_optimization", "float16_config": "fp16"}
CONFIG_BLOCKS |= {"bfloat16_config": "bf16", "checkpoint": "checkpoint"}
CONFIG_BLOCKS |= {
    f"{name}_config": name for name in ("activation_checkpointing", "compile", "tensor_parallel")
}


def test_attributes_of_the_configuration() -> None:
    read = DeepSpeedConfig(FULL)
    assert {name: getattr(read, name) for name in CONFIG_ATTRIBUTES} == CONFIG_ATTRIBUTES
    for name, block in CONFIG_BLOCKS.items():
        assert getattr(read, name) is getattr(read.tree, block), name
    assert read.timers_config is read.tree.timers.throughput
    assert read.monitor_config.wandb is read.tree.wandb
    # Kills: an assignment that the engine would not see.
    for name in ("zero_enabled", "zero_config", "optimizer_name"):
        with pytest.raises(AttributeError):
            setattr(read, name, None)


def test_of_other_configurations() -> None:
    read = DeepSpeedConfig(
        {
            "train_batch_size": 8,
            "fp16": {"enabled": True, "initial_scale_power": 4},
            "optimizer": {"type": "Adadelta"},
            "scheduler": {"type": "WarmupLR"},
            "zero_optimization": {"stage": 1},
        }
    )
    assert (read.optimizer_name, read.scheduler_params) == ("Adadelta", None)
    assert read.zero_optimization_stage == ZeroStageEnum.optimizer_states
    assert read.float16_config.dynamic
    assert read.float16_config.dynamic_loss_scale_args()["init_scale"] == 16
    assert read.monitor_config.enabled is False and read.timers_config.enabled
    assert DeepSpeedConfig({"train_batch_size": 8}).optimizer_name is None
    with pytest.raises(AttributeError, match="no_such"):
        _ = read.no_such


# Name -> what the method returns for FULL.
ENGINE_METHODS: dict[str, Any] = {
    **OF_BOTH,
    **{f"zero_{key}": value for key, value in OF_ZERO.items()},
    **{f"flops_profiler_{key}": value for key, value in OF_PROFILER.items()},
    **all_are(False, "fp16_enabled fp16_auto_cast flops_profiler_enabled dump_state"),
    **all_are(False, "dynamic_loss_scale zero_optimization_partition_weights"),
    **all_are(False, "is_elastic_model_parallel_supported"),
    **all_are(False, "zero_gather_16bit_weights_on_model_save"),
    **all_are(True, "bfloat16_enabled zero_optimization dataloader_drop_last"),
    **all_are(True, "zero_optimization_partition_gradients wall_clock_breakdown"),
    **all_are(True, "zero_allow_untested_optimizer zero_cpu_offload postscale_gradients"),
    **all_are(True, "managed_gradient_accumulation"),
    "get_batch_info": (8, 2, 4),
    "loss_scale": 0.0,
    "get_data_types": (torch.bfloat16, torch.float32),
    "gradient_predivide_factor": 1.0,
    "get_type": [None],
    "get_mom": [(0.9, 0.999)],
}
ENGINE_PROPERTIES = {"model_dtype": torch.bfloat16, "communication_data_type": torch.float32}


class TestEngine(DistributedTest):
    world_size = 1

    def test_methods_and_properties(self) -> None:
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=FULL)
        assert {name: getattr(engine, name)() for name in ENGINE_METHODS} == ENGINE_METHODS
        assert {name: getattr(engine, name) for name in ENGINE_PROPERTIES} == ENGINE_PROPERTIES
        offload = engine.zero_offload_optimizer()
        assert offload.device is OffloadDeviceEnum.cpu and offload.pin_memory is False
        assert engine.config["train_batch_size"] == 8
        engine.set_train_batch_size(16)
        assert engine.get_batch_info() == (16, 2, 8)
        engine.set_train_micro_batch_size(1)
        assert engine.get_batch_info() == (8, 1, 8)
        engine.set_lr(0.5)
        assert engine.get_lr() == [0.5]

    def test_a_clients_optimizer_is_named_by_its_class(self) -> None:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {"train_batch_size": 2}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        assert engine.optimizer_name() == "SGD"
        assert engine.optimizer_params() is None and engine.steps_per_print() is None


def test_no_path_imports_pydantic() -> None:
    """Kills: a name that is derived when its module is imported, not when it is asked for."""
    names = "fp16.loss_scaler dataloader lr_schedules zero.config zero.offload_config".split()
    more = {"deepspeed.monitor.config", *(f"deepspeed.runtime.{name}" for name in names)}
    paths = sorted({path for paths in CONSTANTS for path in paths} | more)
    code = f"import sys, {', '.join(paths)}, deepspeed.elasticity.elasticity\n"
    code += "sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
