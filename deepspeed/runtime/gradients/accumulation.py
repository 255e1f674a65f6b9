"""The accumulation tracker: the only answer to "is this micro-batch the boundary?".

Pure state, no torch. The engine, every optimizer and (later) the pipeline ask it; nobody keeps a
second flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum


class BackwardState(Enum):
    """What the current micro-batch's backward is doing."""

    IDLE = "idle"  # entered by finishing or aborting a backward, and at the start
    # Entered by engine.scale(): the next backward's loss carries 1/accumulation and the loss scale.
    ANNOUNCED = "announced"
    # Entered by engine.backward(), or by the first hook that fires in a plain loss.backward().
    RUNNING = "running"


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
        self.state = BackwardState.IDLE
        self._forced: bool | None = None
        self._no_sync_depth = 0

    @property
    def is_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last before an optimizer step."""
        if self._forced is not None:
            return self._forced
        return not self.managed or (self.micro_steps + 1) % self.steps == 0

    def set_boundary(self, is_boundary: bool) -> None:
        """Say it from outside; holds until said again."""
        self._forced = bool(is_boundary)

    def advance(self) -> None:
        """A micro-batch is over."""
        self.micro_steps += 1

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
        """Whether a `no_sync()` block is open."""
        return self._no_sync_depth > 0

    @property
    def divisor(self) -> int:
        """What the gradients of one step are divided by for the mean over micro-batches."""
        return self.steps if self.managed else 1
