"""ZeRO: state, gradients and parameters sharded over ranks.

Optimizers:

    stage_1_and_2                   optimizer state (1) and gradients (2) sharded
    stage3                          parameters sharded too
    zero_optimizer                  what the stages share, over `optimizers.master_weights`
    unit_buckets                    what of stage 3 is reduced together
    shard_writer                    what stage 3 does with updated masters
    movable_states, offload_states  state that leaves the device between steps
    movable_weights                 weights of stage 3 that do, without an optimizer too
    partial_offload                 a part of the state on the host

Parameters of stage 3, from how they are cut to who has them whole:

    init_context, mics              `zero.Init`: cut as they are made
    own_draws                       what a rank drew itself, which its experts are copies of
    model_sharding                  a model that was built plainly, taken over
    late_parameters                 adapters and heads that come afterwards
    zero_parameter                  what a parameter of stage 3 is
    ordinary_copies, module_hooks   what is copied of a parameter, and of a module
    shard_memory, secondary_shards  where shards lie, and a second time within a node
    units                           which parameters are gathered together, found in the model
    gather_unit, memory_pool        one gather, and the memory of what is gathered
    parameter_offload               whole where modules run: hooks of forward and backward
    saved_tensors, gradient_shapes  what autograd asks of parameters that have gone
    partitioned_param_coordinator   who needs which unit, from when until when
    use_order, backward_order       in which order they were used, and are in backward
    gathered_parameters             whole for scripts: `GatheredParameters`
    agreement                       whether all ranks say the same
    tiling                          a linear layer as a grid of small ones

Configuration, and memory before anything is allocated:

    config, offload_config                   the block's enums
    leaf_module_config, gather_settings      which modules are one, and what is whole when
    memory_estimators                        stages 1 and 2
    replicated_estimates, sharded_estimates  without ZeRO; stage 3

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
        "partitioned_param_coordinator",
        "stage3",
        "stage_1_and_2",
        "tiling",
        "utils",
    ),
)
