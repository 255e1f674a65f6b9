"""What saving and loading of an engine both need: its state, and how the run is divided over
ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.checkpoint.files import read_by
from deepspeed.checkpoint.parallel_degrees import ParallelDegrees
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
    DecoupledCheckpointEngine,
)
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.utils import make_checkpoint_engine
from deepspeed.runtime.checkpointing.background_save import finish_saves
from deepspeed.runtime.checkpointing.model_files import ModelFiles
from deepspeed.runtime.checkpointing.optimizer_files import OptimizerFiles
from deepspeed.runtime.checkpointing.storage_nodes import (
    StorageNode,
    node_local_storage,
    shared_storage,
)
from deepspeed.runtime.optimizers.master_weights import MasterWeightOptimizer
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
    _checkpoint_engine: CheckpointEngine | None = None

    @property
    def checkpoint_engine(self) -> CheckpointEngine:
        """What writes and reads files: as `checkpoint.writer` says, or one of the client's, set
        here before saving.
        """
        if self._checkpoint_engine is None:
            self._checkpoint_engine = make_checkpoint_engine(self._config.tree.checkpoint)  # type: ignore[attr-defined]  # from DeepSpeedEngine
        return self._checkpoint_engine

    @checkpoint_engine.setter
    def checkpoint_engine(self, engine: CheckpointEngine) -> None:
        if not isinstance(engine, CheckpointEngine):
            raise TypeError(
                f"checkpoint_engine: {type(engine).__name__} is no "
                "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine; derive it "
                "from that"
            )
        self._checkpoint_engine = engine

    def _reading(self) -> AbstractContextManager[None]:
        """Read files by the client's checkpoint engine, if it has one that reads otherwise than
        ours.
        """
        engine = self.checkpoint_engine
        inner = engine.inner if isinstance(engine, DecoupledCheckpointEngine) else engine
        return (
            nullcontext() if type(inner).load is TorchCheckpointEngine.load else read_by(inner.load)
        )

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
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def _finish_saves(self) -> None:
        """Wait for saves in the background, of other engines of this process too, whose files this
        one may read or replace.
        """
        finish_saves(self.device)

    def _optimizer_files(self, model: ModelFiles) -> OptimizerFiles:
        tree = self._config.tree  # type: ignore[attr-defined]  # from DeepSpeedEngine
        return OptimizerFiles(
            self._sequence,
            self.optimizer,
            model,
            tree.bf16.enabled,
            tree.use_data_before_expert_parallelism,
            self.config,  # type: ignore[attr-defined]  # from EngineSettings
        )

    def _storage_node(self) -> StorageNode:
        """The ranks that share a checkpoint folder. Collective."""
        is_local = self._config.tree.checkpoint.use_node_local_storage  # type: ignore[attr-defined]  # from DeepSpeedEngine
        return node_local_storage() if is_local else shared_storage()

    def _host_degrees(self) -> dict[str, int]:
        """Where a process must be in an equal run for its random states to be its own again."""
        return {
            "world": dist.get_world_size(),
            "replicas": groups._get_sequence_data_parallel_world_size(),
            **ParallelDegrees.of_this_run()._asdict(),
        }

    def _refresh_masters(self) -> None:
        if isinstance(self._sequence, MasterWeightOptimizer):
            self._sequence.refresh_fp32_params()
