"""Names of keys, what values may be written as, batch sizes, and the wording of what is wrong."""

from types import SimpleNamespace

import pytest
import torch

from deepspeed.runtime.config import (
    DeepSpeedConfig,
    DeepSpeedConfigError,
    DtypeEnum,
    data_parallel_world_size,
    parse_dtype,
)
from deepspeed.runtime.config_models.reader import read_block
from deepspeed.runtime.config_models.zero import DeepSpeedZeroConfig
from deepspeed.runtime.zero.init_context import _configured_dtype
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from unit.runtime.config_models.reading import ON, config, error, error_of, nested, zero_of

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OFFLOAD = "zero_optimization.offload_optimizer"


def sizes_given(*values):
    return {key: value for key, value in zip(SIZES, values, strict=True) if value is not None}


def test_numbers_stand_for_integers_where_they_can():
    zero = zero_of(reduce_bucket_size=2e8, stage3_max_live_parameters=1e9)
    assert (zero.reduce_bucket_size, type(zero.reduce_bucket_size)) == (200_000_000, int)
    assert config(train_batch_size=16.0).train_batch_size == 16
    assert "gradient_accumulation_steps: 1.5 (float)" in error(gradient_accumulation_steps=1.5)
    # Sizes drop a fraction.
    assert zero_of(reduce_bucket_size=0.9 * 13 * 13).reduce_bucket_size == 152
    assert "reduce_bucket_size" in error(zero_optimization={"reduce_bucket_size": float("nan")})
    assert "at least 0" in error(zero_optimization={"reduce_bucket_size": -1})
    for given, read in ((float("inf"), None), (None, None), (5, 5), (5.0, 5)):
        assert config(steps_per_print=given).tree.steps_per_print == read


@pytest.mark.parametrize(
    "path, value, expected",
    [
        ("train_batch_size", "8.5", "an integer"),
        ("train_batch_size", "many", "an integer"),
        ("train_batch_size", True, "an integer"),
        ("train_batch_size", 0, "at least 1"),
        ("fp16", True, "an object"),
        ("fp16.enabled", "perhaps", "true or false"),
        ("fp16.enabled", 2, "true or false"),
        ("gradient_clipping", "one", "a number"),
        ("gradient_clipping", True, "a number"),
        ("gradient_clipping", -1.0, "at least 0"),
        ("gradient_allreduce_op", "avg", "'mean' or 'sum'"),
        ("zero_optimization.stage", "two", "0, 1, 2 or 3"),
        ("zero_optimization.stage", 4, "0, 1, 2 or 3"),
        ("zero_optimization.offload_optimizer.device", "tpu", "'none', 'cpu' or 'nvme'"),
        ("zero_optimization.stage3_prefetch_bucket_size", "x", "an integer"),
        ("communication_data_type", "int3", '"bf16"'),
        ("data_types.grad_accum_dtype", "x", '"fp32"'),
        ("checkpoint.tag_validation", "maybe", '"Warn"'),
        ("log_level", "loud", '"warning"'),
        ("comms_logger.prof_ops", "all_reduce", "a list"),
        ("optimizer.params", 3, "an object"),
    ],
)
def test_wrong_types_name_path_value_and_expectation(path, value, expected):
    keys = nested(path, value)
    if path.startswith("optimizer"):
        keys["optimizer"]["type"] = "Adam"
    text = error(**keys)
    assert f"{path}: {value!r} ({type(value).__name__})" in text and expected in text


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


@pytest.mark.parametrize(
    "path, value, near",
    [
        ("zero_optimisation", {}, "zero_optimization"),
        ("gradient_cliping", 1, "gradient_clipping"),
        ("zero_optimization.reduce_bucketsize", 1, "zero_optimization.reduce_bucket_size"),
        (f"{OFFLOAD}.devise", "cpu", f"{OFFLOAD}.device"),
        ("fp16.scale_window", 1, "fp16.loss_scale_window"),
        ("zero_optimization.stagee", 1, "zero_optimization.stage"),
        ("micro_batch_size", 1, "train_micro_batch_size_per_gpu"),
        ("grad_clip", 1, "gradient_clipping"),
        ("zero_stage", 2, "zero_optimization.stage"),
    ],
)
def test_unknown_keys_come_with_the_nearest_known_one(path, value, near):
    assert f'{path}: unknown key; did you mean "{near}"?' in error(**nested(path, value))


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("stage", "zero_optimization"),
        ("offload_optimizer", "zero_optimization"),
        ("loss_scale", "fp16"),
        ("loss_scale_window", "fp16"),
        ("bf16.loss_scale", "fp16"),
    ],
)
def test_a_key_of_a_block_is_told_its_block(path, block):
    # Kills: a key in the wrong place that is taken for somebody else's.
    key = path.rpartition(".")[2]
    assert (
        f'{path}: unknown key here; it belongs in the block "{block}" ("{block}.{key}")'
        in error(**nested(path, 1))
    )


FOREIGN = {
    "_comment": "stage 2",
    "comment": 1,
    "//": "as JSON has no comments",
    "log": {"steps_per_print": 50},
    "comms_config": {"verbose": False},
    "monitor_config": {"enabled": True, "tag": "auto"},
    "cuda_visible_devices": "0",
}


def test_other_programs_keys_at_the_top_are_told_once(warnings):
    # Kills: an error for what upstream ignores; a key that is dropped without a word, or from the
    # dict that the program reads it from.
    read = config(**FOREIGN)
    config(**FOREIGN)
    assert read._param_dict.items() >= FOREIGN.items()
    (text,) = warnings
    assert "keys that are not read: _comment, comment, //, log, comms_config (the nearest" in text
    assert "comms_logger)" in text and "cuda_visible_devices" in text
    # Names beside them stay errors, and so does what stands in a block.
    text = error(**FOREIGN, gradient_cliping=1, bf16={"_comment": 1}, **{"fp16.lr": 1})
    assert text.count("unknown key") == 3 and "bf16._comment" in text and "fp16.lr" in text
    assert 'max_grad_norm: unknown key; remove it, and set "gradient_clipping"' in error(
        max_grad_norm=1
    )


def test_keys_of_old_in_a_block_that_is_off_are_told_once(warnings):
    # Kills: an error about a feature that is not used; a typing mistake in one that is.
    batches = {"micro_batch_size": [1, 2]}
    assert not config(elasticity={"enabled": False, **batches}).tree.elasticity.enabled
    config(compile={"enabled": "False", "backend": "eager"}, wandb={"enabled": 0, "key": {}})
    assert len(warnings) == 2 and "elasticity.micro_batch_size (unknown, of a block" in warnings[0]
    assert "compile.enabled" in warnings[1] and "wandb.key" in warnings[1]
    assert "elasticity.micro_batch_size: unknown" in error(elasticity={"enabled": True, **batches})
    assert "zero_optimization.enabled: unknown" in error(zero_optimization={"enabled": False})


@pytest.mark.parametrize(
    ("is_on", "given", "wanted"),
    [
        (True, {}, "fp32"),
        (True, {"communication_data_type": None}, "fp32"),
        (True, {"communication_data_type": "bf16"}, "bf16"),
        (False, {}, None),
        (False, {"communication_data_type": "bf16"}, "bf16"),
    ],
)
def test_an_allreduce_in_fp32_is_the_communication_type(is_on, given, wanted, warnings):
    # Kills: a switch that is read and forgotten, or that wins over the key of today.
    assert config(fp32_allreduce=is_on, **given).tree.communication_data_type == wanted
    (text,) = warnings
    assert 'fp32_allreduce (use communication_data_type: "fp32")' in text
    assert "fp32_allreduce: 1 is of the wrong type" in error(fp32_allreduce=1)


def test_the_optimizers_norm_is_the_clipping(warnings):
    # Kills: a norm that nobody clips by, one that wins over the key in silence.
    def clipping(norm, **more):
        adam = {"type": "Adam", "params": {"lr": 0.1, "max_grad_norm": norm}}
        read = config(optimizer=adam, **more)
        assert read.tree.optimizer.params == {"lr": 0.1}
        return read.gradient_clipping

    assert clipping(0.5) == clipping("0.5") == clipping(0.5, gradient_clipping="5e-1") == 0.5
    assert clipping(0) == 0 and clipping(0, gradient_clipping=2.0) == 2.0 and clipping(None) == 1.0
    (text,) = warnings
    assert "optimizer.params.max_grad_norm (use gradient_clipping)" in text
    for norm, message in (
        (0.5, "max_grad_norm: 0.5 and gradient_clipping: 2.0 mean the same and differ; remove"),
        (True, "max_grad_norm: True is of the wrong type: expected a number"),
        ("auto", "left over at: optimizer.params.max_grad_norm"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=message):
            clipping(norm, gradient_clipping=2.0)


def test_saving_may_be_left_at_auto(warnings):
    # Kills: an error for what does not touch training; silence about what is not saved.
    for name in ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"):
        assert zero_of(stage=3, **{name: "auto"}).gather_16bit_weights_on_model_save is False
        assert zero_of(stage=3, **{name: "yes"}).gather_16bit_weights_on_model_save is True
        assert "true or false" in error(zero_optimization={name: 3})
    (text,) = warnings
    assert '_on_model_save: "auto" is left over and read as false' in text


def test_the_least_loss_scale_is_any_number():
    # Kills: an integer alone, or one that becomes a fraction in files.
    fp16 = config(fp16={"min_loss_scale": 0.01}).tree.fp16
    assert fp16.dynamic_loss_scale_args()["min_scale"] == 0.01
    for given in (2, 2.0, "2"):
        least = config(fp16={"min_loss_scale": given}).tree.fp16.min_loss_scale
        assert (least, type(least)) == (2, int)
    assert "at least 0" in error(fp16={"min_loss_scale": -0.5})
    assert "a number" in error(fp16={"min_loss_scale": "small"})


def test_a_name_that_says_nothing_is_no_neighbour():
    # Kills: "fp16.enabled" for every block that has no "enabled".
    for path in ("zero_optimization.enabled", "optimizer.lr", "enabled"):
        keys = nested(path, True)
        keys.get("optimizer", {})["type"] = "Adam"
        assert f"{path}: unknown key; remove it" in error(**keys)
    # What the script does now is said.
    text = error(compile={"enabled": True})
    assert "compile.enabled: unknown key; remove it, and call engine.compile()" in text


def test_all_that_is_wrong_is_listed_at_once():
    assert "optimizer.type: is missing" in error(optimizer={"params": {"lr": 1}})
    text = error(fp16=True, zero_optimization={"stage": 9}, gradient_clipping="x")
    assert all(path in text for path in ("fp16", "zero_optimization.stage", "gradient_clipping"))
    text = error(optimiser=1, fp16={"enabeld": True}, stage={})
    assert all(path in text for path in ("optimiser", "fp16.enabeld", "stage"))
    text = error(
        train_micro_batch_size_per_gpu="auto",
        optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, "auto"]}},
        zero_optimization={"stage": 2, "round_robin_gradients": "auto"},
        fp16={"enabled": "auto"},
    )
    paths = "train_micro_batch_size_per_gpu optimizer.params.lr optimizer.params.betas[1] "
    paths += "zero_optimization.round_robin_gradients fp16.enabled"
    assert '"auto"' in text and all(path in text for path in paths.split())


def test_autos_may_be_read_as_not_given():
    given = {"stage": 2, "reduce_bucket_size": "auto"}
    zero = read_block(DeepSpeedZeroConfig, given, drop_autos=True)
    assert zero.stage == 2 and zero.reduce_bucket_size == 500_000_000
    # It is kept where it is the default.
    assert config(pipeline={"stages": "auto"}).tree.pipeline.stages == "auto"


def test_dotted_keys_set_nested_ones():
    dotted = {"zero_optimization.reduce_bucket_size": 0.9 * 100 * 100, "bf16.enabled": True}
    read = config(zero_optimization={"stage": 1, "reduce_bucket_size": 7}, **dotted)
    zero = read.tree.zero_optimization
    assert zero.reduce_bucket_size == 9000 and zero.stage == 1
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
    (text,) = warnings
    assert all(name in text for name in ("bfloat16", "cpu_offload", "thread_count"))


def test_names_that_exclude_each_other_are_refused():
    assert "bfloat16 is the old name of bf16" in error(bfloat16=ON, bf16=ON)
    assert "cpu_offload: 'x'" in error(zero_optimization={"cpu_offload": "x"})
    text = error(fp16=ON, bf16=ON)
    assert "fp16.enabled" in text and "bf16.enabled" in text


def test_a_vocabulary_that_tensor_cores_cannot_split_is_named(warnings):
    config(vocabulary_size=17)
    config(vocabulary_size=16, fp16=ON)
    assert warnings == []
    config(vocabulary_size=17, fp16=ON)
    assert "vocabulary_size: 17 is not a multiple of 8" in warnings[0]


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
    read = DeepSpeedConfig(sizes_given(train, micro, steps))
    assert tuple(getattr(read, name) for name in SIZES) == expected
    assert tuple(read._param_dict[name] for name in SIZES) == expected
    assert tuple(getattr(read.tree, name) for name in SIZES) == expected
    assert read.world_size == 4


@pytest.mark.parametrize(
    "train, micro, steps", [(16, 3, 2), (10, 2, None), (10, None, 2), (2, None, None), (2, 8, None)]
)
def test_contradictions_say_where_each_number_came_from(train, micro, steps, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    given = sizes_given(train, micro, steps)
    text = error_of(given)
    for name, value in given.items():
        assert f"{name} = {value} (given in the configuration)" in text
    for name in set(SIZES) - set(given):
        assert f"{name} = " in text and ("derived as" in text or "the default" in text)
    assert "world size = 4 (from environment variable WORLD_SIZE)" in text

    for given in ({}, {"gradient_accumulation_steps": 2}):
        missing = "train_batch_size and train_micro_batch_size_per_gpu are both missing"
        assert missing in error_of(given)


def test_world_size_sources(monkeypatch):
    megatron = SimpleNamespace(get_data_parallel_world_size=lambda: 3)
    ulysses = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)
    assert data_parallel_world_size().size == 1
    assert data_parallel_world_size(megatron).size == 3
    assert config(data_parallel_size=1).world_size == 1
    assert "data_parallel_size: 3" in error(data_parallel_size=3)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert data_parallel_world_size().source == "from environment variable WORLD_SIZE"
    assert data_parallel_world_size(ulysses).size == 4
    read = DeepSpeedConfig({"train_batch_size": 6}, mpu=megatron)
    assert read.train_micro_batch_size_per_gpu == 2
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


def test_tensor_parallel_ranks_share_their_batches(monkeypatch, warnings):
    # Kills: batch sizes for as many data-parallel ranks as there are ranks.
    monkeypatch.setenv("WORLD_SIZE", "8")
    read = DeepSpeedConfig({"train_batch_size": 4, "tensor_parallel": {"autotp_size": 4}})
    assert (read.world_size, read.train_micro_batch_size_per_gpu) == (2, 2)
    assert warnings == []
    by_clients = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    read = config(train_batch_size=48, **by_clients, tensor_parallel={"autotp_size": 4})
    assert read.train_batch_size == 12 and "it is 12" in warnings[0]
    for more in ({"tensor_parallel": {"autotp_size": 3}}, {"sequence_parallel_size": 2}):
        refusal = r"^tensor_parallel.autotp_size: [23] .*; use"
        with pytest.raises(DeepSpeedConfigError, match=refusal):
            DeepSpeedConfig({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}, **more})
