"""The flops profiler: `FlopsProfiler` for a model that is trained, `get_model_profile` for one
forward of a model at hand.

    profiler  counts operations, parameters and time, module by module
    report    what was found out about each, and the figures as text
"""

from deepspeed._lazy import lazy_attributes

_NAMES = (
    *("FlopsProfiler", "get_model_profile"),
    *("get_module_duration", "get_module_flops", "get_module_macs"),
)
_PROFILER = "deepspeed.profiling.flops_profiler.profiler"
__getattr__ = lazy_attributes(__name__, dict.fromkeys(_NAMES, _PROFILER), ("profiler",))
