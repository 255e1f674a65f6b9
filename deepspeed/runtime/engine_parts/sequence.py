"""The step sequence of an engine, or the error that says why there is none to use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.runtime.optimizers.step_sequence import StepSequence

if TYPE_CHECKING:
    from deepspeed.runtime.zero.movable_weights import MovableWeights
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload


class EngineSequence:
    """Mixin of `DeepSpeedEngine`: what its parts need of the optimizer.

    Attributes:
        parameter_offload: Gathers the model's parameters at ZeRO stage 3.
    """

    _sequence: StepSequence | None
    _movable_weights: MovableWeights | None = None
    parameter_offload: DeepSpeedZeRoOffload | None

    def _require_optimizer(self, what: str) -> StepSequence:
        self._refuse_taken(what)
        if self._sequence is None:
            raise RuntimeError(
                f"engine.{what}() needs an optimizer: initialize(optimizer=...) or the key "
                "'optimizer'"
            )
        return self._sequence

    def _refuse_taken(self, what: str) -> None:
        if self.parameter_offload is not None and self.parameter_offload.was_taken:
            raise RuntimeError(
                f"engine.{what}(): another engine has this model since, and what this one kept of "
                "it is out of date (ZeRO stage 3). Use the engine that initialize() returned last"
            )

    def _require_states(self, what: str) -> None:
        if self._sequence is not None:
            self._sequence.require_states(what)
        elif self._movable_weights is not None:
            self._movable_weights.require_states(what)
