"""`IdleParameters`: the parameters that a step leaves as they are, for want of a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn


class IdleParameters:
    """Notes which trained parameters no gradient reaches in a window: those that are frozen during
    all of it, and those whose gradient a script drops.

    What is frozen now counts when a backward begins: then autograd asks for it. A step that no
    backward came before leaves out what is frozen at the step.
    """

    def __init__(self) -> None:
        self._params: Sequence[nn.Parameter] = ()
        self._frozen: set[nn.Parameter] | None = None  # in each backward so far; None: none began
        self._dropped: set[nn.Parameter] = set()

    def watch(self, params: Sequence[nn.Parameter]) -> None:
        """Take these for all parameters that are trained."""
        self._params = params

    def drop(self, params: Iterable[nn.Parameter]) -> None:
        """Note that a script has dropped the gradient of these."""
        self._dropped.update(params)

    def _frozen_now(self) -> set[nn.Parameter]:
        # Sharded parameters would ask their class for the flag, one by one.
        with torch._C.DisableTorchFunctionSubclass():
            return {param for param in self._params if not param.requires_grad}

    def backward_begins(self) -> None:
        now = self._frozen_now()
        self._frozen = now if self._frozen is None else self._frozen & now

    def of_step(self) -> set[nn.Parameter]:
        """Return the parameters that a step leaves out."""
        frozen = self._frozen_now() if self._frozen is None else self._frozen
        return frozen | self._dropped

    def clear(self) -> None:
        self._frozen = None
        self._dropped.clear()

    def window_state(self) -> list[int] | None:
        """Return the numbers of those frozen so far in this window; None: no backward began."""
        if self._frozen is None:
            return None
        return [number for number, param in enumerate(self._params) if param in self._frozen]

    def load_window_state(self, saved: Sequence[int] | None) -> None:
        self._frozen = None if saved is None else {self._params[number] for number in saved}
