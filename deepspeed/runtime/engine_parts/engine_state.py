"""What the parts of an engine know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from deepspeed import comm as dist
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.checkpointing.training_state import TrainingState
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.engine_parts.digest import StepDigests
from deepspeed.runtime.engine_parts.timing import EngineTimers
from deepspeed.runtime.gradients.accumulation import Foreign
from deepspeed.runtime.gradients.scope import GradientScope
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.sharding.model_ranks import ModelRanks


class EngineState(TrainingState, Protocol):
    """An engine, as its parts see it."""

    optimizer: Any
    timers: EngineTimers
    collate_fn: Callable[[Any], Any] | None
    curriculum_scheduler_legacy: CurriculumScheduler | None
    model_ranks: ModelRanks
    local_rank: int
    dp_world_size: int
    data_parallel_group: dist.Group

    @property
    def model_dtype(self) -> torch.dtype: ...

    def get_batch_info(self) -> tuple[int, int, int]: ...

    def get_lr(self) -> list[float]: ...

    def get_mom(self) -> list[Any]: ...

    def get_global_grad_norm(self) -> float | torch.Tensor | None: ...

    def _require_optimizer(self, what: str) -> StepSequence: ...

    def _refuse_taken(self, what: str) -> None: ...

    def _require_states(self, what: str) -> None: ...

    def _begin_window(self, plain: bool, foreign: Foreign | None = None) -> None: ...

    def _abort_backward(self) -> None: ...

    def _backward_epilogue(self) -> None: ...


class WatchedEngine(EngineState, Protocol):
    """An engine, as what watches its steps sees it."""

    monitor: MonitorMaster
    basic_optimizer: torch.optim.Optimizer | None
    global_rank: int
    world_size: int
    _digests: StepDigests | None
    _check_at_step: Callable[[], None] | None

    def _gradient_scope(self) -> GradientScope: ...

    def train_batch_size(self) -> int: ...

    def train_micro_batch_size_per_gpu(self) -> int: ...

    def gradient_accumulation_steps(self) -> int: ...

    def gradient_clipping(self) -> float: ...

    def fp16_enabled(self) -> bool: ...

    def zero_optimization_stage(self) -> int: ...

    def optimizer_name(self) -> str | None: ...
