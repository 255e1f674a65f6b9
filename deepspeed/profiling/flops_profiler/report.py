"""What the profiler found out about each module, kept with it, and the report of that as text:
sizes and rates, the heaviest modules per depth, the model with each module's numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from deepspeed.comm.watch.operation_log import print_rank_0
from deepspeed.utils.timer import Span

WIDTH = 88
LABEL_WIDTH = 72


_ATTRIBUTE = "_ds_module_profile"


class Profiled(Protocol):
    """A profiled model: a `FlopsProfiler` that has ended."""

    model: nn.Module
    ds_engine: Any
    recompute_fwd_factor: float
    backward_duration: float
    step_duration: float


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
    if profile.calls:
        return read(profile)
    return sum(_summed(child, read) for child in module.children())


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


# Numbers with units, in upstream's spelling (1.23 KMACs, 2.5 GFLOPS, 10 us)

_SCALES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Write `num` with a decimal prefix ("T" to "u"), None: the largest that leaves at least 1."""
    if units is None:
        fitting = (unit for unit, scale in _SCALES.items() if abs(num) >= scale)
        units = next(fitting, "u") if num else ""
    if units not in _SCALES:
        known = ", ".join(map(repr, _SCALES))
        raise ValueError(f"units={units!r} is unknown; use one of {known} or None")
    value = round(num / _SCALES[units], precision)
    return f"{value:g} {units}" if abs(value) < 1e6 else f"{value:.{precision}f} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Multiply-accumulate operations: "1.23 KMACs"."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Floating-point operations per second: "1.23 KFLOPS"."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Bytes, in units of 1000: "1.23 KB"."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Parameters: "1.23 M", with "B" for 1e9."""
    text = number_to_string(params_num, "G" if units == "B" else units, precision)
    return text.replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Write seconds, in units ("s", "ms", "us") or what fits: "1.23 ms"."""
    if units is not None and units.endswith("s"):
        units = units[:-1]
    return f"{number_to_string(duration, units, precision)}s"


# The report


def write(text: str, output_file: str | None) -> None:
    """Write a report to a file, or to rank 0's standard output."""
    if output_file is None:
        print_rank_0(text)
        return
    os.makedirs(os.path.dirname(os.path.abspath(output_file)), exist_ok=True)
    with open(output_file, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def model_report(
    profiler: Profiled, step: int, module_depth: int, top_modules: int, detailed: bool
) -> str:
    """Write the whole report; arguments as in `FlopsProfiler.print_model_profile`."""
    parts = [
        _heading("DeepSpeed Flops Profiler"),
        f"Profile Summary at step {step}:",
        "MACs: multiply-accumulate operations; flops: floating-point operations, two per MAC "
        "(matrix products, convolutions and",
        "attention are counted); FLOPS: flops per second; fwd, bwd, step: forward, backward, "
        "optimizer step; iter: their sum.",
        "",
        *(f"{label + ':':<{LABEL_WIDTH}}{value}" for label, value in _sizes(profiler)),
        *(f"{label + ':':<{LABEL_WIDTH}}{value}" for label, value in _rates(profiler)),
        "",
        aggregated(profiler.model, module_depth, top_modules),
    ]
    if detailed:
        parts += ["", _heading("Detailed Profile per GPU"), *_tree(profiler)]
    return "\n".join([*parts, "-" * WIDTH])


def _sizes(profiler: Profiled) -> Iterator[tuple[str, str]]:
    engine, model = profiler.ds_engine, profiler.model
    flops, params = get_module_flops(model), get_module_params(model)
    model_parallel = 1
    if engine is not None:
        model_parallel = engine.mp_world_size
        yield "world size", str(engine.world_size)
        yield "data parallel size", str(engine.dp_world_size)
        yield "model parallel size", str(model_parallel)
        yield "batch size per GPU", str(engine.train_micro_batch_size_per_gpu())
    yield "params per GPU", params_to_string(params)
    yield "params of model = params per GPU * mp_size", params_to_string(params * model_parallel)
    yield "fwd MACs per GPU", macs_to_string(get_module_macs(model))
    yield "fwd flops per GPU", number_to_string(flops)
    of_model = number_to_string(flops * model_parallel)
    yield "fwd flops of model = fwd flops per GPU * mp_size", of_model


def _rates(profiler: Profiled) -> Iterator[tuple[str, str]]:
    flops, forward = get_module_flops(profiler.model), get_module_duration(profiler.model)
    backward, step = profiler.backward_duration, profiler.step_duration
    # The gradients of a product are two products of its size; what backward computes again is
    # counted on top.
    back, both = 2 + profiler.recompute_fwd_factor, 3 + profiler.recompute_fwd_factor
    yield "fwd latency", duration_to_string(forward)
    yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency", _rate(flops, forward)
    if not backward:
        return
    yield "bwd latency", duration_to_string(backward)
    label = f"bwd FLOPS per GPU = {back:g} * fwd flops per GPU / bwd latency"
    yield label, _rate(back * flops, backward)
    label = f"fwd+bwd FLOPS per GPU = {both:g} * fwd flops per GPU / (fwd+bwd latency)"
    yield label, _rate(both * flops, forward + backward)
    whole = forward + backward + step
    yield "step latency", duration_to_string(step)
    yield "iter latency", duration_to_string(whole)
    yield f"FLOPS per GPU = {both:g} * fwd flops per GPU / iter latency", _rate(both * flops, whole)
    if (engine := profiler.ds_engine) is not None:
        samples = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
        yield "samples/second", f"{samples / whole:.2f}"


def _rate(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds) if seconds else "not measured"


# The heaviest modules


def _by_depth(model: nn.Module) -> list[dict[str, list[nn.Module]]]:
    """List for each depth the modules by the name of their class."""
    depths: list[dict[str, list[nn.Module]]] = []
    layer = [model]
    while layer:
        by_class: dict[str, list[nn.Module]] = {}
        for module in layer:
            by_class.setdefault(type(module).__name__, []).append(module)
        depths.append(by_class)
        layer = [child for module in layer for child in module.children()]
    return depths


def aggregated(model: nn.Module, module_depth: int, top_modules: int) -> str:
    """List the heaviest classes of modules, for each depth up to `module_depth` (-1: all)."""
    quantities: tuple[tuple[str, Callable[[nn.Module], float], Callable[[float], str]], ...] = (
        ("params", get_module_params, params_to_string),
        ("MACs", get_module_macs, macs_to_string),
        ("fwd latency", get_module_duration, duration_to_string),
    )
    depths = _by_depth(model)
    shown = depths if module_depth < 0 else depths[: module_depth + 1]
    lines = [
        _heading("Aggregated Profile per GPU"),
        f"Top {top_modules} modules in terms of params, MACs or fwd latency at each depth:",
    ]
    for depth, by_class in enumerate(shown):
        lines.append(f"depth {depth}:")
        for label, read, text in quantities:
            sums = {name: sum(map(read, modules)) for name, modules in by_class.items()}
            top = sorted(sums, key=lambda name: -sums[name])[:top_modules]  # noqa: B023  # called at once
            lines.append(f"    {label:<11} - { {name: text(sums[name]) for name in top} }")
    return "\n".join(lines)


# The model


def _tree(profiler: Profiled) -> list[str]:
    notes = [
        "After each module's name: params, share of all params, MACs, share of all MACs, fwd "
        "latency, share of it, fwd FLOPS.",
        "Functions that a module calls itself (a loss, an activation) are in its own numbers and "
        "no line of their own.",
        "",
    ]
    return [*notes, *_module_lines(profiler.model, "", _amounts(profiler.model), 0)]


def _amounts(module: nn.Module) -> tuple[float, float, float]:
    return get_module_params(module), get_module_macs(module), get_module_duration(module)


def _module_lines(
    module: nn.Module, name: str, totals: tuple[float, float, float], depth: int
) -> list[str]:
    indent = "  " * depth
    label = f"({name}): " if name else ""
    children = list(module.named_children())
    own = ", ".join(part for part in (_numbers(module, totals), module.extra_repr()) if part)
    if not children:
        return [f"{indent}{label}{type(module).__name__}({own})"]
    lines = [f"{indent}{label}{type(module).__name__}(", f"{indent}  {own}"]
    for child_name, child in children:
        lines += _module_lines(child, child_name, totals, depth + 1)
    return [*lines, f"{indent})"]


def _numbers(module: nn.Module, totals: tuple[float, float, float]) -> str:
    params, macs, seconds = amounts = _amounts(module)
    pairs = zip(amounts, totals, strict=True)
    shares = [f"{100 * value / total:.4g}%" if total else "0%" for value, total in pairs]
    return (
        f"{params_to_string(params)} = {shares[0]} Params, {macs_to_string(macs)} = {shares[1]} "
        f"MACs, {duration_to_string(seconds)} = {shares[2]} latency, "
        f"{_rate(get_module_flops(module), seconds)}"
    )


def _heading(text: str) -> str:
    return f" {text} ".center(WIDTH, "-")
