"""The activation_checkpointing block.

The models stand in ``deepspeed.runtime.config_models.features``; the names here are upstream's
import paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.features import (
        DeepSpeedActivationCheckpointingConfig as DeepSpeedActivationCheckpointingConfig,
    )

ACT_CHKPT = "activation_checkpointing"
ACT_CHKPT_PARTITION_ACTIVATIONS = "partition_activations"
ACT_CHKPT_PARTITION_ACTIVATIONS_DEFAULT = False
ACT_CHKPT_NUMBER_CHECKPOINTS = "number_checkpoints"
ACT_CHKPT_NUMBER_CHECKPOINTS_DEFAULT = None
ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION = "contiguous_memory_optimization"
ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION_DEFAULT = False
ACT_CHKPT_CPU_CHECKPOINTING = "cpu_checkpointing"
ACT_CHKPT_CPU_CHECKPOINTING_DEFAULT = False
ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY = "synchronize_checkpoint_boundary"
ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY_DEFAULT = False
ACT_CHKPT_PROFILE = "profile"
ACT_CHKPT_PROFILE_DEFAULT = False
ACTIVATION_CHKPT_FORMAT = """
The configuration's block, with its defaults:
"activation_checkpointing": {
  "partition_activations": false,
  "number_checkpoints": null,
  "contiguous_memory_optimization": false,
  "cpu_checkpointing": false,
  "profile": false,
  "synchronize_checkpoint_boundary": false
}
"""

_MODELS = ("DeepSpeedActivationCheckpointingConfig",)


def __getattr__(name: str) -> Any:
    """Load the models on first use (startup: pydantic is slow to import)."""
    if name in _MODELS:
        from deepspeed.runtime.config_models import features

        return getattr(features, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
