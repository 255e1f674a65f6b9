"""ZeRO: state, gradients and parameters sharded over ranks.

Optimizers:

    stage_1_and_2                   optimizer state (1) and gradients (2) sharded
    stage3                          parameters sharded too
    zero_optimizer                  what the stages share, and optimizer instances
    units                           folder: masters and files of stage 3, what is reduced together
    sharded_state                   state of shards as files have it
    movable_states, offload_states  state that leaves the device between steps

Models under stage 3:

    init_context, mics              `zero.Init`: parameters are cut as they are made
    model_sharding                  a model that was built plainly, taken over
    parameter_offload               whole where modules run: hooks of forward and backward
    tiling                          a linear layer as a grid of small ones
    parameters                      folder: what a parameter of stage 3 is, and how it is cut
    gathering                       folder: who has parameters whole, from when until when

Configuration, and memory:

    config, offload_config          the block's enums
    estimates                       folder: memory before anything is allocated

`partition_parameters` and `utils` are upstream's paths of names that live elsewhere.
"""

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
        "stage3",
        "stage_1_and_2",
        "tiling",
        "utils",
    ),
)
