"""What client libraries write is accepted."""

import pytest

from deepspeed.runtime.config import DeepSpeedConfig

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
