"""`curriculum_learning` in an engine: which difficulty a step has, and who is told."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from torch import nn

from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.features import CurriculumConfig

SEQLEN = "seqlen"
ARGUMENT = "curriculum_seqlen"


def make_scheduler(
    block: CurriculumConfig, model: nn.Module, calls_model: bool, num_sequence_ranks: int
) -> CurriculumScheduler | None:
    """Make the scheduler of the configuration's block, if it is on; refuse a model that cannot be
    told the length of sequences, and ranks that share them.

    A pipeline's engine does not call the model as a whole: its script cuts batches in
    `set_batch_fn`.
    """
    if not block.enabled:
        return None
    scheduler = CurriculumScheduler(block.model_dump())
    if block.curriculum_type == SEQLEN and calls_model:
        _check_takes_length(model)
        if num_sequence_ranks > 1:
            raise DeepSpeedConfigError(
                f'curriculum_learning.curriculum_type: "{SEQLEN}" with sequences split over '
                f"{num_sequence_ranks} ranks: each rank's model would cut its own piece; use "
                "another curriculum_type, and cut batches before they are split to "
                "engine.curriculum_scheduler_legacy.update_difficulty(engine.global_steps + 1)"
            )
    return scheduler


def _check_takes_length(model: nn.Module) -> None:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if ARGUMENT not in parameters and not takes_any:
        raise DeepSpeedConfigError(
            f'curriculum_learning.curriculum_type: "{SEQLEN}" calls the model with {ARGUMENT}, '
            f"which {type(model).__name__}.forward does not take: add the argument and cut "
            "sequences to it, or use another curriculum_type and cut batches to "
            "engine.curriculum_scheduler_legacy.update_difficulty(engine.global_steps + 1)"
        )
