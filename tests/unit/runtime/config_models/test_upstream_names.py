"""Upstream's names of the configuration: each is there under its path and holds its value.

The values were read off DeepSpeed 0.19.6; texts such as ``ACTIVATION_CHKPT_FORMAT`` are this
project's own. A name that is derived must hold what a written one would.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from unit.common import DistributedTest

CONSTANTS: dict[tuple[str, ...], dict[str, Any]] = {
    ("deepspeed.runtime.constants", "deepspeed.runtime.config"): {
        "ROUTE_TRAIN": "train",
        "ROUTE_EVAL": "eval",
        "ROUTE_PREDICT": "predict",
        "ROUTE_ENCODE": "encode",
        "TRAIN_BATCH_SIZE": "train_batch_size",
        "TRAIN_BATCH_SIZE_DEFAULT": None,
        "TRAIN_MICRO_BATCH_SIZE_PER_GPU": "train_micro_batch_size_per_gpu",
        "TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT": None,
        "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
        "GRADIENT_ACCUMULATION_STEPS_DEFAULT": None,
        "OPTIMIZER": "optimizer",
        "OPTIMIZER_TYPE_DEFAULT": None,
        "OPTIMIZER_PARAMS": "params",
        "SCHEDULER": "scheduler",
        "SCHEDULER_TYPE_DEFAULT": None,
        "SCHEDULER_PARAMS": "params",
        "TYPE": "type",
        "MAX_GRAD_NORM": "max_grad_norm",
        "ADAGRAD_OPTIMIZER": "adagrad",
        "ADAM_OPTIMIZER": "adam",
        "ADAMW_OPTIMIZER": "adamw",
        "LAMB_OPTIMIZER": "lamb",
        "ONEBIT_ADAM_OPTIMIZER": "onebitadam",
        "ONEBIT_LAMB_OPTIMIZER": "onebitlamb",
        "ZERO_ONE_ADAM_OPTIMIZER": "zerooneadam",
        "MUADAM_OPTIMIZER": "muadam",
        "MUADAMW_OPTIMIZER": "muadamw",
        "MUSGD_OPTIMIZER": "musgd",
        "LION_OPTIMIZER": "lion",
        "MUON_OPTIMIZER": "muon",
        "DEEPSPEED_OPTIMIZERS": [
            "adagrad",
            "adam",
            "adamw",
            "lamb",
            "onebitadam",
            "onebitlamb",
            "zerooneadam",
            "muadam",
            "muadamw",
            "musgd",
            "lion",
            "muon",
        ],
        "TORCH_ADAM_PARAM": "torch_adam",
        "ADAM_W_MODE": "adam_w_mode",
        "ADAM_W_MODE_DEFAULT": True,
        "GRADIENT_CLIPPING": "gradient_clipping",
        "GRADIENT_CLIPPING_DEFAULT": 1.0,
        "PRESCALE_GRADIENTS": "prescale_gradients",
        "PRESCALE_GRADIENTS_DEFAULT": False,
        "GRADIENT_PREDIVIDE_FACTOR": "gradient_predivide_factor",
        "GRADIENT_PREDIVIDE_FACTOR_DEFAULT": 1.0,
        "GRADIENT_ALLREDUCE_OP": "gradient_allreduce_op",
        "GRADIENT_ALLREDUCE_OP_MEAN": "mean",
        "GRADIENT_ALLREDUCE_OP_SUM": "sum",
        "GRADIENT_ALLREDUCE_OP_DEFAULT": "mean",
        "GRADIENT_ALLREDUCE_OP_SUPPORTED": ("mean", "sum"),
        "COMMUNICATION_DATA_TYPE": "communication_data_type",
        "COMMUNICATION_DATA_TYPE_DEFAULT": None,
        "SPARSE_GRADIENTS": "sparse_gradients",
        "SPARSE_GRADIENTS_DEFAULT": False,
        "DISABLE_ALLGATHER": "disable_allgather",
        "DISABLE_ALLGATHER_DEFAULT": False,
        "MANAGED_GRADIENT_ACCUMULATION": "managed_gradient_accumulation",
        "MANAGED_GRADIENT_ACCUMULATION_DEFAULT": True,
        "FP16": "fp16",
        "FP16_ENABLED": "enabled",
        "FP16_ENABLED_DEFAULT": False,
        "FP16_AUTO_CAST": "auto_cast",
        "FP16_AUTO_CAST_DEFAULT": False,
        "FP16_LOSS_SCALE": "loss_scale",
        "FP16_LOSS_SCALE_DEFAULT": 0,
        "FP16_INITIAL_SCALE_POWER": "initial_scale_power",
        "FP16_INITIAL_SCALE_POWER_DEFAULT": 16,
        "FP16_LOSS_SCALE_WINDOW": "loss_scale_window",
        "FP16_LOSS_SCALE_WINDOW_DEFAULT": 1000,
        "FP16_HYSTERESIS": "hysteresis",
        "FP16_HYSTERESIS_DEFAULT": 2,
        "FP16_CONSECUTIVE_HYSTERESIS": "consecutive_hysteresis",
        "FP16_CONSECUTIVE_HYSTERESIS_DEFAULT": False,
        "FP16_MIN_LOSS_SCALE": "min_loss_scale",
        "FP16_MIN_LOSS_SCALE_DEFAULT": 1,
        "BFLOAT16": "bf16",
        "BFLOAT16_OLD": "bfloat16",
        "BFLOAT16_ENABLED": "enabled",
        "BFLOAT16_ENABLED_DEFAULT": False,
        "BFLOAT16_IMMEDIATE_GRAD_UPDATE": "immediate_grad_update",
        "AMP": "amp",
        "AMP_ENABLED": "enabled",
        "AMP_ENABLED_DEFAULT": False,
        "DATA_TYPES": "data_types",
        "GRAD_ACCUM_DTYPE": "grad_accum_dtype",
        "GRAD_ACCUM_DTYPE_DEFAULT": None,
        "TORCH_AUTOCAST": "torch_autocast",
        "TORCH_AUTOCAST_ENABLED": "enabled",
        "TORCH_AUTOCAST_ENABLED_DEFAULT": False,
        "TORCH_AUTOCAST_DTYPE": "dtype",
        "TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES": "lower_precision_safe_modules",
        "ZERO_ALLOW_UNTESTED_OPTIMIZER": "zero_allow_untested_optimizer",
        "ZERO_ALLOW_UNTESTED_OPTIMIZER_DEFAULT": False,
        "ZERO_FORCE_DS_CPU_OPTIMIZER": "zero_force_ds_cpu_optimizer",
        "ZERO_FORCE_DS_CPU_OPTIMIZER_DEFAULT": True,
        "STEPS_PER_PRINT": "steps_per_print",
        "STEPS_PER_PRINT_DEFAULT": None,
        "WALL_CLOCK_BREAKDOWN": "wall_clock_breakdown",
        "WALL_CLOCK_BREAKDOWN_DEFAULT": False,
        "MEMORY_BREAKDOWN": "memory_breakdown",
        "MEMORY_BREAKDOWN_DEFAULT": False,
        "DUMP_STATE": "dump_state",
        "DUMP_STATE_DEFAULT": False,
        "LOG_LEVEL": "log_level",
        "LOG_LEVEL_DEFAULT": None,
        "DATALOADER_DROP_LAST": "dataloader_drop_last",
        "DATALOADER_DROP_LAST_DEFAULT": False,
        "VOCABULARY_SIZE": "vocabulary_size",
        "VOCABULARY_SIZE_DEFAULT": None,
        "TENSOR_CORE_ALIGN_SIZE": 8,
        "CHECKPOINT": "checkpoint",
        "CHECKPOINT_TAG_VALIDATION": "tag_validation",
        "CHECKPOINT_TAG_VALIDATION_DEFAULT": "WARN",
        "CHECKPOINT_TAG_VALIDATION_MODES": ["WARN", "IGNORE", "FAIL"],
        "LOAD_UNIVERSAL_CHECKPOINT": "load_universal",
        "LOAD_UNIVERSAL_CHECKPOINT_DEFAULT": False,
        "USE_NODE_LOCAL_STORAGE_CHECKPOINT": "use_node_local_storage",
        "USE_NODE_LOCAL_STORAGE_CHECKPOINT_DEFAULT": False,
        "PIPE_REPLICATED": "ds_pipe_replicated",
        "DATA_PARALLEL_GROUP": "data_parallel_group",
        "GLOBAL_RANK": "global_rank",
    },
    ("deepspeed.runtime.precision_config",): {
        "BFLOAT16": "bf16",
        "BFLOAT16_OLD": "bfloat16",
        "CONSECUTIVE_HYSTERESIS": "consecutive_hysteresis",
        "DELAYED_SHIFT": "delayed_shift",
        "FP16": "fp16",
        "INITIAL_LOSS_SCALE": "init_scale",
        "MIN_LOSS_SCALE": "min_scale",
        "SCALE_WINDOW": "scale_window",
    },
    ("deepspeed.runtime.zero.config",): {
        "ZERO_OPTIMIZATION": "zero_optimization",
    },
    ("deepspeed.runtime.zero.offload_config",): {
        "OFFLOAD_CPU_DEVICE": "cpu",
        "OFFLOAD_NVME_DEVICE": "nvme",
    },
    ("deepspeed.runtime.zero.leaf_module_config",): {
        "DEFAULT_LEAF_MODULE_CLASSES": [
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ],
        "DEFAULT_LEAF_MODULE_NAMES": [],
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES": [],
    },
    ("deepspeed.runtime.activation_checkpointing.config",): {
        "ACTIVATION_CHKPT_FORMAT": (
            "\n"
            "The configuration's block, with its defaults:\n"
            '"activation_checkpointing": {\n'
            '  "partition_activations": false,\n'
            '  "number_checkpoints": null,\n'
            '  "contiguous_memory_optimization": false,\n'
            '  "cpu_checkpointing": false,\n'
            '  "profile": false,\n'
            '  "synchronize_checkpoint_boundary": false\n'
            "}\n"
        ),
        "ACT_CHKPT": "activation_checkpointing",
        "ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION": "contiguous_memory_optimization",
        "ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION_DEFAULT": False,
        "ACT_CHKPT_CPU_CHECKPOINTING": "cpu_checkpointing",
        "ACT_CHKPT_CPU_CHECKPOINTING_DEFAULT": False,
        "ACT_CHKPT_NUMBER_CHECKPOINTS": "number_checkpoints",
        "ACT_CHKPT_NUMBER_CHECKPOINTS_DEFAULT": None,
        "ACT_CHKPT_PARTITION_ACTIVATIONS": "partition_activations",
        "ACT_CHKPT_PARTITION_ACTIVATIONS_DEFAULT": False,
        "ACT_CHKPT_PROFILE": "profile",
        "ACT_CHKPT_PROFILE_DEFAULT": False,
        "ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY": "synchronize_checkpoint_boundary",
        "ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY_DEFAULT": False,
    },
    ("deepspeed.profiling.constants", "deepspeed.profiling.config"): {
        "FLOPS_PROFILER": "flops_profiler",
        "FLOPS_PROFILER_ENABLED": "enabled",
        "FLOPS_PROFILER_ENABLED_DEFAULT": False,
        "FLOPS_PROFILER_RECOMPUTE_FWD_FACTOR": "recompute_fwd_factor",
        "FLOPS_PROFILER_RECOMPUTE_FWD_FACTOR_DEFAULT": 0.0,
        "FLOPS_PROFILER_PROFILE_STEP": "profile_step",
        "FLOPS_PROFILER_PROFILE_STEP_DEFAULT": 1,
        "FLOPS_PROFILER_MODULE_DEPTH": "module_depth",
        "FLOPS_PROFILER_MODULE_DEPTH_DEFAULT": -1,
        "FLOPS_PROFILER_TOP_MODULES": "top_modules",
        "FLOPS_PROFILER_TOP_MODULES_DEFAULT": 1,
        "FLOPS_PROFILER_DETAILED": "detailed",
        "FLOPS_PROFILER_DETAILED_DEFAULT": True,
        "FLOPS_PROFILER_OUTPUT_FILE": "output_file",
        "FLOPS_PROFILER_OUTPUT_FILE_DEFAULT": None,
    },
    ("deepspeed.nebula.constants",): {
        "NEBULA": "nebula",
        "NEBULA_ENABLED": "enabled",
        "NEBULA_ENABLED_DEFAULT": False,
    },
    ("deepspeed.elasticity.constants",): {
        "ELASTICITY": "elasticity",
        "DEEPSPEED_ELASTICITY_CONFIG": "DEEPSPEED_ELASTICITY_CONFIG",
        "ENABLED": "enabled",
        "ENABLED_DEFAULT": False,
        "MAX_ACCEPTABLE_BATCH_SIZE": "max_train_batch_size",
        "MAX_ACCEPTABLE_BATCH_SIZE_DEFAULT": 2000,
        "MICRO_BATCHES": "micro_batch_sizes",
        "MICRO_BATCHES_DEFAULT": [2, 4, 6],
        "MIN_GPUS": "min_gpus",
        "MIN_GPUS_DEFAULT": 1,
        "MAX_GPUS": "max_gpus",
        "MAX_GPUS_DEFAULT": 10000,
        "NUM_GPUS_PER_NODE": "num_gpus_per_node",
        "NUM_GPUS_PER_NODE_DEFAULT": 1,
        "MODEL_PARALLEL_SIZE": "model_parallel_size",
        "MODEL_PARALLEL_SIZE_DEFAULT": 1,
        "MIN_TIME": "min_time",
        "MIN_TIME_DEFAULT": 0,
        "PREFER_LARGER_BATCH": "prefer_larger_batch",
        "PREFER_LARGER_BATCH_DEFAULT": True,
        "IGNORE_NON_ELASTIC_BATCH_INFO": "ignore_non_elastic_batch_info",
        "IGNORE_NON_ELASTIC_BATCH_INFO_DEFAULT": False,
        "VERSION": "version",
        "VERSION_DEFAULT": 0.2,
        "LATEST_ELASTICITY_VERSION": 0.2,
        "MINIMUM_DEEPSPEED_VERSION": "0.3.8",
    },
    ("deepspeed.comm.constants", "deepspeed.comm.config"): {
        "CCL_BACKEND": "ccl",
        "COMMS_LOGGER": "comms_logger",
        "COMMS_LOGGER_DEBUG": "debug",
        "COMMS_LOGGER_DEBUG_DEFAULT": False,
        "COMMS_LOGGER_ENABLED": "enabled",
        "COMMS_LOGGER_ENABLED_DEFAULT": False,
        "COMMS_LOGGER_FORMAT": (
            "\n"
            "The Comms Logger can be specified as:\n"
            '"comms_logger": {\n'
            '  "enabled": true,\n'
            '  "verbose": false,\n'
            '  "prof_all": true,\n'
            '  "debug": false,\n'
            '  "prof_ops": ["all_reduce", "custom_all_reduce_name"]\n'
            "}\n"
        ),
        "COMMS_LOGGER_PROF_ALL": "prof_all",
        "COMMS_LOGGER_PROF_ALL_DEFAULT": True,
        "COMMS_LOGGER_PROF_OPS": "prof_ops",
        "COMMS_LOGGER_PROF_OPS_DEFAULT": [],
        "COMMS_LOGGER_VERBOSE": "verbose",
        "COMMS_LOGGER_VERBOSE_DEFAULT": False,
        "DEFAULT_AML_MASTER_PORT": "54965",
        "DEFAULT_AML_NCCL_SOCKET_IFNAME": "^docker0,lo",
        "GLOO_BACKEND": "gloo",
        "HCCL_BACKEND": "hccl",
        "MPI_BACKEND": "mpi",
        "NCCL_BACKEND": "nccl",
        "SCCL_BACKEND": "sccl",
    },
}


@pytest.mark.parametrize(
    "path, names",
    [(path, names) for paths, names in CONSTANTS.items() for path in paths],
    ids=[path for paths in CONSTANTS for path in paths],
)
def test_constants_hold_their_values(path: str, names: dict[str, Any]) -> None:
    module = importlib.import_module(path)
    found = {name: getattr(module, name, "missing") for name in names}
    assert found == names
    # Equal is not the same: False == 0, and scripts print these.
    kinds = {name: type(value) for name, value in names.items() if value != 0 or value is False}
    assert {name: type(found[name]) for name in kinds} == kinds


@pytest.mark.parametrize("path", [paths[0] for paths in CONSTANTS])
def test_star_imports_bring_all_constants(path: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"from {path} import *", scope)
    names = next(names for paths, names in CONSTANTS.items() if paths[0] == path)
    assert {name: scope.get(name, "missing") for name in names} == names


GIVEN: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
    "gradient_allreduce_op": "sum",
    "communication_data_type": "fp16",
    "managed_gradient_accumulation": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "torch_autocast": {"enabled": True, "dtype": "bf16"},
    "steps_per_print": 7,
    "wall_clock_breakdown": True,
    "dump_state": True,
    "dataloader_drop_last": True,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
# Name -> what it says about GIVEN, and about an empty dict.
GETTERS: dict[str, tuple[Any, Any]] = {
    "get_train_batch_size": (8, None),
    "get_train_micro_batch_size_per_gpu": (2, None),
    "get_gradient_accumulation_steps": (4, None),
    "get_gradient_clipping": (0.5, 1.0),
    "get_prescale_gradients": (True, False),
    "get_gradient_predivide_factor": (2.0, 1.0),
    "get_gradient_allreduce_op": ("sum", "mean"),
    "get_communication_data_type": (torch.float16, None),
    "get_managed_gradient_accumulation": (False, True),
    "get_optimizer_name": ("AdamW", None),
    "get_optimizer_params": ({"lr": 0.25}, None),
    "get_scheduler_name": ("WarmupLR", None),
    "get_scheduler_params": ({"warmup_num_steps": 3}, None),
    "get_torch_autocast_enabled": (True, False),
    "get_torch_autocast_dtype": (torch.bfloat16, None),
    "get_steps_per_print": (7, None),
    "get_wall_clock_breakdown": (True, False),
    "get_dump_state": (True, False),
    "get_dataloader_drop_last": (True, False),
    "get_zero_allow_untested_optimizer": (True, False),
    "get_zero_force_ds_cpu_optimizer": (False, True),
}


@pytest.mark.parametrize("name", GETTERS)
def test_getters_read_raw_dicts(name: str) -> None:
    module = importlib.import_module("deepspeed.runtime.config")
    get = getattr(module, name)
    assert (get(GIVEN), get({})) == GETTERS[name]
    assert get.__name__ == name and get.__doc__


def test_the_communication_types_getter_takes_another_key() -> None:
    module = importlib.import_module("deepspeed.runtime.config")
    key = "seq_parallel_communication_data_type"
    assert module.get_communication_data_type({key: "bf16"}, key) is torch.bfloat16
    assert module.get_communication_data_type({}, key, "fp32") is torch.float32


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
    "stage": 2,
    "reduce_scatter": False,
    "reduce_bucket_size": 70,
    "allgather_bucket_size": 80,
    "allgather_partitions": False,
    "contiguous_gradients": False,
    "overlap_comm": True,
    "load_from_fp32_weights": False,
    "elastic_checkpoint": True,
    "round_robin_gradients": True,
    "ignore_unused_parameters": False,
    "offload_optimizer": {"device": "cpu", "pin_memory": False},
}
FULL: dict[str, Any] = {
    **{key: value for key, value in GIVEN.items() if key != "torch_autocast"},
    "managed_gradient_accumulation": True,
    "communication_data_type": "fp32",
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": OF_ZERO,
    "checkpoint": {"tag_validation": "Fail", "load_universal": True},
    "flops_profiler": {
        "recompute_fwd_factor": 0.5,
        "profile_step": 9,
        "module_depth": 3,
        "top_modules": 2,
        "detailed": False,
        "output_file": "profile.txt",
    },
    "memory_breakdown": True,
    "dump_state": False,
}
CONFIG_ATTRIBUTES: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "world_size": 1,
    "global_rank": 0,
    "sequence_parallel_size": 1,
    "gradient_clipping": 0.5,
    "prescale_gradients": False,
    "steps_per_print": 7,
    "memory_breakdown": True,
    "zero_optimization_stage": 2,
    "zero_enabled": True,
    "optimizer_name": "adamw",
    "optimizer_params": {"lr": 0.25},
    "scheduler_name": "WarmupLR",
    "scheduler_params": {"warmup_num_steps": 3},
    "communication_data_type": torch.float32,
    "seq_parallel_communication_data_type": torch.float32,
    "grad_accum_dtype": "fp32",
    "torch_autocast_enabled": False,
    "torch_autocast_dtype": None,
    "torch_autocast_lower_precision_safe_modules": None,
    "checkpoint_tag_validation_enabled": True,
    "checkpoint_tag_validation_fail": True,
    "load_universal_checkpoint": True,
    "use_node_local_storage": False,
    "sparse_gradients_enabled": False,
    "amp_enabled": False,
    "elasticity_enabled": False,
}
# Attribute -> the block of the tree that it is.
CONFIG_BLOCKS = {
    "zero_config": "zero_optimization",
    "float16_config": "fp16",
    "bfloat16_config": "bf16",
    "activation_checkpointing_config": "activation_checkpointing",
    "compile_config": "compile",
    "tensor_parallel_config": "tensor_parallel",
    "checkpoint": "checkpoint",
}


def test_attributes_of_the_configuration() -> None:
    read = DeepSpeedConfig(FULL)
    assert {name: getattr(read, name) for name in CONFIG_ATTRIBUTES} == CONFIG_ATTRIBUTES
    for name, block in CONFIG_BLOCKS.items():
        assert getattr(read, name) is getattr(read.tree, block), name
    assert read.timers_config is read.tree.timers.throughput
    assert read.monitor_config.wandb is read.tree.wandb


@pytest.mark.parametrize("name", ["zero_enabled", "zero_config", "optimizer_name"])
def test_what_is_read_from_the_tree_cannot_be_set_beside_it(name: str) -> None:
    # Kills: an assignment that the engine would not see.
    with pytest.raises(AttributeError):
        setattr(DeepSpeedConfig(FULL), name, None)


# Name -> what the method returns for FULL.
ENGINE_METHODS: dict[str, Any] = {
    "get_batch_info": (8, 2, 4),
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "fp16_enabled": False,
    "bfloat16_enabled": True,
    "fp16_auto_cast": False,
    "torch_autocast_enabled": False,
    "torch_autocast_dtype": None,
    "dynamic_loss_scale": False,
    "loss_scale": 0.0,
    "get_data_types": (torch.bfloat16, torch.float32),
    "zero_optimization": True,
    "zero_optimization_stage": 2,
    "zero_optimization_partition_gradients": True,
    "zero_optimization_partition_weights": False,
    "zero_allow_untested_optimizer": True,
    "zero_reduce_scatter": False,
    "zero_overlap_comm": True,
    "zero_cpu_offload": True,
    "zero_reduce_bucket_size": 70,
    "zero_allgather_bucket_size": 80,
    "zero_allgather_partitions": False,
    "zero_contiguous_gradients": False,
    "zero_load_from_fp32_weights": False,
    "elasticity_enabled": False,
    "is_elastic_model_parallel_supported": False,
    "zero_elastic_checkpoint": True,
    "zero_round_robin_gradients": True,
    "zero_ignore_unused_parameters": False,
    "zero_gather_16bit_weights_on_model_save": False,
    "gradient_clipping": 0.5,
    "gradient_predivide_factor": 1.0,
    "postscale_gradients": True,
    "managed_gradient_accumulation": True,
    "optimizer_name": "adamw",
    "optimizer_params": {"lr": 0.25},
    "scheduler_name": "WarmupLR",
    "scheduler_params": {"warmup_num_steps": 3},
    "get_type": [None],
    "get_mom": [(0.9, 0.999)],
    "steps_per_print": 7,
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "flops_profiler_enabled": False,
    "flops_profiler_recompute_fwd_factor": 0.5,
    "flops_profiler_profile_step": 9,
    "flops_profiler_module_depth": 3,
    "flops_profiler_top_modules": 2,
    "flops_profiler_detailed": False,
    "flops_profiler_output_file": "profile.txt",
    "dump_state": False,
    "dataloader_drop_last": True,
    "checkpoint_tag_validation_enabled": True,
    "checkpoint_tag_validation_fail": True,
    "load_universal_checkpoint": True,
}
ENGINE_PROPERTIES: dict[str, Any] = {
    "model_dtype": torch.bfloat16,
    "communication_data_type": torch.float32,
}


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
    paths = sorted({path for paths in CONSTANTS for path in paths} | {"deepspeed.monitor.config"})
    code = f"import sys, {', '.join(paths)}, deepspeed.elasticity.elasticity\n"
    code += "sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("path", [path for paths in CONSTANTS for path in paths])
def test_a_name_that_is_not_there_is_an_attribute_error(path: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{path}' has no attribute 'NO_SUCH_NAME'"):
        _ = importlib.import_module(path).NO_SUCH_NAME
