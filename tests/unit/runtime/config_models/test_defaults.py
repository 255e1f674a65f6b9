"""Defaults of DeepSpeed 0.19.6, and its properties, paths and getters of the configuration."""

import sys

import pytest

import deepspeed.runtime.constants as constants
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_models.base import nested_model
from deepspeed.runtime.config_models.getters import GETTERS
from deepspeed.runtime.config_models.reader import known_fields
from deepspeed.runtime.config_models.refusals import value_at
from deepspeed.runtime.config_models.training import TrainingConfig
from unit.runtime.config_models.reading import config, zero_of


def of(block: str, **defaults):
    """Name the keys of a block, some to a line."""
    return {f"{block}{key}": value for key, value in defaults.items()}


UPSTREAM_DEFAULTS = {
    **of("", gradient_clipping=1.0, prescale_gradients=False, gradient_predivide_factor=1.0),
    **of("", gradient_allreduce_op="mean", communication_data_type=None, steps_per_print=None),
    **of("", zero_allow_untested_optimizer=False, zero_force_ds_cpu_optimizer=True),
    **of("", dataloader_drop_last=False, managed_gradient_accumulation=True),
    **of("", optimizer=None, scheduler=None),
    **of("zero_optimization.", stage=0, contiguous_gradients=True, reduce_scatter=True),
    **of("zero_optimization.", reduce_bucket_size=500_000_000, allgather_partitions=True),
    **of("zero_optimization.", allgather_bucket_size=500_000_000, overlap_comm=False),
    **of("zero_optimization.", load_from_fp32_weights=True, elastic_checkpoint=False),
    **of("zero_optimization.", offload_param=None, offload_optimizer=None),
    **of("zero_optimization.", sub_group_size=1_000_000_000, prefetch_bucket_size=50_000_000),
    **of("zero_optimization.", param_persistence_threshold=100_000),
    **of("zero_optimization.", model_persistence_threshold=sys.maxsize),
    **of("zero_optimization.", max_live_parameters=1_000_000_000, mics_shard_size=-1),
    **of("zero_optimization.", max_reuse_distance=1_000_000_000, zero_hpz_partition_size=1),
    **of("zero_optimization.", ignore_unused_parameters=True, round_robin_gradients=False),
    **of("fp16.", enabled=False, auto_cast=False, loss_scale=0.0, initial_scale_power=16),
    **of("fp16.", loss_scale_window=1000, hysteresis=2, consecutive_hysteresis=False),
    **of("fp16.", min_loss_scale=1),
    **of("bf16.", enabled=False, immediate_grad_update=False, check_grad_overflow=True),
    "data_types.grad_accum_dtype": None,
    "torch_autocast.enabled": False,
    "checkpoint.tag_validation": "WARN",
    "comms_logger.prof_all": True,
    "timers.throughput.enabled": True,
    "tensor_parallel.autotp_size": 0,
}


def test_defaults_are_upstreams():
    tree = config().tree
    assert {path: value_at(tree, path) for path in UPSTREAM_DEFAULTS} == UPSTREAM_DEFAULTS
    offload = zero_of(stage=1, offload_optimizer={"device": "cpu"}).offload_optimizer
    assert offload.pin_memory is True and offload.ratio == 1.0


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
