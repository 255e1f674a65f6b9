"""What saving and loading read and set of an engine: all that they know of it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from deepspeed.checkpoint.files import CheckpointError
from deepspeed.comm.parallel_map import ParallelMap
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.runtime.gradients.sequence_parts import SequenceParts
from deepspeed.runtime.optimizers.state_layout import StateLayout
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload


class TrainingState(Protocol):
    """Where training stands; whoever has these attributes can be saved and loaded.

    `global_steps` includes skipped ones; `_sequence_parts` sums gradients of which tensor-parallel
    ranks have parts.
    """

    _config: DeepSpeedConfig
    _sequence: StepSequence | None
    _sequence_parts: SequenceParts
    lr_scheduler: Any
    training_dataloader: Any
    parallel_map: ParallelMap
    device: torch.device
    tracker: AccumulationTracker
    global_steps: int
    skipped_steps: int
    global_samples: int
    loaded_checkpoint_tag: str | None
    parameter_offload: DeepSpeedZeRoOffload | None

    @property
    def module(self) -> nn.Module: ...

    @property
    def config(self) -> dict[str, Any]: ...

    def module_state_dict(
        self,
        destination: object = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The weights that are saved; a client's engine may have others than the model's."""

    def _copy_recovery_script(self, save_path: str) -> None:
        """Put the program that converts checkpoints into their folder."""


def state_layout(state: TrainingState) -> StateLayout:
    """How the optimizer's state lies in files; without an optimizer, as state that is whole."""
    if state._sequence is not None:
        return state._sequence.state_layout
    if state.parameter_offload is not None:
        raise CheckpointError(
            "zero_optimization.stage 3 without an optimizer keeps no state that could be saved or "
            "loaded; save its weights with save_16bit_model"
        )
    return StateLayout()
