"""Where a configuration comes from: a dict, a file, base64, and how it is written again."""

import base64
import copy
import json
import logging

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigWriter
from deepspeed.runtime.config_models.training import TrainingConfig
from deepspeed.utils.logging import logger
from unit.runtime.config_models.reading import config, error_of


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


def test_a_filled_in_configuration_reads_as_itself(monkeypatch):
    # Kills: batch sizes that elasticity chose, refused as the user's.
    monkeypatch.setenv("WORLD_SIZE", "2")
    block = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 5]}
    for keys in ({"train_batch_size": 8}, {"elasticity": block}):
        once = DeepSpeedConfig(keys)
        again = DeepSpeedConfig(once._param_dict)
        assert again._param_dict == once._param_dict and again.tree == once.tree


def test_writer_round_trip(tmp_path):
    writer = DeepSpeedConfigWriter()
    writer.add_config("train_batch_size", 4)
    writer.write_config(tmp_path / "w.json")
    again = DeepSpeedConfigWriter()
    again.load_config(tmp_path / "w.json")
    assert again.data == {"train_batch_size": 4}


def test_printing_holds_every_key(capsys):
    logger.setLevel(logging.INFO)
    try:
        config(zero_optimization={"stage": 2}).print("the configuration")
    finally:
        logger.setLevel(logging.WARNING)
    text = capsys.readouterr().out
    assert all(name in text for name in TrainingConfig.model_fields)
