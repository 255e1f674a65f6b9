"""Constants of the ``nebula`` block, for scripts that write ``ds_config[NEBULA]``."""

from deepspeed._lazy import lazy_attributes

__getattr__ = lazy_attributes(__name__, tables=("deepspeed.runtime.config_models.getters:NEBULA",))
