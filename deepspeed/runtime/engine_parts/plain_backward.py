"""A backward that the engine does not run: scripts call `loss.backward()`, and hooks notice.

[Note: another engine's backward]
A loss of one engine may run through the model of another, as a GAN's generator is trained through
the discriminator. Hooks there notice a backward that another engine has begun. Whether its
gradients are wanted is the script's to say: a model in two engines wants them, a GAN drops them by
`zero_grad()`. In a GAN the other engine steps on its part, and then a backward of this engine's own
begins; who wants the sum of both runs all backwards first. So that is told, when it is stepped on:
accelerate's `zero_grad()` does nothing.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from deepspeed.runtime.engine_parts import verification
from deepspeed.runtime.engine_parts.engine_state import EngineState
from deepspeed.runtime.engine_parts.losses import Losses
from deepspeed.runtime.gradients.accumulation import BackwardState, Foreign
from deepspeed.runtime.optimizers.step_sequence import tell_no_backward
from deepspeed.runtime.utils import tensors_in
from deepspeed.utils.logging import warn_once

_FREEZE = "freeze {0} by requires_grad_(False) while the other trains"


class PlainBackward:
    """A plain `loss.backward()` of one engine, and the one that `engine.scale` has announced.

    Attributes:
        is_unscaled: A plain backward is running that needed a loss scale.
    """

    def __init__(self, engine: EngineState, losses: Losses) -> None:
        self._engine, self._losses = engine, losses
        self.is_unscaled = False
        self._one_trained: tuple[nn.Parameter, ...] = ()

    def watch(self, outputs: object) -> None:
        """Notice a backward that starts from these outputs, in its own autograd task, before any
        parameter's gradient. With every parameter frozen there is none.
        """
        if not any(param.requires_grad for param in self._one_trained):
            trained = (param for param in self._engine.module.parameters() if param.requires_grad)
            self._one_trained = tuple(itertools.islice(trained, 1))
            if not self._one_trained:
                return
        for tensor in tensors_in(outputs):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda grad: self._enter())

    def _enter(self) -> None:
        """Begin a plain `loss.backward()` if nobody did; its epilogue runs when its task ends."""
        state = self._engine.tracker.state
        if state is BackwardState.RUNNING:
            return
        sequence = self._engine._require_optimizer("backward")
        announced = state is BackwardState.ANNOUNCED
        self._engine._begin_window(not announced, None if announced else self._foreign())
        sequence.accumulation_divisor = self._losses.late_divisor(is_plain=not announced)
        self._engine.tracker.state = BackwardState.RUNNING
        self.is_unscaled = not announced and sequence.needs_scaler()
        sequence.backward_prologue()
        if not announced:
            self._losses.tell_opened(sequence, None, scale_wrt_gas=True)
        self._engine.timers.start_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _foreign(self) -> Foreign | None:
        """Return the other engine whose backward is under way."""
        for engine in verification.engines:
            tracker = engine.tracker
            is_managed = tracker.state is BackwardState.ANNOUNCED or (
                tracker.state is BackwardState.RUNNING and not tracker.window.is_plain
            )
            if is_managed and engine is not self._engine:
                return Foreign(_name_of(engine), _stepped_since(engine))
        return None

    def tell_foreign(self, foreign: Foreign) -> None:
        """See [Note: another engine's backward]."""
        own = _name_of(self._engine)
        names = [name for name, one in self._engine.module.named_parameters() if one.requires_grad]
        warn_once(
            f"{own}: a step adds gradients that the backward of {foreign.whose} has left in it "
            f"({', '.join(names[:2])}{', ...' if len(names) > 2 else ''}) to those of its own "
            f"backward, though {foreign.whose} has stepped in between. To drop them call "
            f"zero_grad() of {own}'s engine before its own backward (accelerate's "
            f"optimizer.zero_grad() does nothing), or {_FREEZE.format(own)}. If the sum is meant, "
            "nothing has to be done"
        )

    def refuse_foreign(self, foreign: Foreign, because: str) -> NoReturn:
        own = _name_of(self._engine)
        raise RuntimeError(
            f"the backward of {foreign.whose} reaches {own}, {because}. To train without its "
            f"gradients {_FREEZE.format(own)}"
        )

    def on_parameter_gradient(self) -> None:
        """Refuse, in a parameter's hook, an unscaled gradient before the optimizer sends it."""
        self._enter()
        if self.is_unscaled:
            self._refuse_unscaled()

    def _finish(self) -> None:
        if self.is_unscaled and any(
            param.grad is not None for param in self._engine.module.parameters()
        ):
            self._refuse_unscaled()
        self._engine._backward_epilogue()

    def adopt_unnoticed_gradients(self) -> None:
        """Take gradients of a model called past the engine: nobody has divided or scaled them."""
        sequence = self._engine._require_optimizer("step")
        sequence.accumulation_divisor = self._losses.late_divisor(is_plain=True)
        if all(param.grad is None for param in self._engine.module.parameters()):
            tell_no_backward("engine.step()")
        elif sequence.needs_scaler():
            self._refuse_unscaled()

    def _refuse_unscaled(self) -> None:
        foreign = self._engine.tracker.window.foreign
        self._engine._abort_backward()
        if foreign is not None:
            self.refuse_foreign(foreign, "whose gradients would carry another loss scale")
        raise RuntimeError(
            "Loss scaling is required with fp16: loss.backward() computed gradients without the "
            "loss scale, which would underflow. Call engine.backward(loss), or "
            "engine.scale(loss).backward()"
        )


def _name_of(engine: Any) -> str:
    return type(engine.module).__name__


def _stepped_since(engine: Any) -> Callable[[], bool]:
    """Tell later whether the engine has stepped since now; keeps it from nothing."""
    kept, steps = weakref.ref(engine), engine.global_steps
    return lambda: (now := kept()) is not None and now.global_steps > steps
