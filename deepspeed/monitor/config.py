"""The four monitor blocks: upstream's path of their models and getter."""

from deepspeed._lazy import lazy_attributes

_MODELS = ("CSVConfig", "CometConfig", "DeepSpeedMonitorConfig", "TensorBoardConfig", "WandbConfig")
__getattr__ = lazy_attributes(
    __name__,
    dict.fromkeys(_MODELS, "deepspeed.runtime.config_models.features")
    | {"get_monitor_config": "deepspeed.runtime.config_models.getters"},
)
