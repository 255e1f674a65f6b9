"""`IdleParameters`: the parameters that a step leaves as they are, for want of a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class IdleParameters:
    """Notes which of `params`, all that are trained, are frozen during a whole window.

    What is frozen now counts when a backward begins: then autograd asks for it. A step that no
    backward came before leaves out what is frozen at the step.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._frozen: set[nn.Parameter] | None = None  # in each backward so far; None: none began

    def _frozen_now(self) -> set[nn.Parameter]:
        # Sharded parameters would ask their class for the flag, one by one.
        with torch._C.DisableTorchFunctionSubclass():
            return {param for param in self._params if not param.requires_grad}

    def backward_begins(self) -> None:
        now = self._frozen_now()
        self._frozen = now if self._frozen is None else self._frozen & now

    def of_step(self) -> set[nn.Parameter]:
        """Return the parameters that a step leaves out."""
        return self._frozen_now() if self._frozen is None else self._frozen

    def clear(self) -> None:
        self._frozen = None

    def window_state(self) -> list[int] | None:
        """Return the numbers of those frozen so far in this window; None: no backward began."""
        if self._frozen is None:
            return None
        return [number for number, param in enumerate(self._params) if param in self._frozen]

    def load_window_state(self, saved: Sequence[int] | None) -> None:
        self._frozen = None if saved is None else {self._params[number] for number in saved}
