"""What is refused by name or told to have no effect, in general and by ZeRO's stages."""

from pathlib import Path

import pytest

from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.config_models.reader import all_paths, read_block
from deepspeed.runtime.config_models.refusals import AT_STAGE_3, BELOW_STAGE_3, INERT, REFUSALS
from deepspeed.runtime.config_models.training import TrainingConfig
from deepspeed.runtime.config_models.zero import DeepSpeedZeroConfig
from deepspeed.runtime.zero.config import get_zero_config
from deepspeed.utils.logging import _log_dist_once
from unit.runtime.config_models.reading import ON, config, error, zero_of

REFUSED_EXAMPLES = [
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
    "mics_hierarchical_params_gather": True,
    "elastic_checkpoint": True,
    "stage3_use_all_reduce_for_fetch_params": True,
    "stage3_allgather_sequential": True,
    "override_module_apply": False,
    "enable_sanity_checks": True,
}


def test_each_refusal_has_an_example():
    assert len(REFUSED_EXAMPLES) == len(REFUSALS)
    assert len(REFUSED_AT_STAGE_3) == len(AT_STAGE_3)


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_what_is_not_there_yet_is_refused_by_name(number):
    path, value = REFUSED_EXAMPLES[number]
    block, _, key = path.rpartition(".")
    text = error(**({block: {key: value}} if block else {key: value}))
    assert text.count("\n") == 0
    given = f"{path}.{next(iter(value))}" if path == "tensor_parallel.tp" else REFUSALS[number].path
    assert text.startswith(f"{given}: ") and REFUSALS[number].remedy in text


def test_all_refusals_are_listed_at_once():
    offload = {"device": "nvme"}
    zero = {"stage": 3, "offload_param": offload, "elastic_checkpoint": True}
    assert error(sparse_gradients=True, zero_optimization=zero).count("\n") == 2


@pytest.mark.parametrize("prefix", ["stage3_", ""])
def test_keys_are_called_as_the_user_wrote_them(prefix, warnings):
    key = f"{prefix}allgather_sequential"
    text = error(zero_optimization={"stage": 3, key: True})
    assert text.startswith(f"zero_optimization.{key}: True is not supported")
    assert error(**{"zero_optimization.stage": 3, f"zero_optimization.{key}": True}) == text
    key = f"{prefix}prefetch_bucket_size"
    config(zero_optimization={"stage": 2, key: 5})
    assert f"zero_optimization.{key}=5 (has no effect without ZeRO stage 3)" in warnings[0]


def test_warnings_come_once_and_from_the_first_rank(warnings, monkeypatch):
    # Kills: the same lines with every engine, and from every rank.
    def read(size=5):
        zero = {"stage": 2, "stage3_prefetch_bucket_size": size}
        config(bfloat16=ON, vocabulary_size=17, zero_optimization=zero)

    monkeypatch.setenv("RANK", "1")
    read()
    assert warnings == []
    _log_dist_once.cache_clear()
    monkeypatch.setenv("RANK", "0")
    read()
    assert len(warnings) == 2
    read()
    assert len(warnings) == 2
    read(6)
    assert len(warnings) == 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_round_robin_gradients_has_no_effect_at_stage_3(stage, warnings):
    config(zero_optimization={"stage": stage, "round_robin_gradients": True})
    assert len(warnings) == (stage == 3)
    assert all("zero_optimization.round_robin_gradients=True" in text for text in warnings)


def test_disabled_features_are_accepted_silently(warnings):
    off, nowhere = {"enabled": False}, {"device": "none", "nvme_path": None}
    blocks = "tensorboard wandb csv_monitor comet flops_profiler amp elasticity nebula autotuning"
    zero = dict.fromkeys(("offload_optimizer", "offload_param"), nowhere)
    zero |= {"stage": 2, "stage3_gather_16bit_weights_on_model_save": False}
    config(
        **dict.fromkeys([*blocks.split(), "fp16", "bf16"], off),
        compression_training={"weight_quantization": {"shared_parameters": off}},
        sparse_attention={},
        zero_optimization={**zero, "sub_group_size": 1e9, "zero_hpz_partition_size": 1},
        pipeline={"stages": 1},
        activation_checkpointing={"partition_activations": False, "cpu_checkpointing": False},
    )
    config(amp={**off, "opt_level": "O1"}, eigenvalue={**off, "tol": 0.5})
    assert warnings == []


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


def test_keys_without_effect_exist_and_are_documented():
    pages = Path(__file__).parents[4] / "docs"
    text = (pages / "differences.md").read_text(encoding="utf-8")
    told = text[text.index("### Keys that are accepted") : text.index("## Checkpoints")]
    assert [inert.path for inert in INERT if inert.path.rpartition(".")[2] not in told] == []
    names = {path.replace(".tp.", ".tensor_parallel.") for path in all_paths(TrainingConfig)}
    assert {row.path for row in (*REFUSALS, *INERT)} <= names


@pytest.mark.parametrize("key", REFUSED_AT_STAGE_3)
def test_what_stage_3_does_not_honour_is_refused_there_by_name(key, monkeypatch):
    value = REFUSED_AT_STAGE_3[key]
    remedy = AT_STAGE_3[list(REFUSED_AT_STAGE_3).index(key)].remedy
    text = error(zero_optimization={"stage": 3, key: value})
    assert text.count("\n") == 0
    assert text.startswith(f"zero_optimization.{key}") and remedy in text
    monkeypatch.setenv("WORLD_SIZE", "2")
    config(zero_optimization={"stage": 2, key: value})


BOTH = {"mics_shard_size": 2, "zero_hpz_partition_size": 2}
ALONE = {"mics_shard_size": 1, "num_optimizer_instances": 2}
OFFLOADED = {"zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"mics_shard_size": 3}, "mics_shard_size: 3 does not divide the 4 ranks .* 1, 2, 4"),
        ({"zero_hpz_partition_size": 3}, "hpz_partition_size: 3 does not divide .* 1, 2, 4"),
        ({"num_optimizer_instances": 3}, "num_optimizer_instances: 3 does not divide the 4"),
        (ALONE, "mics_shard_size: 1 makes 4 .*num_optimizer_instances: 2; remove one"),
        (BOTH, "hpz_partition_size: 2 with 2 optimizer instances .*mics_shard_size"),
        (OFFLOADED, "hpz_partition_size: 2 .* remove offload_param"),
    ],
)
def test_groups_of_stage_3_that_cannot_be_are_refused(zero, message, monkeypatch):
    # Kills: a key that is ignored, or that contradicts another unseen.
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(DeepSpeedConfigError, match=message):
        zero_of(stage=3, **zero)


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
    assert zero_of(stage=3, **zero).num_optimizer_instances == instances


def test_what_only_stage_3_has_has_no_effect_below(warnings):
    # Kills: an error for a block that clients always write, a key that is ignored in silence.
    none = "(has no effect without ZeRO stage 3)"
    config(zero_optimization={"stage": 2, **BOTH})
    assert len(warnings) == 1
    assert f"mics_shard_size=2 {none}" in warnings[0]
    assert f"zero_hpz_partition_size=2 {none}" in warnings[0]
    config(zero_optimization={"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}})
    assert len(warnings) == 2 and f"offload_param.device='cpu' {none}" in warnings[1]
    config(zero_optimization={"stage": 3, "offload_param": {"device": "cpu", "max_in_cpu": 5}})
    assert len(warnings) == 3
    assert "max_in_cpu=5 (has no effect without offload_param.device" in warnings[2]
    config(zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}})
    assert len(warnings) == 3
    for stage in (0, 1):
        config(zero_optimization={"stage": stage, "ignore_unused_parameters": False})
    assert len(warnings) == 4
    assert "ignore_unused_parameters=False (has no effect at stage 0)" in warnings[3]


def test_what_only_stage_3_has_is_refused_below_it():
    (refusal,) = BELOW_STAGE_3
    assert refusal.path == "zero_optimization.offload_optimizer.ratio"
    part = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    assert refusal.remedy in error(zero_optimization={"stage": 2, **part})
    config(zero_optimization={"stage": 3, **part})


def test_keys_without_effect_are_named_in_one_warning(warnings):
    offload = {"device": "cpu", "pipeline_read": True}
    zero_of(stage=0, sub_group_size=5, offload_optimizer=offload)
    (text,) = warnings
    assert "zero_optimization.sub_group_size=5" in text
    assert "offload_optimizer.pipeline_read=True" in text and "device='cpu'" in text


def test_sizes_may_be_left_at_auto():
    # Kills: reference models of trl below stage 3, whose sizes nobody fills in.
    given = "reduce_bucket_size stage3_prefetch_bucket_size stage3_param_persistence_threshold"
    given = given.split()
    zero, default = zero_of(stage=0, **dict.fromkeys(given, "auto")), DeepSpeedZeroConfig()
    for name in (name.removeprefix("stage3_") for name in given):
        assert getattr(zero, name) == getattr(default, name)


def test_old_and_missing_values_are_resolved(warnings):
    # The oldest form of ZeRO is a switch.
    assert config(zero_optimization=True).zero_optimization_stage == 1
    assert get_zero_config({"zero_optimization": False}).stage == 0
    assert "zero_optimization" in warnings[0]
    assert zero_of(stage=2).overlap_comm is False
    assert zero_of(stage=2, overlap_comm=True).overlap_comm is True
    assert read_block(DeepSpeedZeroConfig, {"stage": 3}).overlap_comm is True


@pytest.mark.parametrize("key", ["classes", "names", "name_suffixes"])
def test_one_leaf_module_needs_no_list(key):
    # Kills: a text that is read letter by letter, what is neither and passes.
    for given in ("a.B", ["a.B"]):
        read = config(zero_optimization={"stage": 3, "leaf_module": {key: given}})
        assert getattr(read.zero_config.leaf_module, key) == ["a.B"]
    for wrong in (3, ["a.B", 3]):
        text = error(zero_optimization={"stage": 3, "leaf_module": {key: wrong}})
        assert f"zero_optimization.leaf_module.{key}" in text and "3" in text


def test_digests_without_a_record_are_refused():
    digests = {"digest_every": 5}
    said = error(reproducibility=digests)
    assert "reproducibility.digest_every: 5" in said and "use watch.enabled: true" in said
    config(reproducibility=digests, watch=ON)


def test_a_window_is_repeated_where_steps_begin_somewhere():
    again = {"open_window": "repeat"}
    said = error(checkpoint=again)
    assert 'checkpoint.open_window: "repeat"' in said and 'or "discard"' in said
    config(checkpoint=again, reproducibility={"world_size_invariant": True})
