"""Constants of the ``flops_profiler`` block, for scripts with ``ds_config[FLOPS_PROFILER]``."""

from deepspeed._lazy import lazy_attributes

__getattr__ = lazy_attributes(
    __name__, tables=("deepspeed.runtime.config_models.getters:FLOPS_PROFILER",)
)
