"""Reading a configuration: sources, types, defaults, names, and the wording of every mistake."""

import base64
import copy
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deepspeed.runtime.constants as constants
from deepspeed.runtime.config import (
    DeepSpeedConfig,
    DeepSpeedConfigError,
    DeepSpeedConfigWriter,
    DtypeEnum,
    data_parallel_world_size,
    parse_dtype,
)
from deepspeed.runtime.config_models.base import nested_model
from deepspeed.runtime.config_models.getters import GETTERS
from deepspeed.runtime.config_models.reader import all_paths, known_fields, read_block
from deepspeed.runtime.config_models.refusals import (
    AT_STAGE_3,
    BELOW_STAGE_3,
    INERT,
    REFUSALS,
    value_at,
)
from deepspeed.runtime.config_models.training import TrainingConfig
from deepspeed.runtime.config_models.zero import DeepSpeedZeroConfig
from deepspeed.runtime.zero.config import ZeroStageEnum, get_zero_config
from deepspeed.runtime.zero.init_context import _configured_dtype
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils.logging import logger


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def warnings():
    """Collect the texts of the warnings that are logged."""
    texts = []

    class Collect(logging.Handler):
        def emit(self, record):
            if record.levelno == logging.WARNING:
                texts.append(record.getMessage())

    handler = Collect()
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)


def config(**keys):
    return DeepSpeedConfig({"train_batch_size": 8, **keys})


def error_of(source):
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig(source)
    return str(caught.value)


def error(**keys):
    return error_of({"train_batch_size": 8, **keys})


# Sources


def test_every_source_reads_the_same(tmp_path):
    keys = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    (tmp_path / "a.json").write_text(json.dumps(keys))
    (tmp_path / "a.hjson").write_text(
        "{\n  # a comment\n  train_batch_size: 8\n  zero_optimization: {stage: 2}\n}\n"
    )
    encoded = base64.urlsafe_b64encode(json.dumps(keys).encode()).decode()
    for source in (
        keys,
        str(tmp_path / "a.json"),
        tmp_path / "a.json",
        str(tmp_path / "a.hjson"),
        encoded,
    ):
        read = DeepSpeedConfig(source)
        assert read.tree.zero_optimization.stage == 2 and read.train_batch_size == 8
    assert keys == {"train_batch_size": 8, "zero_optimization": {"stage": 2}}


def test_a_missing_file_is_named(tmp_path):
    assert "no_such.json" in error_of(str(tmp_path / "no_such.json"))
    assert "neither an existing file nor base64" in error_of("ds_config.json")


def test_malformed_text_is_located(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text('{\n  "train_batch_size": 8,\n  "fp16": {]\n}')
    assert "broken.json" in error_of(str(path)) and "line 3, column 12" in error_of(str(path))


def test_duplicate_keys_are_refused(tmp_path):
    path = tmp_path / "twice.json"
    path.write_text('{"train_batch_size": 8, "fp16": {"enabled": true, "enabled": false}}')
    assert "duplicate keys" in error_of(str(path)) and "'enabled'" in error_of(str(path))


@pytest.mark.parametrize("source", [None, 3, ["train_batch_size"]])
def test_other_types_are_refused(source):
    assert "pass a dict, a path" in error_of(source)


def test_a_list_in_a_file_is_refused(tmp_path):
    path = tmp_path / "list.json"
    path.write_text("[1]")
    assert "must be an object" in error_of(str(path))


# Types and defaults. The defaults are those of DeepSpeed 0.19.6, read off its models.

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


def test_floats_stand_for_integers_where_they_are_exact():
    zero = config(
        zero_optimization={"reduce_bucket_size": 2e8, "stage3_max_live_parameters": 1e9}
    ).tree.zero_optimization
    assert (zero.reduce_bucket_size, type(zero.reduce_bucket_size)) == (200_000_000, int)
    assert config(train_batch_size=16.0).train_batch_size == 16
    assert "gradient_accumulation_steps: 1.5 (float)" in error(gradient_accumulation_steps=1.5)


def test_sizes_drop_a_fraction():
    assert (
        config(
            zero_optimization={"reduce_bucket_size": 0.9 * 13 * 13}
        ).tree.zero_optimization.reduce_bucket_size
        == 152
    )
    assert "reduce_bucket_size" in error(zero_optimization={"reduce_bucket_size": float("nan")})
    assert "at least 0" in error(zero_optimization={"reduce_bucket_size": -1})


@pytest.mark.parametrize("given, read", [(float("inf"), None), (None, None), (5, 5), (5.0, 5)])
def test_steps_per_print_may_be_infinite(given, read):
    assert config(steps_per_print=given).tree.steps_per_print == read


@pytest.mark.parametrize(
    "keys, path, expected",
    [
        (dict(train_batch_size="8.5"), "train_batch_size: '8.5' (str)", "an integer"),
        (dict(train_batch_size="many"), "train_batch_size: 'many' (str)", "an integer"),
        (dict(train_batch_size=True), "train_batch_size: True (bool)", "an integer"),
        (dict(train_batch_size=0), "train_batch_size: 0 (int)", "at least 1"),
        (dict(fp16=True), "fp16: True (bool)", "an object"),
        (dict(fp16={"enabled": "perhaps"}), "fp16.enabled: 'perhaps' (str)", "true or false"),
        (dict(fp16={"enabled": 2}), "fp16.enabled: 2 (int)", "true or false"),
        (dict(gradient_clipping="one"), "gradient_clipping: 'one' (str)", "a number"),
        (dict(gradient_clipping=True), "gradient_clipping: True (bool)", "a number"),
        (dict(gradient_clipping=-1), "gradient_clipping", "at least 0"),
        (
            dict(gradient_allreduce_op="avg"),
            "gradient_allreduce_op: 'avg' (str)",
            "'mean' or 'sum'",
        ),
        (
            dict(zero_optimization={"stage": "two"}),
            "zero_optimization.stage: 'two' (str)",
            "0, 1, 2 or 3",
        ),
        (dict(zero_optimization={"stage": 4}), "zero_optimization.stage: 4 (int)", "0, 1, 2 or 3"),
        (
            dict(zero_optimization={"offload_optimizer": {"device": "tpu"}}),
            "zero_optimization.offload_optimizer.device: 'tpu' (str)",
            "'none', 'cpu' or 'nvme'",
        ),
        (
            dict(zero_optimization={"stage3_prefetch_bucket_size": "x"}),
            "zero_optimization.stage3_prefetch_bucket_size: 'x' (str)",
            "an integer",
        ),
        (dict(communication_data_type="int3"), "communication_data_type: 'int3' (str)", '"bf16"'),
        (
            dict(data_types={"grad_accum_dtype": "x"}),
            "data_types.grad_accum_dtype: 'x' (str)",
            '"fp32"',
        ),
        (
            dict(checkpoint={"tag_validation": "maybe"}),
            "checkpoint.tag_validation: 'maybe' (str)",
            '"Warn"',
        ),
        (dict(log_level="loud"), "log_level: 'loud' (str)", '"warning"'),
        (dict(comms_logger={"prof_ops": "all_reduce"}), "comms_logger.prof_ops", "a list"),
        (dict(optimizer={"type": "Adam", "params": 3}), "optimizer.params: 3 (int)", "an object"),
    ],
)
def test_wrong_types_name_path_value_and_expectation(keys, path, expected):
    text = error(**keys)
    assert path in text and expected in text


def test_keys_without_effect_are_documented():
    pages = Path(__file__).parents[3] / "docs"
    text = (pages / "differences.md").read_text(encoding="utf-8")
    told = text[text.index("### Keys that are accepted") : text.index("## Checkpoints")]
    assert [inert.path for inert in INERT if inert.path.rpartition(".")[2] not in told] == []


def test_numbers_and_switches_in_other_words_mean_what_they_say():
    # Kills: a value that upstream takes and this does not, one that is read as its opposite.
    tree = config(
        train_batch_size="8",
        gradient_clipping="1e-1",
        steps_per_print="5.0",
        prescale_gradients="no",
        bf16={"enabled": 1, "check_grad_overflow": 0},
        zero_optimization={"stage": "2", "reduce_bucket_size": "2e8", "overlap_comm": "True"},
    ).tree
    assert tree.train_batch_size == 8 and tree.gradient_clipping == 0.1
    assert tree.steps_per_print == 5 and tree.prescale_gradients is False
    assert tree.bf16.enabled is True and tree.bf16.check_grad_overflow is False
    zero = tree.zero_optimization
    assert zero.stage == 2 and zero.reduce_bucket_size == 200_000_000 and zero.overlap_comm is True
    assert _configured_dtype({"bf16": {"enabled": 1}}) == torch.bfloat16
    assert _configured_dtype({"bf16": {"enabled": "auto"}}) == torch.float32


def test_a_filled_in_configuration_reads_as_itself(monkeypatch):
    # Kills: batch sizes that elasticity chose, refused as the user's.
    monkeypatch.setenv("WORLD_SIZE", "2")
    block = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 5]}
    for keys in ({"train_batch_size": 8}, {"elasticity": block}):
        once = DeepSpeedConfig(keys)
        again = DeepSpeedConfig(once._param_dict)
        assert again._param_dict == once._param_dict and again.tree == once.tree


def test_a_missing_key_is_named():
    assert "optimizer.type: is missing" in error(optimizer={"params": {"lr": 1}})


def test_all_type_errors_are_listed_at_once():
    text = error(fp16=True, zero_optimization={"stage": 9}, gradient_clipping="x")
    assert all(path in text for path in ("fp16", "zero_optimization.stage", "gradient_clipping"))


# Unknown keys, "auto", other spellings


@pytest.mark.parametrize(
    "keys, path, near",
    [
        (dict(zero_optimisation={}), "zero_optimisation", "zero_optimization"),
        (dict(stage=2), "stage", "zero_optimization.stage"),
        (dict(gradient_cliping=1), "gradient_cliping", "gradient_clipping"),
        (
            dict(zero_optimization={"reduce_bucketsize": 1}),
            "zero_optimization.reduce_bucketsize",
            "zero_optimization.reduce_bucket_size",
        ),
        (
            dict(zero_optimization={"offload_optimizer": {"devise": "cpu"}}),
            "zero_optimization.offload_optimizer.devise",
            "zero_optimization.offload_optimizer.device",
        ),
        (dict(fp16={"scale_window": 1}), "fp16.scale_window", "fp16.loss_scale_window"),
        ({"zero_optimization.stagee": 1}, "zero_optimization.stagee", "zero_optimization.stage"),
    ],
)
def test_unknown_keys_come_with_the_nearest_known_one(keys, path, near):
    assert f'{path}: unknown key; did you mean "{near}"?' in error(**keys)


def test_all_unknown_keys_are_listed_at_once():
    text = error(foo_bar_baz=1, fp16={"enabeld": True}, qqqq={})
    assert all(path in text for path in ("foo_bar_baz", "fp16.enabeld", "qqqq"))


def test_left_over_autos_are_listed_at_once():
    text = error(
        train_micro_batch_size_per_gpu="auto",
        optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, "auto"]}},
        zero_optimization={"stage": 2, "round_robin_gradients": "auto"},
        fp16={"enabled": "auto"},
    )
    paths = (
        "train_micro_batch_size_per_gpu",
        "optimizer.params.lr",
        "optimizer.params.betas[1]",
        "zero_optimization.round_robin_gradients",
        "fp16.enabled",
    )
    assert '"auto"' in text and all(path in text for path in paths)


def test_sizes_may_be_left_at_auto():
    # Kills: reference models of trl below stage 3, whose sizes nobody fills in.
    zero = config(
        zero_optimization={
            "stage": 0,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        }
    ).tree.zero_optimization
    default = DeepSpeedZeroConfig()
    assert (
        zero.reduce_bucket_size,
        zero.prefetch_bucket_size,
        zero.param_persistence_threshold,
    ) == (
        default.reduce_bucket_size,
        default.prefetch_bucket_size,
        default.param_persistence_threshold,
    )


def test_autos_may_be_read_as_not_given():
    zero = read_block(
        DeepSpeedZeroConfig, {"stage": 2, "reduce_bucket_size": "auto"}, drop_autos=True
    )
    assert zero.stage == 2 and zero.reduce_bucket_size == 500_000_000


def test_auto_is_kept_where_it_is_the_default():
    assert config(pipeline={"stages": "auto"}).tree.pipeline.stages == "auto"


def test_dotted_keys_set_nested_ones():
    read = DeepSpeedConfig(
        {
            "train_batch_size": 8,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 7},
            "zero_optimization.reduce_bucket_size": 0.9 * 100 * 100,
            "bf16.enabled": True,
        }
    )
    assert (
        read.tree.zero_optimization.reduce_bucket_size == 9000
        and read.tree.zero_optimization.stage == 1
    )
    assert read.tree.bf16.enabled and "bf16.enabled" not in read._param_dict


def test_old_names_are_mapped_with_one_warning(warnings):
    tree = config(
        bfloat16={"enabled": True},
        zero_optimization={"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": False},
        aio={"thread_count": 1},
    ).tree
    assert tree.bf16.enabled
    assert tree.zero_optimization.offload_optimizer.device == OffloadDeviceEnum.cpu
    assert tree.zero_optimization.offload_optimizer.pin_memory is False
    assert len(warnings) == 1 and all(
        name in warnings[0] for name in ("bfloat16", "cpu_offload", "thread_count")
    )


def test_the_oldest_form_of_zero_is_a_switch(warnings):
    assert config(zero_optimization=True).zero_optimization_stage == 1
    assert get_zero_config({"zero_optimization": False}).stage == 0
    assert "zero_optimization" in warnings[0]


def test_old_and_new_name_together_are_refused():
    assert "bfloat16 is the old name of bf16" in error(
        bfloat16={"enabled": True}, bf16={"enabled": True}
    )
    assert "cpu_offload: 'x'" in error(zero_optimization={"cpu_offload": "x"})


# What is refused, and what has no effect

ON = {"enabled": True}
REFUSED_EXAMPLES = [
    ("zero_optimization.offload_optimizer", {"device": "nvme"}),
    ("zero_optimization.offload_optimizer", {"super_offload": True}),
    ("zero_optimization.zenflow", {"topk_ratio": 0.2}),
    ("zero_optimization.legacy_stage1", True),
    ("zero_optimization.zero_quantized_weights", True),
    ("zero_optimization.zero_quantized_nontrainable_weights", True),
    ("zero_optimization.zero_quantized_gradients", True),
    ("zero_optimization.zeropp_loco_param", {"err_beta": 0.8}),
    ("optimizer", {"type": "OneBitAdam"}),
    ("optimizer", {"type": "MuAdam"}),
    ("optimizer", {"type": "Adam", "legacy_fusion": True}),
    ("optimizer", {"type": "Adam", "params": {"max_grad_norm": 0.5}}),
    ("fp16.fp16_master_weights_and_grads", True),
    ("bf16.bf16_master_weights_and_grads", True),
    ("bf16.bf16_optimizer_states", True),
    ("amp", {"enabled": True, "opt_level": "O1"}),
    ("msamp", {"enabled": True, "opt_level": "O2"}),
    ("sparse_gradients", True),
    ("disable_allgather", True),
    ("graph_harvesting", True),
    ("data_efficiency.data_routing", ON),
    ("data_efficiency.data_sampling.dynamic_batching", ON),
    ("checkpoint.writer.type", "mock"),
    ("checkpoint.writer.data_parallel", "replica"),
    ("checkpoint.writer.io_multiplier", 2),
    ("nebula", ON),
    ("datastates_ckpt", ON),
    ("pipeline.partition", "uniform"),
    ("pipeline.seed_layers", True),
    ("tensor_parallel.tp", {"tp_size": 2}),
    ("tensor_parallel.tp", {"tp_grain_size": 2}),
    ("tensor_parallel.tp", {"mpu": "unit"}),
    ("tensor_parallel.tp", {"tp_group": "group"}),
    ("tensor_parallel.injection_policy_tuple", ["o_proj"]),
    ("tensor_parallel.keep_module_on_host", True),
    ("tensor_parallel.replace_with_kernel_inject", True),
    ("compile.deepcompile", True),
    ("hybrid_engine", ON),
    ("autotuning", {"enabled": True, "fast": True}),
    ("progressive_layer_drop", ON),
    ("eigenvalue", ON),
    ("quantize_training", ON),
    ("compression_training", {"layer_reduction": {"enabled": True}}),
    ("weight_quantization", {"quantized_initialization": {"num_bits": 8}}),
    ("sparse_attention", {"mode": "fixed"}),
]
REFUSED_AT_STAGE_3 = {
    "offload_param": {"device": "nvme"},
    "mics_hierarchical_params_gather": True,
    "round_robin_gradients": True,
    "elastic_checkpoint": True,
    "stage3_use_all_reduce_for_fetch_params": True,
    "stage3_allgather_sequential": True,
    "override_module_apply": False,
    "enable_sanity_checks": True,
}


def test_each_refusal_has_an_example():
    assert len(REFUSED_EXAMPLES) == len(REFUSALS)
    assert len(REFUSED_AT_STAGE_3) == len(AT_STAGE_3)


@pytest.mark.parametrize("key", REFUSED_AT_STAGE_3)
def test_what_stage_3_does_not_honour_is_refused_there_by_name(key, monkeypatch):
    value = REFUSED_AT_STAGE_3[key]
    zero = {key: value}
    remedy = AT_STAGE_3[list(REFUSED_AT_STAGE_3).index(key)].remedy
    text = error(zero_optimization={"stage": 3, **zero})
    assert text.count("\n") == 0
    assert key.removeprefix("stage3_") in text and remedy in text
    elsewhere = {"train_batch_size": 8, "zero_optimization": {"stage": 2, **zero}}
    monkeypatch.setenv("WORLD_SIZE", "2")
    DeepSpeedConfig(elsewhere)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"mics_shard_size": 3}, "mics_shard_size: 3 does not divide the 4 ranks .* 1, 2, 4"),
        ({"zero_hpz_partition_size": 3}, "hpz_partition_size: 3 does not divide .* 1, 2, 4"),
        ({"num_optimizer_instances": 3}, "num_optimizer_instances: 3 does not divide the 4"),
        (
            {"mics_shard_size": 1, "num_optimizer_instances": 2},
            "mics_shard_size: 1 makes 4 .*num_optimizer_instances: 2; remove one",
        ),
        (
            {"mics_shard_size": 2, "zero_hpz_partition_size": 2},
            "hpz_partition_size: 2 with 2 optimizer instances .*mics_shard_size",
        ),
        (
            {"zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}},
            "hpz_partition_size: 2 .* remove offload_param",
        ),
    ],
)
def test_groups_of_stage_3_that_cannot_be_are_refused(zero, message, monkeypatch):
    # Kills: a key that is ignored, or that contradicts another unseen.
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(DeepSpeedConfigError, match=message):
        DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": {"stage": 3, **zero}})


@pytest.mark.parametrize(
    ("zero", "instances"),
    [
        ({"mics_shard_size": "2"}, 2),
        ({"mics_shard_size": 4}, 1),
        ({"mics_shard_size": 1, "num_optimizer_instances": 4}, 4),
        ({"num_optimizer_instances": 2}, 2),
        ({"zero_hpz_partition_size": 2}, 1),
        ({"zero_hpz_partition_size": 0, "mics_shard_size": 2}, 2),
    ],
)
def test_groups_of_stage_3(zero, instances, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    tree = DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": {"stage": 3, **zero}}).tree
    assert tree.zero_optimization.num_optimizer_instances == instances


def test_groups_of_stage_3_have_no_effect_below(warnings):
    config(zero_optimization={"stage": 2, "mics_shard_size": 2, "zero_hpz_partition_size": 2})
    assert len(warnings) == 1
    assert "mics_shard_size=2 (has no effect without ZeRO stage 3)" in warnings[0]
    assert "zero_hpz_partition_size=2 (has no effect without ZeRO stage 3)" in warnings[0]


def test_what_only_stage_3_has_is_refused_below_it():
    assert [refusal.path for refusal in BELOW_STAGE_3] == [
        "zero_optimization.offload_optimizer.ratio"
    ]
    part = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    assert BELOW_STAGE_3[0].remedy in error(zero_optimization={"stage": 2, **part})
    config(zero_optimization={"stage": 3, **part})


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_what_is_not_there_yet_is_refused_by_name(number):
    path, value = REFUSED_EXAMPLES[number]
    block, _, key = path.rpartition(".")
    text = error(**({block: {key: value}} if block else {key: value}))
    assert text.count("\n") == 0
    assert text.startswith(f"{REFUSALS[number].path}: ") and REFUSALS[number].remedy in text


def test_all_refusals_are_listed_at_once():
    text = error(
        sparse_gradients=True,
        zero_optimization={
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "round_robin_gradients": True,
        },
    )
    assert text.count("\n") == 2


def test_tensor_parallel_ranks_share_their_batches(monkeypatch, warnings):
    # Kills: batch sizes for as many data-parallel ranks as there are ranks.
    monkeypatch.setenv("WORLD_SIZE", "8")
    read = DeepSpeedConfig({"train_batch_size": 4, "tensor_parallel": {"autotp_size": 4}})
    assert (read.world_size, read.train_micro_batch_size_per_gpu) == (2, 2)
    assert warnings == []
    by_clients = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    read = DeepSpeedConfig(
        {"train_batch_size": 48, **by_clients, "tensor_parallel": {"autotp_size": 4}}
    )
    assert read.train_batch_size == 12 and "it is 12" in warnings[0]
    for more in (
        {"tensor_parallel": {"autotp_size": 3}},
        {"sequence_parallel_size": 2},
        {"zero_optimization": {"stage": 3}},
    ):
        with pytest.raises(
            DeepSpeedConfigError, match=r"^tensor_parallel.autotp_size: [23] .*; use"
        ):
            DeepSpeedConfig({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}, **more})


def test_disabled_features_are_accepted_silently(warnings):
    off = {"enabled": False}
    blocks = (
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "flops_profiler",
        "amp",
        "elasticity",
        "nebula",
        "autotuning",
    )
    config(
        **dict.fromkeys(blocks, off),
        fp16=off,
        bf16=off,
        compression_training={"weight_quantization": {"shared_parameters": off}},
        sparse_attention={},
        zero_optimization={
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
            "sub_group_size": 1e9,
            "zero_hpz_partition_size": 1,
        },
        pipeline={"stages": 1},
        activation_checkpointing={"partition_activations": False, "cpu_checkpointing": False},
    )
    assert warnings == []


def test_keys_without_effect_are_named_in_one_warning(warnings):
    config(
        zero_optimization={
            "stage": 0,
            "sub_group_size": 5,
            "offload_optimizer": {"device": "cpu", "pipeline_read": True},
        }
    )
    assert len(warnings) == 1
    for path in (
        "zero_optimization.sub_group_size=5",
        "offload_optimizer.pipeline_read=True",
        "device='cpu'",
    ):
        assert path in warnings[0]


def test_parameter_offload_below_stage_3_is_named_in_one_warning(warnings):
    # Kills: an error for a block that clients always write, a key that is ignored in silence.
    config(zero_optimization={"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}})
    assert len(warnings) == 1
    assert "offload_param.device='cpu' (has no effect without ZeRO stage 3)" in warnings[0]
    config(zero_optimization={"stage": 3, "offload_param": {"device": "cpu", "max_in_cpu": 5}})
    assert len(warnings) == 2
    assert "offload_param.max_in_cpu=5 (has no effect without NVMe offload)" in warnings[1]
    config(zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}})
    assert len(warnings) == 2


@pytest.mark.parametrize(
    "keys, path",
    [
        (dict(aio={"queue_depth": 32}), "aio.queue_depth=32"),
        (dict(compile={"offload_parameters": True}), "compile.offload_parameters=True"),
        (dict(amp={"opt_level": "O1"}), "amp.opt_level='O1'"),
        (dict(tensor_parallel={"preset_model": "llama"}), "tensor_parallel.preset_model='llama'"),
    ],
)
def test_keys_of_what_is_not_there_are_named(keys, path, warnings):
    # Kills: a key that is accepted and ignored.
    config(**keys)
    assert len(warnings) == 1 and path in warnings[0]


def test_who_switches_a_feature_off_is_not_told_that_its_keys_have_no_effect(warnings):
    config(amp={"enabled": False, "opt_level": "O1"}, eigenvalue={"enabled": False, "tol": 0.5})
    assert warnings == []


def test_the_tables_name_paths_that_exist():
    names = {path.replace(".tp.", ".tensor_parallel.") for path in all_paths(TrainingConfig)}
    names |= {"optimizer.params.max_grad_norm"}
    assert {row.path for row in (*REFUSALS, *INERT)} <= names


# Batch sizes and world size


@pytest.mark.parametrize(
    "train, micro, steps, expected",
    [
        (16, 2, 2, (16, 2, 2)),
        (16, 2, None, (16, 2, 2)),
        (16, None, 2, (16, 2, 2)),
        (None, 2, 2, (16, 2, 2)),
        (16, None, None, (16, 4, 1)),
        (None, 4, None, (16, 4, 1)),
    ],
)
def test_batch_sizes_are_derived(train, micro, steps, expected, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {
        name: value
        for name, value in zip(names, (train, micro, steps), strict=True)
        if value is not None
    }
    read = DeepSpeedConfig(given)
    assert (
        read.train_batch_size,
        read.train_micro_batch_size_per_gpu,
        read.gradient_accumulation_steps,
    ) == expected
    assert tuple(read._param_dict[name] for name in names) == expected
    assert tuple(getattr(read.tree, name) for name in names) == expected
    assert read.world_size == 4


@pytest.mark.parametrize(
    "train, micro, steps", [(16, 3, 2), (10, 2, None), (10, None, 2), (2, None, None), (2, 8, None)]
)
def test_contradictions_say_where_each_number_came_from(train, micro, steps, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {
        name: value
        for name, value in zip(names, (train, micro, steps), strict=True)
        if value is not None
    }
    text = error_of(given)
    for name, value in given.items():
        assert f"{name} = {value} (given in the configuration)" in text
    for name in set(names) - set(given):
        assert f"{name} = " in text and ("derived as" in text or "the default" in text)
    assert "world size = 4 (from environment variable WORLD_SIZE)" in text


@pytest.mark.parametrize("given", [{}, {"gradient_accumulation_steps": 2}])
def test_no_batch_size_at_all(given):
    assert "train_batch_size and train_micro_batch_size_per_gpu are both missing" in error_of(given)


def test_world_size_sources(monkeypatch):
    class Megatron:
        def get_data_parallel_world_size(self):
            return 3

    class Ulysses:
        def get_sequence_parallel_world_size(self):
            return 2

    assert data_parallel_world_size().size == 1
    assert data_parallel_world_size(Megatron()).size == 3
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert data_parallel_world_size().source == "from environment variable WORLD_SIZE"
    assert data_parallel_world_size(Ulysses()).size == 4
    assert (
        DeepSpeedConfig({"train_batch_size": 6}, mpu=Megatron()).train_micro_batch_size_per_gpu == 2
    )
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert "WORLD_SIZE is 'many'" in error()


def test_world_size_of_a_process_group_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr("deepspeed.comm.is_initialized", lambda: True)
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: 2)
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)
    read = config()
    assert (read.world_size, read.global_rank, read.train_micro_batch_size_per_gpu) == (2, 1, 4)
    assert "from the process group" in error(train_batch_size=3)


def test_data_parallel_size_must_agree():
    assert config(data_parallel_size=1).world_size == 1
    assert "data_parallel_size: 3" in error(data_parallel_size=3)


def test_the_users_dict_is_not_touched():
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    }
    before = copy.deepcopy(given)
    read = DeepSpeedConfig(given)
    read._param_dict["zero_optimization"]["stage"] = 0
    assert given == before


# Together, names, printing


def test_fp16_and_bf16_exclude_each_other():
    text = error(fp16=ON, bf16=ON)
    assert "fp16.enabled" in text and "bf16.enabled" in text


def test_a_vocabulary_that_tensor_cores_cannot_split_is_named(warnings):
    config(vocabulary_size=17)
    config(vocabulary_size=16, fp16=ON)
    assert warnings == []
    config(vocabulary_size=17, fp16=ON)
    assert "vocabulary_size: 17 is not a multiple of 8" in warnings[0]


def test_overlap_is_resolved_by_stage():
    assert config(zero_optimization={"stage": 2}).tree.zero_optimization.overlap_comm is False
    assert (
        config(
            zero_optimization={"stage": 2, "overlap_comm": True}
        ).tree.zero_optimization.overlap_comm
        is True
    )
    assert read_block(DeepSpeedZeroConfig, {"stage": 3}).overlap_comm is True


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


def test_dtypes_parse_by_one_function():
    for names, dtype in (
        (("fp16", "float16", "half", "torch.float16", torch.float16), torch.float16),
        (("bf16", "bfloat16", torch.bfloat16), torch.bfloat16),
        (("fp32", "float32", "float"), torch.float32),
    ):
        assert all(parse_dtype(name) is dtype for name in names)
    assert parse_dtype(None) is None
    with pytest.raises(DeepSpeedConfigError, match="some.key: 'int4'"):
        parse_dtype("int4", "some.key")
    assert DtypeEnum("bf16") is DtypeEnum.bf16 and DtypeEnum(torch.float32) is DtypeEnum.fp32
    with pytest.raises(ValueError):
        DtypeEnum("int4")


def test_printing_holds_every_key(capsys):
    logger.setLevel(logging.INFO)
    try:
        config(zero_optimization={"stage": 2}).print("the configuration")
    finally:
        logger.setLevel(logging.WARNING)
    text = capsys.readouterr().out
    assert all(name in text for name in TrainingConfig.model_fields)


def test_writer_round_trip(tmp_path):
    writer = DeepSpeedConfigWriter()
    writer.add_config("train_batch_size", 4)
    writer.write_config(tmp_path / "w.json")
    again = DeepSpeedConfigWriter()
    again.load_config(tmp_path / "w.json")
    assert again.data == {"train_batch_size": 4}


def test_every_key_is_documented():
    def undocumented(model, path=""):
        for name, field in model.model_fields.items():
            if not field.description or not field.description.endswith("."):
                yield f"{path}{name}"
            inner = nested_model(field)
            if inner is not None:
                yield from undocumented(inner, f"{path}{name}.")

    assert list(undocumented(TrainingConfig)) == []


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


CLIENT_CONFIGS = {
    "accelerate": {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
    },
    "accelerate fp16": {
        "train_batch_size": 8,
        "fp16": {"enabled": True, "auto_cast": True},
        "bf16": {"enabled": False},
        "steps_per_print": float("inf"),
        "tensor_parallel": {"autotp_size": 0},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "torch_adam": True, "adam_w_mode": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1},
        },
        "wall_clock_breakdown": False,
    },
    "lightning": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 200_000_000,
            "reduce_bucket_size": 200_000_000,
            "sub_group_size": 1_000_000_000_000,
        },
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
    },
    "trl": {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}},
        "zero_optimization.reduce_bucket_size": 64 * 64,
        "zero_optimization.stage3_param_persistence_threshold": 10 * 64,
        "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 64 * 64,
        "steps_per_print": float("inf"),
    },
}


@pytest.mark.parametrize("client", CLIENT_CONFIGS)
def test_what_client_libraries_write_is_accepted(client):
    read = DeepSpeedConfig(CLIENT_CONFIGS[client])
    assert read.train_batch_size == CLIENT_CONFIGS[client].get("train_batch_size", 1)
    assert isinstance(read._param_dict, dict)
