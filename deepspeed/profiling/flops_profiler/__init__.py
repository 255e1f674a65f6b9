"""The flops profiler: `FlopsProfiler` for a model that is trained, `get_model_profile` for one
forward of a model at hand.

    profiler        counts operations, parameters and time, module by module
    module_profile  what was found out about one module
    report, units   the figures as text
"""

from deepspeed._lazy import lazy_attributes

_PROFILER = "deepspeed.profiling.flops_profiler.profiler"
__getattr__ = lazy_attributes(
    __name__,
    {
        "FlopsProfiler": _PROFILER,
        "get_model_profile": _PROFILER,
        "get_module_duration": _PROFILER,
        "get_module_flops": _PROFILER,
        "get_module_macs": _PROFILER,
    },
    ("profiler",),
)
