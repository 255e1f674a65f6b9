"""What a value may be written as, and the wording of every wrong one."""

import pytest
import torch

from deepspeed.runtime.zero.init_context import _configured_dtype
from unit.runtime.config_models.reading import config, error


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


def test_a_missing_key_is_named():
    assert "optimizer.type: is missing" in error(optimizer={"params": {"lr": 1}})


def test_all_type_errors_are_listed_at_once():
    text = error(fp16=True, zero_optimization={"stage": 9}, gradient_clipping="x")
    assert all(path in text for path in ("fp16", "zero_optimization.stage", "gradient_clipping"))
