"""What saving and loading of an engine both need: its state, and how the run is divided over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.master_weights import MasterWeightOptimizer
from deepspeed.runtime.model_files import Cut
from deepspeed.runtime.optimizer_files import OptimizerFiles
from deepspeed.utils import groups


class CheckpointParts:
    """What of `DeepSpeedEngine` is saved and loaded."""

    module: nn.Module
    optimizer: Any
    lr_scheduler: Any
    training_dataloader: Any
    device: torch.device
    global_steps: int
    global_samples: int
    skipped_steps: int
    loaded_checkpoint_tag: str | None
    _sequence: Any

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's state dict, in the model's dtype."""
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters():
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def _optimizer_files(self) -> OptimizerFiles:
        tree = self._config.tree  # type: ignore[attr-defined]  # from DeepSpeedEngine
        return OptimizerFiles(
            self._sequence,
            self.optimizer,
            self.module,
            tree.bf16.enabled,
            tree.use_data_before_expert_parallelism,
            self.config,  # type: ignore[attr-defined]  # from EngineSettings
        )

    def _host_cut(self) -> dict[str, int]:
        """Where a process must be in an equal run for its random states to be its own again."""
        return {
            "world": dist.get_world_size(),
            "replicas": groups._get_sequence_data_parallel_world_size(),
            **Cut.of_this_run()._asdict(),
        }

    def _refresh_masters(self) -> None:
        if isinstance(self._sequence, MasterWeightOptimizer):
            self._sequence.refresh_fp32_params()
