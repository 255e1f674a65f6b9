"""What an engine tells of itself and of its steps."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.runtime.engine_parts.sequence import EngineSequence
from deepspeed.runtime.engine_parts.settings import EngineSettings
from deepspeed.runtime.engine_parts.timing import EngineTimers
from deepspeed.utils.logging import log_dist, print_dist


class EngineReports(EngineSettings, EngineSequence):
    """Mixin of `DeepSpeedEngine`: what scripts ask after a step, and the lines that it logs.

    Attributes:
        optimizer: What `initialize` returned.
        global_steps: Optimizer steps, skipped ones included.
        dp_world_size: How many ranks see other data.
        timers: The phases of a step.
    """

    _skipped_elsewhere: int
    _step_taken: bool
    optimizer: Any
    global_steps: int
    dp_world_size: int
    timers: EngineTimers

    def _announce(self) -> None:
        kind = type(self.optimizer).__name__ if self.optimizer is not None else "no optimizer"
        batch, micro_batch, steps = self.get_batch_info()
        log_dist(
            f"DeepSpeed info: stage {self.zero_optimization_stage()}, {self.model_dtype}, {kind}, "
            f"{self.dp_world_size} data-parallel ranks, batch {batch} = {micro_batch} x {steps} x "
            f"{self.dp_world_size}",
            ranks=[0],
        )
        if self._config.tree.dump_state:
            self._config.print("DeepSpeedEngine configuration")

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the parameters. Asking may wait for the device."""
        sequence = self._sequence
        return self._step_taken and (sequence is None or not sequence.overflow)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because the gradient was not finite. Reading it may wait for the device."""
        if self._sequence is None:
            return self._skipped_elsewhere
        self._sequence.learn_outcome()
        return self._skipped_elsewhere + self._sequence.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self._skipped_elsewhere += value - self.skipped_steps

    def get_global_grad_norm(self) -> float | torch.Tensor | None:
        """Global gradient norm of the last step that was not skipped, unscaled and before clipping;
        None before the first step. `was_step_applied` and `skipped_steps` tell of skips.
        """
        return None if self._sequence is None else self._sequence.global_grad_norm

    def get_group_grad_norms(self) -> list[float] | None:
        """`get_global_grad_norm` per parameter group, without communication; None before the first
        step.

        Entry `i` is over the `i`-th parameter groups of all ranks, which stages of a pipeline may
        have different numbers of.
        """
        return None if self._sequence is None else self._sequence.group_grad_norms

    def _report_progress(self) -> None:
        # Asked for by steps_per_print, so it is shown whatever the log level.
        print_dist(
            f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, "
            f"mom={self.get_mom()}, grad_norm={self.get_global_grad_norm()}, "
            f"{self.timers.summary()}",
            ranks=[0],
        )
