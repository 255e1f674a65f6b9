"""The parameters that a step leaves as they are, for want of a gradient: `IdleParameters`, and
`UnusedParameters`, which finds those that no rank has used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.watch import lone_waits


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
        self._given: set[nn.Parameter] = set()

    def watch(self, params: Sequence[nn.Parameter]) -> None:
        """Take these for all parameters that are trained."""
        self._params = params

    def drop(self, params: Iterable[nn.Parameter]) -> None:
        """Note that a script has dropped the gradient of these."""
        self._dropped.update(params)

    def give(self, param: nn.Parameter) -> None:
        """Note that a script has given a parameter its gradient: it is stepped in any case."""
        self._given.add(param)

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
        return (frozen | self._dropped) - self._given

    def clear(self) -> None:
        self._frozen = None
        self._dropped.clear()
        self._given.clear()

    def window_state(self) -> list[int] | None:
        """Return the numbers of those frozen so far in this window; None: no backward began."""
        if self._frozen is None:
            return None
        return [number for number, param in enumerate(self._params) if param in self._frozen]

    def load_window_state(self, saved: Sequence[int] | None) -> None:
        self._frozen = None if saved is None else {self._params[number] for number in saved}


class UnusedParameters:
    """Finds the parameters that no rank has had a gradient for in a window.

    Ranks tell each other in each step, for which the host waits.

    Args:
        params: All that are trained, in the same order on the ranks that share them.
        replicas: The ranks that average a parameter's gradient.
        device: Where ranks communicate.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        replicas: Callable[[nn.Parameter], dist.Group],
        device: torch.device,
    ) -> None:
        self._device = device
        self._shared: dict[dist.Group, list[nn.Parameter]] = {}
        for param in params:
            self._shared.setdefault(replicas(param), []).append(param)
        self._used: set[nn.Parameter] = set()
        self._always: set[nn.Parameter] = set()
        self._handles: list[Any] = [
            param.register_post_accumulate_grad_hook(self._used.add)  # type: ignore[no-untyped-call]  # torch's is untyped
            for param in params
        ]

    def count_always(self, params: Iterable[nn.Parameter]) -> None:
        """Take these for used in any case: other parts of the model use them too."""
        self._always.update(params)

    def of_window(self) -> list[nn.Parameter]:
        """Return the parameters that no rank has used. All ranks call it."""
        unused = []
        for group, params in self._shared.items():
            own = [int(param in self._used or param in self._always) for param in params]
            used = torch.tensor(own, dtype=torch.int32, device=self._device)
            with lone_waits.watch.waiting(lambda: "which parameters are unused"):
                dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
            unused += [p for p, any_used in zip(params, used.tolist(), strict=True) if not any_used]
        return unused

    def clear(self) -> None:
        self._used.clear()

    def window_state(self) -> list[bool]:
        """Return which parameters this rank has used so far, in their order."""
        return [param in self._used for params in self._shared.values() for param in params]

    def load_window_state(self, saved: Collection[bool]) -> None:
        every = [param for params in self._shared.values() for param in params]
        self._used.update(p for p, used in zip(every, saved, strict=True) if used)

    def destroy(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
