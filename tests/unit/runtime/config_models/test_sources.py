"""Where a configuration comes from, what client libraries write, and how it is written again."""

import base64
import copy
import json
import logging

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigWriter
from deepspeed.runtime.config_models.training import TrainingConfig
from deepspeed.utils.logging import logger
from unit.runtime.config_models.reading import ON, config, error_of


def test_every_source_reads_the_same(tmp_path):
    keys = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    (tmp_path / "a.json").write_text(json.dumps(keys))
    (tmp_path / "a.hjson").write_text(
        "{\n  # a comment\n  train_batch_size: 8\n  zero_optimization: {stage: 2}\n}\n"
    )
    encoded = base64.urlsafe_b64encode(json.dumps(keys).encode()).decode()
    path = tmp_path / "a.json"
    for source in (keys, str(path), path, str(tmp_path / "a.hjson"), encoded):
        read = DeepSpeedConfig(source)
        assert read.tree.zero_optimization.stage == 2 and read.train_batch_size == 8
    assert keys == {"train_batch_size": 8, "zero_optimization": {"stage": 2}}


def test_what_cannot_be_read_is_told(tmp_path):
    assert "no_such.json" in error_of(str(tmp_path / "no_such.json"))
    assert "neither an existing file nor base64" in error_of("ds_config.json")
    for source in (None, 3, ["train_batch_size"]):
        assert "pass a dict, a path" in error_of(source)
    path = tmp_path / "broken.json"
    for text, *told in (
        ('{\n  "train_batch_size": 8,\n  "fp16": {]\n}', "broken.json", "line 3, column 12"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "duplicate keys", "'enabled'"),
        ("[1]", "must be an object"),
    ):
        path.write_text(text)
        assert all(part in error_of(str(path)) for part in told)


def test_the_users_dict_is_not_touched():
    given = {"train_micro_batch_size_per_gpu": 2, "bfloat16": {"enabled": True}}
    given["zero_optimization"] = {"stage": 1}
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


def test_what_is_written_and_printed_holds_every_key(tmp_path, capsys):
    writer, again = DeepSpeedConfigWriter(), DeepSpeedConfigWriter()
    writer.add_config("train_batch_size", 4)
    writer.write_config(tmp_path / "w.json")
    again.load_config(tmp_path / "w.json")
    assert again.data == {"train_batch_size": 4}
    logger.setLevel(logging.INFO)
    try:
        config(zero_optimization={"stage": 2}).print("the configuration")
    finally:
        logger.setLevel(logging.WARNING)
    text = capsys.readouterr().out
    assert all(name in text for name in TrainingConfig.model_fields)


OFF = {"enabled": False}
NOWHERE = {"device": "none", "nvme_path": None}
CLIENT_CONFIGS = {
    "accelerate": {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": NOWHERE,
            "offload_param": NOWHERE,
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "bf16": ON,
        "fp16": OFF,
        "zero_allow_untested_optimizer": True,
    },
    "accelerate fp16": {
        "train_batch_size": 8,
        "fp16": {"enabled": True, "auto_cast": True},
        "bf16": OFF,
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
            **dict.fromkeys(("partition_activations", "cpu_checkpointing"), False),
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False}
        | {"overlap_events": True, "thread_count": 1},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            **dict.fromkeys(("contiguous_gradients", "overlap_comm"), True),
            **dict.fromkeys(("allgather_partitions", "reduce_scatter"), True),
            **dict.fromkeys(("allgather_bucket_size", "reduce_bucket_size"), 200_000_000),
            "sub_group_size": 1_000_000_000_000,
        },
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
        | {"loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
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
