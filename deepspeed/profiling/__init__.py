"""Profiling: floating-point operations per module (`flops_profiler`), memory at each phase
(`memory_breakdown`).
"""
