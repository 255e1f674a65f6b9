"""Which micro-batches make up a step: what scripts ask and set of the boundary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.runtime.engine_parts.sequence import EngineSequence
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.utils.exceptions import MisuseError


class EngineAccumulation(EngineSequence):
    """Mixin of `DeepSpeedEngine`: the accumulation tracker's doors.

    Attributes:
        tracker: The answer to which micro-batch is the boundary.
    """

    tracker: AccumulationTracker

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last before an optimizer step."""
        return self.tracker.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set it from outside; holds until set again.

        Raises:
            MisuseError: With `managed_gradient_accumulation: false`.
        """
        self._refuse_unmanaged("set_gradient_accumulation_boundary")
        self.tracker.set_boundary(is_boundary)

    def _refuse_unmanaged(self, what: str) -> None:
        if not self.tracker.managed:
            raise MisuseError(
                f"engine.{what}() with managed_gradient_accumulation: false: the caller's step() "
                "is the boundary; leave the call out, or the key"
            )

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far."""
        return self.tracker.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self.tracker.micro_steps = value

    @property
    def inside_no_sync_ctxt(self) -> bool:
        """Whether a `no_sync()` block is open."""
        return self.tracker.in_no_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward adds to this rank's local gradients and nothing is communicated, on
        every stage.

        The next backward outside reduces the sum. ZeRO-2 keeps whole gradients meanwhile, which
        costs the memory that it saves otherwise. `step()` inside raises.
        """
        with self.tracker.no_sync():
            yield
