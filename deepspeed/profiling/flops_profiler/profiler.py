"""`FlopsProfiler`: operations, parameters and time of a model's forward, module by module.

Operations are counted by torch's `FlopCounterMode`, which sees every operator as it is dispatched:
matrix products, convolutions and attention, two operations per multiply-accumulate. Whatever else a
model computes (activations, norms) counts as zero; it is of a lower order. Hooks read the counter
when a module begins and ends. Times are the device's, read when somebody asks: in a pipeline the
host must not wait for the device while a receive is posted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from deepspeed._lazy import lazy_attributes
from deepspeed.profiling.flops_profiler import report
from deepspeed.profiling.flops_profiler.report import (
    ModuleProfile,
    duration_to_string,
    get_module_duration,
    get_module_flops,
    get_module_macs,
    get_module_params,
    macs_to_string,
    number_to_string,
    params_to_string,
    profile_of,
    set_profile,
)
from deepspeed.utils.timer import begin_span, end_span

# Upstream's path of these names; its further ones say what to use instead.
_TEXTS = ("bytes_to_string", "flops_to_string")
__getattr__ = lazy_attributes(__name__, dict.fromkeys(_TEXTS, report.__name__))


def _attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **kwargs: Any
) -> int:
    """Two products per head: queries with keys, the result with values."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[-2] * (width + value[-1])


# torch's own table has the attention kernels of devices, but not the host's.
_HOST_KERNELS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops
}


class FlopsProfiler:
    """Profiles forwards of `model` between `start_profile` and `stop_profile`.

    Args:
        model: The model; of an engine, its module.
        ds_engine: The engine that trains it, for the report's sizes.
        recompute_fwd_factor: Forwards that a backward computes again, for the report.
    """

    def __init__(
        self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False  # whether forwards are being profiled
        # Seconds of backward, if whoever profiles a step measured them
        # (`runtime.step_observers.step_profile`); 0 otherwise.
        self.backward_duration = 0.0
        self.step_duration = 0.0  # likewise, of the optimizer step
        self._counter = FlopCounterMode(display=False, custom_mapping=_HOST_KERNELS)
        self._counting = False
        self._handles: list[Any] = []
        # Modules that are in their forward: operations and time at its start.
        self._open: list[tuple[nn.Module, int, Any]] = []
        self._ignored_depth = 0
        self._ignored_flops = 0

    # Profiling

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Profile forwards from now on, except those of modules of the types in `ignore_list`."""
        if self.started:
            self.stop_profile()
        self.reset_profile()
        ignored = tuple(ignore_list or ())
        for module in self.model.modules():
            enter, leave = self._enter, self._leave
            if isinstance(module, ignored):
                enter, leave = self._enter_ignored, self._leave_ignored
            self._handles.append(module.register_forward_pre_hook(enter))
            # Called for a forward that raised too: what is open must be closed again.
            self._handles.append(module.register_forward_hook(leave, always_call=True))
        self.started = True
        self.resume()

    def resume(self) -> None:
        """Count again after `pause`."""
        if self.started and not self._counting:
            self._counter.__enter__()
            self._counting = True
            self._ignored_flops = 0

    def pause(self) -> None:
        """Do not count what comes; a backward that recomputes forwards, say."""
        if self._counting:
            self._counting = False
            self._open.clear()
            self._counter.__exit__(None, None, None)

    def stop_profile(self) -> None:
        """Do not profile any more; results stay to be read until `end_profile`."""
        self.pause()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.started = False

    def reset_profile(self) -> None:
        """Forget all results."""
        self.backward_duration = self.step_duration = 0.0
        for module in self.model.modules():
            set_profile(module, ModuleProfile())

    def end_profile(self) -> None:
        """Stop, and take off the model what was put there."""
        self.stop_profile()
        for module in self.model.modules():
            set_profile(module, None)

    # Hooks

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._counting and not self._ignored_depth:
            self._open.append((module, self._counted(), begin_span()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._counting or self._ignored_depth:
            return
        # A forward that raised may have left modules open above this one.
        while self._open:
            opened, flops, started = self._open.pop()
            if opened is module:
                profile = profile_of(module)
                if profile is not None:
                    profile.flops += self._counted() - flops
                    profile.spans.append(end_span(started))
                    profile.calls += 1
                return

    def _enter_ignored(self, module: nn.Module, args: Any) -> None:
        if self._counting:
            self._ignored_flops -= self._counter.get_total_flops()
            self._ignored_depth += 1

    def _leave_ignored(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._counting and self._ignored_depth:
            self._ignored_flops += self._counter.get_total_flops()
            self._ignored_depth -= 1

    def _counted(self) -> int:
        return self._counter.get_total_flops() - self._ignored_flops

    # Results

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Floating-point operations of the profiled forwards."""
        total = get_module_flops(self.model)
        return number_to_string(total) if as_string else total

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-accumulate operations of the profiled forwards."""
        total = get_module_macs(self.model)
        return macs_to_string(total) if as_string else total

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds of the profiled forwards."""
        total = get_module_duration(self.model)
        return duration_to_string(total) if as_string else total

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Elements of this rank's parameters."""
        total = get_module_params(self.model)
        return params_to_string(total) if as_string else total

    def is_expert_tensor_parallelism_enabled(self) -> bool:
        """Whether experts are split over tensor-parallel ranks; they never are here."""
        return False

    # Report

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Write the report of what was profiled.

        Args:
            profile_step: The step, for the report.
            module_depth: Depth of the aggregated part; -1: the deepest.
            top_modules: How many modules per depth it shows.
            detailed: Add the model with each module's numbers.
            output_file: File to write to, its folder is made if need be; None: standard output of
                rank 0.
        """
        text = report.model_report(self, profile_step, module_depth, top_modules, detailed)
        report.write(text, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the aggregated part of the report alone; arguments as there."""
        report.write(report.aggregated(self.model, module_depth, top_modules), None)


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[int, int, int] | tuple[str, str, str]:
    """Profile one forward: operations, multiply-accumulate operations, parameters.

    Args:
        model: The model, as it is: its training mode and device stay.
        input_shape: Shape of the one input, which is then made of ones in the model's dtype, on its
            device.
        args: Positional inputs, if `input_shape` is not given.
        kwargs: Inputs by name.
        print_profile: Write the report.
        detailed: See `FlopsProfiler.print_model_profile`.
        module_depth: As above.
        top_modules: As above.
        warm_up: Forwards before the profiled one.
        as_string: Return text with units instead of numbers.
        output_file: See `FlopsProfiler.print_model_profile`.
        ignore_modules: Types of modules that do not count.
        mode: "forward" calls the model, "generate" its method `generate`.

    Raises:
        ValueError: For another mode, or without any input.
    """
    if mode not in ("forward", "generate"):
        raise ValueError(f"get_model_profile(mode={mode!r}): use 'forward' or 'generate'")
    inputs, named = list(args), dict(kwargs or {})
    if input_shape is not None:
        inputs = [_ones(model, input_shape)]
    if not inputs and not named:
        raise ValueError("get_model_profile: no input; give input_shape, args or kwargs")
    call: Any = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    with torch.no_grad():
        for _ in range(warm_up):
            call(*inputs, **named)
        profiler.start_profile(ignore_list=ignore_modules)
        try:
            call(*inputs, **named)
        finally:
            profiler.stop_profile()
    try:
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        flops, macs = get_module_flops(model), get_module_macs(model)
        params = get_module_params(model)
    finally:
        profiler.end_profile()
    if as_string:
        return number_to_string(flops), macs_to_string(macs), params_to_string(params)
    return flops, macs, params


def _ones(model: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    if not isinstance(shape, tuple) or not shape:
        raise ValueError(
            f"get_model_profile(input_shape={shape!r}): a tuple of sizes is needed, the batch first"
        )
    first = next(model.parameters(), torch.empty(0))
    return torch.ones(shape, dtype=first.dtype, device=first.device)
