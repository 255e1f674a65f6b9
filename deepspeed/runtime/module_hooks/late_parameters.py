"""Parameters that come to a model after stage 3 has taken it: adapters, a new head. Nobody has cut
them, and the optimizer does not know them. torch's registration hooks tell of changed modules, so a
forward without a change looks at one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks

from deepspeed.runtime.module_hooks.parameter_reads import hears_reads


class _Registrations:
    """Counts what modules of this process are given, while somebody has asked for it."""

    def __init__(self) -> None:
        self.count = 0
        self._listeners = 0
        self._handles: list[Any] = []

    def listen(self) -> None:
        if self._listeners == 0:
            self._handles = [
                hooks.register_module_module_registration_hook(self._on_registration),
                hooks.register_module_parameter_registration_hook(self._on_registration),
            ]
        self._listeners += 1

    def leave(self) -> None:
        self._listeners -= 1
        if self._listeners == 0:
            for handle in self._handles:
                handle.remove()

    def _on_registration(self, module: nn.Module, name: str, given: object) -> None:
        self.count += 1


registrations = _Registrations()


class LateParameters:
    """Finds what a model has been given (`is_known`: already gathered); all ranks `cut` it."""

    def __init__(
        self,
        model: nn.Module,
        is_known: Callable[[nn.Parameter], bool],
        cut: Callable[[Iterable[nn.Parameter]], None],
    ) -> None:
        self._model, self._is_known, self.cut = model, is_known, cut
        self._listens = True
        registrations.listen()
        self._seen = registrations.count

    @property
    def may_be_there(self) -> bool:
        """Whether any module of the process was given something since `find` found all."""
        return registrations.count != self._seen

    def find(self) -> tuple[bool, dict[nn.Parameter, str]]:
        """Say whether there are new modules, and name new parameters."""
        modules = any(not hears_reads(module) for module in self._model.modules())
        named = ((param, name) for name, param in self._model.named_parameters())
        return modules, {param: name for param, name in named if not self._is_known(param)}

    def taken(self) -> None:
        self._seen = registrations.count

    def close(self) -> None:
        if self._listens:
            registrations.leave()
        self._listens = False


def refuse_untrained(late: Iterable[tuple[nn.Parameter, str]]) -> None:
    """Raise RuntimeError if some of these are trained: the optimizer was made without them."""
    names = [name for param, name in late if param.requires_grad]
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise RuntimeError(
            f"ZeRO stage 3: {', '.join(names[:4])}{more} came to the model after "
            "deepspeed.initialize, so no optimizer trains them. Add them before it, or call "
            "engine.destroy() and initialize again; what is not to be trained "
            "(requires_grad_(False)) may be added at any time"
        )
