"""Batch sizes, and the number of ranks that they are derived from."""

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError, data_parallel_world_size
from unit.runtime.config_models.reading import config, error, error_of


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
    for more in ({"tensor_parallel": {"autotp_size": 3}}, {"sequence_parallel_size": 2}):
        with pytest.raises(
            DeepSpeedConfigError, match=r"^tensor_parallel.autotp_size: [23] .*; use"
        ):
            DeepSpeedConfig({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}, **more})
