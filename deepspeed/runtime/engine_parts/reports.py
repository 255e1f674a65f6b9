"""What an engine tells of itself and of its steps."""

from __future__ import annotations

import torch

from deepspeed.runtime.engine_parts.engine_state import EngineState
from deepspeed.utils.logging import log_dist, print_dist


class EngineReports:
    """What scripts ask one engine after a step, and the lines that it logs.

    `step_taken` is whether the last `step()` was the boundary's, skipped or not.
    """

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine
        self.step_taken = False
        self._skipped_elsewhere = 0  # by whom else but the step sequence at hand

    def announce(self) -> None:
        engine = self._engine
        kind = type(engine.optimizer).__name__ if engine.optimizer is not None else "no optimizer"
        batch, micro_batch, steps = engine.get_batch_info()
        stage, ranks = int(engine._config.zero_config.stage), engine.dp_world_size
        log_dist(
            f"DeepSpeed info: stage {stage}, {engine.model_dtype}, {kind}, "
            f"{ranks} data-parallel ranks, batch {batch} = {micro_batch} x {steps} x {ranks}",
            ranks=[0],
        )
        if engine._config.tree.dump_state:
            engine._config.print("DeepSpeedEngine configuration")

    def was_step_applied(self) -> bool:
        """Tell whether the last `step()` changed the parameters. Asking may wait for the device."""
        sequence = self._engine._sequence
        return self.step_taken and (sequence is None or not sequence.overflow)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because the gradient was not finite. Reading it may wait for the device."""
        sequence = self._engine._sequence
        if sequence is None:
            return self._skipped_elsewhere
        sequence.learn_outcome()
        return self._skipped_elsewhere + sequence.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self._skipped_elsewhere += value - self.skipped_steps

    def get_global_grad_norm(self) -> float | torch.Tensor | None:
        """Return the global gradient norm of the last step that was not skipped, unscaled and
        before clipping; None before the first step.
        """
        sequence = self._engine._sequence
        return None if sequence is None else sequence.global_grad_norm

    def get_group_grad_norms(self) -> list[float] | None:
        """Return `get_global_grad_norm` per parameter group, without communication.

        Entry `i` is over the `i`-th parameter groups of all ranks; stages of a pipeline may have
        different numbers of them.
        """
        sequence = self._engine._sequence
        return None if sequence is None else sequence.group_grad_norms

    def report_progress(self, step: int) -> None:
        # Asked for by steps_per_print, so it is shown whatever the log level.
        engine = self._engine
        print_dist(
            f"step={step}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, "
            f"mom={engine.get_mom()}, grad_norm={engine.get_global_grad_norm()}, "
            f"{engine.timers.summary()}",
            ranks=[0],
        )

    def close(self) -> None:
        """Keep the answers, for when the step sequence is gone."""
        self.step_taken = self.was_step_applied()
        self._skipped_elsewhere = self.skipped_steps
