"""The block `zero_optimization`: what each stage takes, refuses, and has no use for."""

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_models.reader import read_block
from deepspeed.runtime.config_models.refusals import AT_STAGE_3, BELOW_STAGE_3
from deepspeed.runtime.config_models.zero import DeepSpeedZeroConfig
from deepspeed.runtime.zero.config import get_zero_config
from unit.runtime.config_models.reading import config, error

REFUSED_AT_STAGE_3 = {
    "offload_param": {"device": "nvme"},
    "mics_hierarchical_params_gather": True,
    "elastic_checkpoint": True,
    "stage3_use_all_reduce_for_fetch_params": True,
    "stage3_allgather_sequential": True,
    "override_module_apply": False,
    "enable_sanity_checks": True,
}


def test_each_refusal_at_stage_3_has_an_example():
    assert len(REFUSED_AT_STAGE_3) == len(AT_STAGE_3)


@pytest.mark.parametrize("key", REFUSED_AT_STAGE_3)
def test_what_stage_3_does_not_honour_is_refused_there_by_name(key, monkeypatch):
    value = REFUSED_AT_STAGE_3[key]
    zero = {key: value}
    remedy = AT_STAGE_3[list(REFUSED_AT_STAGE_3).index(key)].remedy
    text = error(zero_optimization={"stage": 3, **zero})
    assert text.count("\n") == 0
    assert text.startswith(f"zero_optimization.{key}") and remedy in text
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


def test_the_oldest_form_of_zero_is_a_switch(warnings):
    assert config(zero_optimization=True).zero_optimization_stage == 1
    assert get_zero_config({"zero_optimization": False}).stage == 0
    assert "zero_optimization" in warnings[0]


def test_overlap_is_resolved_by_stage():
    assert config(zero_optimization={"stage": 2}).tree.zero_optimization.overlap_comm is False
    assert (
        config(
            zero_optimization={"stage": 2, "overlap_comm": True}
        ).tree.zero_optimization.overlap_comm
        is True
    )
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
