"""The accumulation tracker: the only answer to "is this micro-batch the boundary?". Pure state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any


class BackwardState(Enum):
    """What the current micro-batch's backward is doing."""

    IDLE = "idle"  # entered by finishing or aborting a backward, and at the start
    # Entered by engine.scale(): the next backward's loss carries 1/accumulation and the loss scale.
    ANNOUNCED = "announced"
    # Entered by engine.backward(), or by the first hook that fires in a plain loss.backward().
    RUNNING = "running"


@dataclass
class Foreign:
    """The backward of another engine has left gradients in this one."""

    whose: str  # the other one's model
    has_stepped: Callable[[], bool]  # whether that one has stepped since
    is_joined: bool = False  # whether it had when a backward of this engine's own began


@dataclass
class Window:
    """What has happened since the last step, or since all gradients were forgotten."""

    # whether its backwards are plain `loss.backward()`; None until one has begun
    is_plain: bool | None = None
    is_reduced: bool = False  # whether the boundary's gradients have been reduced
    foreign: Foreign | None = None  # what came from elsewhere; the first, of several


class AccumulationTracker:
    """Counts micro-batches and decides the boundary.

    Args:
        steps: Micro-batches per optimizer step.
        managed: Count micro-batches; otherwise every micro-batch is a boundary until `set_boundary`
            says otherwise (`managed_gradient_accumulation`).
    """

    def __init__(self, steps: int, managed: bool = True) -> None:
        if steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be at least 1, got {steps}")
        self.steps = steps
        self.managed = managed
        self.micro_steps = 0
        self.backwards = 0  # since the last step
        self.window = Window()
        self.state = BackwardState.IDLE
        self._forced: bool | None = None
        self._no_sync_depth = 0

    @property
    def is_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last before an optimizer step."""
        if self._forced is not None:
            return self._forced
        return not self.managed or (self.micro_steps + 1) % self.steps == 0

    @property
    def is_set(self) -> bool:
        """Whether it was said from outside."""
        return self._forced is not None

    def set_boundary(self, is_boundary: bool) -> None:
        """Say it from outside; holds until said again."""
        self._forced = bool(is_boundary)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the step at hand has: as configured, or where the caller counts,
        the backwards since the last step.
        """
        return self.steps if self.managed else self.backwards

    def advance(self) -> None:
        self.micro_steps += 1

    def window_state(self) -> dict[str, Any]:
        return {
            "is_plain": self.window.is_plain,
            "is_reduced": self.window.is_reduced,
            "backwards": self.backwards,
            "boundary": self._forced,
        }

    def load_window_state(self, saved: Mapping[str, Any]) -> None:
        """Go on where another tracker's window was."""
        self.window = Window(saved["is_plain"], saved["is_reduced"])
        self.backwards, self._forced = saved["backwards"], saved["boundary"]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward only accumulates locally."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    @property
    def in_no_sync(self) -> bool:
        return self._no_sync_depth > 0

    @property
    def divisor(self) -> int:
        """What the gradients of one step are divided by for the mean over micro-batches."""
        return self.steps if self.managed else 1
