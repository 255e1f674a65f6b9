"""What is refused, by name and with a remedy, and what has no effect."""

from pathlib import Path

import pytest

from deepspeed.runtime.config_models.reader import all_paths
from deepspeed.runtime.config_models.refusals import INERT, REFUSALS
from deepspeed.runtime.config_models.training import TrainingConfig
from deepspeed.utils.logging import _log_dist_once
from unit.runtime.config_models.reading import ON, config, error

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


def test_each_refusal_has_an_example():
    assert len(REFUSED_EXAMPLES) == len(REFUSALS)


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_what_is_not_there_yet_is_refused_by_name(number):
    path, value = REFUSED_EXAMPLES[number]
    block, _, key = path.rpartition(".")
    text = error(**({block: {key: value}} if block else {key: value}))
    assert text.count("\n") == 0
    given = f"{path}.{next(iter(value))}" if path == "tensor_parallel.tp" else REFUSALS[number].path
    assert text.startswith(f"{given}: ") and REFUSALS[number].remedy in text


def test_all_refusals_are_listed_at_once():
    text = error(
        sparse_gradients=True,
        zero_optimization={
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "elastic_checkpoint": True,
        },
    )
    assert text.count("\n") == 2


@pytest.mark.parametrize("key", ["stage3_allgather_sequential", "allgather_sequential"])
def test_what_is_refused_is_called_as_the_user_wrote_it(key):
    text = error(zero_optimization={"stage": 3, key: True})
    assert text.startswith(f"zero_optimization.{key}: True is not supported")
    assert error(**{"zero_optimization.stage": 3, f"zero_optimization.{key}": True}) == text


@pytest.mark.parametrize("key", ["stage3_prefetch_bucket_size", "prefetch_bucket_size"])
def test_what_has_no_effect_is_called_as_the_user_wrote_it(key, warnings):
    config(zero_optimization={"stage": 2, key: 5})
    assert f"zero_optimization.{key}=5 (has no effect without ZeRO stage 3)" in warnings[0]


def test_warnings_come_once_and_from_the_first_rank(warnings, monkeypatch):
    # Kills: the same lines with every engine, and from every rank.
    def read():
        config(
            bfloat16=ON,
            vocabulary_size=17,
            zero_optimization={"stage": 2, "stage3_prefetch_bucket_size": 5},
        )

    monkeypatch.setenv("RANK", "1")
    read()
    assert warnings == []
    _log_dist_once.cache_clear()
    monkeypatch.setenv("RANK", "0")
    read()
    assert len(warnings) == 2
    read()
    assert len(warnings) == 2
    config(zero_optimization={"stage": 2, "stage3_prefetch_bucket_size": 6})
    assert len(warnings) == 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_round_robin_gradients_has_no_effect_at_stage_3(stage, warnings):
    config(zero_optimization={"stage": stage, "round_robin_gradients": True})
    assert len(warnings) == (stage == 3)
    assert all("zero_optimization.round_robin_gradients=True" in text for text in warnings)


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


def test_keys_without_effect_are_documented():
    pages = Path(__file__).parents[4] / "docs"
    text = (pages / "differences.md").read_text(encoding="utf-8")
    told = text[text.index("### Keys that are accepted") : text.index("## Checkpoints")]
    assert [inert.path for inert in INERT if inert.path.rpartition(".")[2] not in told] == []


def test_the_tables_name_paths_that_exist():
    names = {path.replace(".tp.", ".tensor_parallel.") for path in all_paths(TrainingConfig)}
    names |= {"optimizer.params.max_grad_norm"}
    assert {row.path for row in (*REFUSALS, *INERT)} <= names
