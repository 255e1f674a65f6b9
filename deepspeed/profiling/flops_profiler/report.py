"""The profiler's report as text: sizes and rates, the heaviest modules per depth, the model with
each module's numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from deepspeed.comm.watch.operation_log import print_rank_0
from deepspeed.profiling.flops_profiler import module_profile as results
from deepspeed.profiling.flops_profiler.units import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

if TYPE_CHECKING:
    from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler

WIDTH = 88
LABEL_WIDTH = 72


def write(text: str, output_file: str | None) -> None:
    """Write a report to a file, or to rank 0's standard output."""
    if output_file is None:
        print_rank_0(text)
        return
    folder = os.path.dirname(os.path.abspath(output_file))
    os.makedirs(folder, exist_ok=True)
    with open(output_file, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def model_report(
    profiler: FlopsProfiler, step: int, module_depth: int, top_modules: int, detailed: bool
) -> str:
    """The whole report; arguments as in `FlopsProfiler.print_model_profile`."""
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


def _sizes(profiler: FlopsProfiler) -> Iterator[tuple[str, str]]:
    engine, flops, params = (
        profiler.ds_engine,
        results.get_module_flops(profiler.model),
        results.get_module_params(profiler.model),
    )
    model_parallel = 1
    if engine is not None:
        model_parallel = engine.mp_world_size
        yield "world size", str(engine.world_size)
        yield "data parallel size", str(engine.dp_world_size)
        yield "model parallel size", str(model_parallel)
        yield "batch size per GPU", str(engine.train_micro_batch_size_per_gpu())
    yield "params per GPU", params_to_string(params)
    yield "params of model = params per GPU * mp_size", params_to_string(params * model_parallel)
    yield "fwd MACs per GPU", macs_to_string(results.get_module_macs(profiler.model))
    yield "fwd flops per GPU", number_to_string(flops)
    yield (
        "fwd flops of model = fwd flops per GPU * mp_size",
        number_to_string(flops * model_parallel),
    )


def _rates(profiler: FlopsProfiler) -> Iterator[tuple[str, str]]:
    flops, forward = (
        results.get_module_flops(profiler.model),
        results.get_module_duration(profiler.model),
    )
    backward, step = profiler.backward_duration, profiler.step_duration
    # The gradients of a product are two products of its size; what backward computes again is
    # counted on top.
    back, both = 2 + profiler.recompute_fwd_factor, 3 + profiler.recompute_fwd_factor
    yield "fwd latency", duration_to_string(forward)
    yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency", _rate(flops, forward)
    if not backward:
        return
    yield "bwd latency", duration_to_string(backward)
    yield (
        f"bwd FLOPS per GPU = {back:g} * fwd flops per GPU / bwd latency",
        _rate(back * flops, backward),
    )
    yield (
        f"fwd+bwd FLOPS per GPU = {both:g} * fwd flops per GPU / (fwd+bwd latency)",
        _rate(both * flops, forward + backward),
    )
    whole = forward + backward + step
    yield "step latency", duration_to_string(step)
    yield "iter latency", duration_to_string(whole)
    yield f"FLOPS per GPU = {both:g} * fwd flops per GPU / iter latency", _rate(both * flops, whole)
    if profiler.ds_engine is not None:
        samples = (
            profiler.ds_engine.train_micro_batch_size_per_gpu() * profiler.ds_engine.dp_world_size
        )
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
    """The heaviest classes of modules, for each depth up to `module_depth` (-1: the deepest)."""
    quantities: tuple[tuple[str, Callable[[nn.Module], float], Callable[[float], str]], ...] = (
        ("params", results.get_module_params, params_to_string),
        ("MACs", results.get_module_macs, macs_to_string),
        ("fwd latency", results.get_module_duration, duration_to_string),
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
            sums = {
                name: sum(read(module) for module in modules) for name, modules in by_class.items()
            }
            top = sorted(sums, key=lambda name: -sums[name])[:top_modules]  # noqa: B023  # called at once
            lines.append(f"    {label:<11} - { {name: text(sums[name]) for name in top} }")
    return "\n".join(lines)


# The model


def _tree(profiler: FlopsProfiler) -> list[str]:
    totals = (
        results.get_module_params(profiler.model),
        results.get_module_macs(profiler.model),
        results.get_module_duration(profiler.model),
    )
    notes = [
        "After each module's name: params, share of all params, MACs, share of all MACs, fwd "
        "latency, share of it, fwd FLOPS.",
        "Functions that a module calls itself (a loss, an activation) are in its own numbers and "
        "no line of their own.",
        "",
    ]
    return [*notes, *_module_lines(profiler.model, "", totals, 0)]


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
    params, macs, seconds = (
        results.get_module_params(module),
        results.get_module_macs(module),
        results.get_module_duration(module),
    )
    shares = [
        f"{100 * value / total:.4g}%" if total else "0%"
        for value, total in zip((params, macs, seconds), totals, strict=True)
    ]
    return (
        f"{params_to_string(params)} = {shares[0]} Params, {macs_to_string(macs)} = {shares[1]} "
        f"MACs, {duration_to_string(seconds)} = {shares[2]} latency, "
        f"{_rate(results.get_module_flops(module), seconds)}"
    )


def _heading(text: str) -> str:
    return f" {text} ".center(WIDTH, "-")
