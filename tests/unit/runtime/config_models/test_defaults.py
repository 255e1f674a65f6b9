"""Defaults are those of DeepSpeed 0.19.6, read off its models, and every key is documented."""

import sys

import deepspeed.runtime.constants as constants
from deepspeed.runtime.config_models.base import nested_model
from deepspeed.runtime.config_models.reader import known_fields
from deepspeed.runtime.config_models.refusals import value_at
from deepspeed.runtime.config_models.training import TrainingConfig
from unit.runtime.config_models.reading import config

UPSTREAM_DEFAULTS = {
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "communication_data_type": None,
    "steps_per_print": None,
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
    "dataloader_drop_last": False,
    "managed_gradient_accumulation": True,
    "zero_optimization.stage": 0,
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.reduce_bucket_size": 500_000_000,
    "zero_optimization.allgather_partitions": True,
    "zero_optimization.allgather_bucket_size": 500_000_000,
    "zero_optimization.overlap_comm": False,
    "zero_optimization.load_from_fp32_weights": True,
    "zero_optimization.elastic_checkpoint": False,
    "zero_optimization.offload_param": None,
    "zero_optimization.offload_optimizer": None,
    "zero_optimization.sub_group_size": 1_000_000_000,
    "zero_optimization.prefetch_bucket_size": 50_000_000,
    "zero_optimization.param_persistence_threshold": 100_000,
    "zero_optimization.model_persistence_threshold": sys.maxsize,
    "zero_optimization.max_live_parameters": 1_000_000_000,
    "zero_optimization.max_reuse_distance": 1_000_000_000,
    "zero_optimization.ignore_unused_parameters": True,
    "zero_optimization.round_robin_gradients": False,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.mics_shard_size": -1,
    "fp16.enabled": False,
    "fp16.auto_cast": False,
    "fp16.loss_scale": 0.0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.consecutive_hysteresis": False,
    "fp16.min_loss_scale": 1,
    "bf16.enabled": False,
    "bf16.immediate_grad_update": False,
    "bf16.check_grad_overflow": True,
    "data_types.grad_accum_dtype": None,
    "torch_autocast.enabled": False,
    "checkpoint.tag_validation": "WARN",
    "comms_logger.prof_all": True,
    "timers.throughput.enabled": True,
    "tensor_parallel.autotp_size": 0,
    "optimizer": None,
    "scheduler": None,
}


def test_defaults_are_upstreams():
    tree = config().tree
    assert {path: value_at(tree, path) for path in UPSTREAM_DEFAULTS} == UPSTREAM_DEFAULTS
    offload = config(
        zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}}
    ).tree.zero_optimization
    assert offload.offload_optimizer.pin_memory is True and offload.offload_optimizer.ratio == 1.0


def test_constants_agree_with_the_models():
    fields = known_fields(TrainingConfig)
    compared = 0
    for name in constants.__all__:
        value, default = getattr(constants, name), getattr(constants, f"{name}_DEFAULT", fields)
        if value == name.lower() and value in fields and default is not fields:
            assert fields[value].get_default(call_default_factory=True) == default, name
            compared += 1
    assert compared > 15


def test_every_key_is_documented():
    def undocumented(model, path=""):
        for name, field in model.model_fields.items():
            if not field.description or not field.description.endswith("."):
                yield f"{path}{name}"
            inner = nested_model(field)
            if inner is not None:
                yield from undocumented(inner, f"{path}{name}.")

    assert list(undocumented(TrainingConfig)) == []
