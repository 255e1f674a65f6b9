"""Which checkpoint engine the configuration asks for."""

from __future__ import annotations

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
    DecoupledCheckpointEngine,
)
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.config_models.training import CheckpointConfig, CheckpointWriterConfig
from deepspeed.utils.logging import warn_once


def make_checkpoint_engine(config: CheckpointConfig) -> CheckpointEngine:
    """The engine of the `checkpoint` block: `TorchCheckpointEngine` without a `writer`."""
    if config.writer is None:
        return TorchCheckpointEngine(config)
    _warn_of_unused(config.writer)
    engine: CheckpointEngine
    if config.writer.type == "DCP":
        # optional: it loads torch.distributed.checkpoint
        from deepspeed.runtime.checkpoint_engine.dcp_checkpoint_engine import DcpCheckpointEngine

        engine = DcpCheckpointEngine(config)
    else:
        engine = {"TORCH": TorchCheckpointEngine, "FAST": FastCheckpointEngine}[config.writer.type](
            config
        )
    return DecoupledCheckpointEngine(engine) if config.writer.decoupled else engine


def _warn_of_unused(writer: CheckpointWriterConfig) -> None:
    given = writer.model_fields_set
    if writer.type == "DCP" and given & {"io_buffer_size", "io_buffer_double"}:
        warn_once(
            'checkpoint.writer.io_buffer_*: no effect on tensors with type "dcp", which buffers '
            "itself"
        )
    elif writer.decoupled and writer.io_buffer_double and "io_buffer_double" in given:
        warn_once(
            "checkpoint.writer.io_buffer_double: no effect with decoupled, whose one thread writes "
            "and sums in turn"
        )
