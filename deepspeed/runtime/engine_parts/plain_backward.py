"""A backward that the engine does not run: scripts call `loss.backward()`, and hooks notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.runtime.engine_parts.losses import EngineLosses
from deepspeed.runtime.gradients.accumulation import BackwardState
from deepspeed.runtime.utils import tensors_in


class EnginePlainBackward(EngineLosses):
    """Mixin of `DeepSpeedEngine`: plain `loss.backward()`, and the one that `engine.scale` has
    announced.

    Attributes:
        module: The model.
    """

    module: nn.Module
    _unscaled_plain: bool
    _begin_window: Callable[[bool], None]
    _abort_backward: Callable[[], None]
    _backward_epilogue: Callable[[], None]

    def _watch(self, outputs: Any) -> None:
        """Notice a backward that starts from these outputs, in its own autograd task, before any
        parameter's gradient.
        """
        for tensor in tensors_in(outputs):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._on_output_gradient)

    def _on_output_gradient(self, grad: torch.Tensor) -> None:
        self._enter_backward()

    def _enter_backward(self) -> None:
        """A gradient flows. If nobody said so, this is a plain `loss.backward()`: run the epilogue
        when its task ends.
        """
        state = self.tracker.state
        if state is BackwardState.RUNNING:
            return
        sequence = self._require_optimizer("backward")
        announced = state is BackwardState.ANNOUNCED
        self._begin_window(not announced)
        sequence.accumulation_divisor = 1.0 if announced else float(self.tracker.divisor)
        self.tracker.state = BackwardState.RUNNING
        self._unscaled_plain = not announced and sequence.needs_scaler()
        sequence.backward_prologue()
        if not announced:
            self._tell_opened(sequence, None, scale_wrt_gas=True)
        self.timers.start_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_plain_backward)

    def _on_parameter_gradient(self) -> None:
        """From a parameter's hook: refuses an unscaled gradient before the optimizer can send it
        off.
        """
        self._enter_backward()
        if self._unscaled_plain:
            self._refuse_unscaled()

    def _finish_plain_backward(self) -> None:
        if self._unscaled_plain and any(
            param.grad is not None for param in self.module.parameters()
        ):
            self._refuse_unscaled()
        self._backward_epilogue()

    def _adopt_unnoticed_gradients(self) -> None:
        """No backward of this window was noticed: the model itself was called, not the engine, so
        nobody has divided or scaled.
        """
        sequence = self._require_optimizer("step")
        sequence.accumulation_divisor = float(self.tracker.divisor)
        if sequence.needs_scaler() and any(
            param.grad is not None for param in self.module.parameters()
        ):
            self._refuse_unscaled()

    def _refuse_unscaled(self) -> None:
        self._abort_backward()
        raise RuntimeError(
            "loss.backward() under fp16 loss scaling: gradients were computed without the loss "
            "scale and would underflow. Call engine.backward(loss), or "
            "engine.scale(loss).backward()"
        )
