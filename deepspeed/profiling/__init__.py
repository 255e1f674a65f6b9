"""Profiling: floating-point operations per module (`flops_profiler`), memory at each phase
(`memory_breakdown`).

`config` and `constants` are upstream's paths of the `flops_profiler` block.
"""
