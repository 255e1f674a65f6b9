"""What the profiler found out about one module, kept with the module, and the sums that users and
the report read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from deepspeed.utils.timer import Span

_ATTRIBUTE = "_ds_module_profile"


@dataclass
class ModuleProfile:
    """What one module did in the forwards that were profiled, its children included."""

    flops: int = 0  # operations of its forwards
    # The times of those whose seconds nobody has asked for.
    spans: list[Span] = field(default_factory=list)
    calls: int = 0  # how many there were
    _read_s: float = 0.0

    @property
    def duration(self) -> float:
        """Seconds in them; waits for the last of them."""
        self._read_s += sum(span.get_elapsed_msec() for span in self.spans) / 1e3
        self.spans.clear()
        return self._read_s


def profile_of(module: nn.Module) -> ModuleProfile | None:
    """What was profiled of a module; None outside of a profile."""
    return module.__dict__.get(_ATTRIBUTE)


def set_profile(module: nn.Module, profile: ModuleProfile | None) -> None:
    """Keep a profile with its module; None takes it off."""
    # Not by setattr: wrappers and scripted modules have ideas of their own about attributes.
    if profile is None:
        module.__dict__.pop(_ATTRIBUTE, None)
    else:
        module.__dict__[_ATTRIBUTE] = profile


def _summed(module: nn.Module, read: Callable[[ModuleProfile], float]) -> float:
    """Read a module's own forward; of a container that is never called, its children's sum."""
    profile = profile_of(module)
    if profile is None:
        return 0
    return (
        read(profile) if profile.calls else sum(_summed(child, read) for child in module.children())
    )


def get_module_flops(module: nn.Module) -> int:
    """Floating-point operations of the module's profiled forwards; 0 if it was not profiled."""
    return int(_summed(module, lambda profile: profile.flops))


def get_module_macs(module: nn.Module) -> int:
    """Multiply-accumulate operations: two of the counted operations each."""
    return get_module_flops(module) // 2


def get_module_duration(module: nn.Module) -> float:
    """Seconds that the module's profiled forwards took."""
    return float(_summed(module, lambda profile: profile.duration))


def get_module_params(module: nn.Module) -> int:
    """Elements of the module's parameters, each once; those that ZeRO stage 3 has sharded too."""
    return sum(getattr(param, "ds_numel", param.numel()) for param in module.parameters())
