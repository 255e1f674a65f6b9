"""The leaf-module block: upstream's path of its model and defaults."""

from deepspeed._lazy import lazy_attributes

_NAMES = (
    "DEFAULT_LEAF_MODULE_CLASSES",
    "DEFAULT_LEAF_MODULE_NAMES",
    "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
    "DeepSpeedZeroLeafModuleConfig",
)
__getattr__ = lazy_attributes(
    __name__, dict.fromkeys(_NAMES, "deepspeed.runtime.config_models.zero")
)
