"""Names of keys: unknown ones, "auto", dotted and old ones."""

import pytest

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_models.reader import read_block
from deepspeed.runtime.config_models.zero import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from unit.runtime.config_models.reading import config, error


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


@pytest.mark.parametrize("path", ["zero_optimization.enabled", "compile.disable", "optimizer.lr"])
def test_a_name_that_says_nothing_is_no_neighbour(path):
    # Kills: "fp16.enabled" for every block that has no "enabled".
    block, _, key = path.partition(".")
    given = {"type": "Adam", key: 1} if block == "optimizer" else {key: True}
    assert f"{path}: unknown key; remove it" in error(**{block: given})


@pytest.mark.parametrize(
    "key, call",
    [("enabled", "engine.compile()"), ("backend", "(backend=...)"), ("kwargs", "compile_kwargs")],
)
def test_what_the_script_does_now_is_said(key, call):
    text = error(compile={key: True})
    assert f"compile.{key}: unknown key; remove it, and call" in text and call in text


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


def test_old_and_new_name_together_are_refused():
    assert "bfloat16 is the old name of bf16" in error(
        bfloat16={"enabled": True}, bf16={"enabled": True}
    )
    assert "cpu_offload: 'x'" in error(zero_optimization={"cpu_offload": "x"})
