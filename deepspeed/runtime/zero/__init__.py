"""ZeRO stages."""

from deepspeed._lazy import lazy_attributes

_PARAMETERS = "deepspeed.runtime.zero.partition_parameters"

__getattr__ = lazy_attributes(
    __name__,
    {
        "DeepSpeedTensorOverride": _PARAMETERS,
        "DeepSpeedZeRoOffload": "deepspeed.runtime.zero.parameter_offload",
        "GatheredParameters": _PARAMETERS,
        "Init": _PARAMETERS,
        "MiCS_Init": "deepspeed.runtime.zero.mics",
        "TiledLinear": "deepspeed.runtime.zero.tiling",
        "TiledLinearReturnBias": "deepspeed.runtime.zero.tiling",
        "ZeroParamStatus": _PARAMETERS,
        "ZeroParamType": _PARAMETERS,
        "register_external_parameter": _PARAMETERS,
        "unregister_external_parameter": _PARAMETERS,
        "unwrap_model_for_generation": _PARAMETERS,
    },
    (
        "config",
        "mics",
        "offload_config",
        "offload_states",
        "parameter_offload",
        "partition_parameters",
        "partitioned_param_coordinator",
        "stage3",
        "stage_1_and_2",
        "tiling",
        "utils",
    ),
)
