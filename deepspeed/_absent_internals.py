"""Upstream's public names that are parts of its implementation, which this package does not share.

`_absent` says so to scripts that ask for one of them, and what to use where there is something.
"""

from __future__ import annotations

OPTIMIZER_METHODS = frozenset(
    """
    _average_expert_grad_norms _check_overflow _clear_hp_buffer_references
    _clear_lp_params_references _clear_param_grad_only _clear_previous_reduced_grads
    _configure_moe_settings _create_optimizer_mapping _create_param_mapping
    _enable_universal_checkpoint _fill_param_grad_accum_attribute
    _finalize_cpu_offload_gradient_accumulation _flatten_dense_tensors_aligned
    _get_base_optimizer_state _get_groups_without_padding _get_loss_scale _get_offload_gradient_dict
    _get_param_groups _get_preflattened_grad_partition _get_state _get_state_without_padding
    _get_universal_checkpoint_info _has_inf_or_nan _lazy_init_hp_params_optimizer_state
    _link_all_hp_params _load_global_state _load_legacy_checkpoint _load_universal_checkpoint
    _maybe_reduce_autoep_folding_tp_gradient _model_parallel_all_reduce _optimizer_step
    _partition_base_optimizer_state _release_ipg_buffers _release_preflattened_grad_buffers
    _restore_base_optimizer_state _restore_cpu_offload_grad_to_gpu
    _restore_elastic_base_optimizer_state _restore_from_bit16_weights
    _restore_from_elastic_fp32_weights _restore_step_from_elastic_checkpoint _round_robin_reorder
    _set_loss_scale _set_param_groups _set_state _setup_for_real_optimizer _split_flat_tensor
    _unpin_offload_buffers _update_hp_grad _update_hp_grads_func _update_model_bit16_weights
    _update_scale _update_storage_to_flattened_tensor accumulate_hp_grads_and_remove_lp
    allreduce_and_copy allreduce_and_copy_with_multiple_ranks allreduce_and_scatter allreduce_bucket
    allreduce_no_retain async_accumulate_grad_in_cpu_via_gpu
    async_inplace_copy_grad_to_fp32_buffer_from_gpu buffered_reduce_fallback check_overflow
    checkpoint_event_epilogue checkpoint_event_prologue clear_backward_seen_flag
    clear_grad_attribute configure_autoep_folding_tp_gradient_reduction copy_grads_in_partition
    create_reduce_and_remove_grad_hooks create_zenflow_hooks dump_post_step_gradients
    dump_pre_step_gradients empty_partition_cache enter_backward fill_grad_accum_attribute
    finalize_gradient_accumulation_boundary flatten_and_print flatten_dense_tensors_aligned
    free_grad_in_param_list get_all_grad_tensors get_bit16_param_group get_data_parallel_partitions
    get_ep_ranks get_first_param_index get_flat_partition get_fp32_grad_for_param
    get_fp32_grad_partitions get_full_hp_param get_grad_position get_gradient_for_reduction
    get_grads_for_norm get_grads_to_reduce get_groups_without_padding get_hp_param_device
    get_lean_optimizer_state get_local_fp32_grad_for_param get_local_fp32_param get_lr
    get_param_comm_dtype get_param_gradient_attribute get_param_id get_partition_info
    gradient_reduction_w_predivide has_overflow has_overflow_partitioned_grads_serial
    has_overflow_serial independent_gradient_partition_epilogue initialize_ds_offload
    initialize_gradient_partition initialize_gradient_partitioning_data_structures
    initialize_optimizer_states invalidate_secondary_tensor is_moe_group load_hp_checkpoint_state
    load_hp_checkpoint_state_from_checkpoint_dir load_hp_checkpoint_state_from_checkpoint_dir_stage3
    load_module_checkpoint_state_from_checkpoint_dir_stage3 offload_states
    overlapping_partition_gradients_reduce_epilogue override_loss_scale partition_grads print_rank_0
    process_gradients quantize_nontrainable_params queue_post_backward_callback reduce_ipg_grads
    reenter_backward_if_needed register_grad_acc_post_hook reload_states report_ipg_memory_usage
    reset_cpu_buffers reset_partition_gradient_structures reset_swap_buffers run_grad_acc_post_hooks
    sequential_execution set_fp32_grad_for_param set_full_hp_param set_grad_positions
    set_local_grad_for_param set_local_hp_param set_lr set_none_gradients_to_zero
    set_norm_for_param_grad set_norm_for_param_grad_in_gpu setup_buckets
    should_refresh_expected_hook_count step_fused_adam step_fused_lamb
    unregister_grad_acc_post_hooks unscale_and_clip_grads update_fp32_grad_for_param_vectorized
    update_hook_state_and_maybe_run_epilogue update_offload_overflow_tracker
    update_offload_overflow_tracker_for_param_grad zero_reduced_gradients
    """.split()
)
"""Methods of the sharded and the half-precision optimizers."""

ENGINE_METHODS = frozenset(
    """
    _DeepSpeedEngine__check_params _autoep_expert_parameter_names _autoep_non_expert_param_families
    _autoep_param_family _get_expert_ckpt_name _is_same_process_group _make_autoep_folding_metadata
    _uses_autoep_zero3_partitioned_experts _validate_autoep_folding_checkpoint_metadata
    _validate_autoep_zero3_partitioned_metadata
    """.split()
)
"""Of the engine, beside those that it has something else for."""

PIPELINE_METHODS = frozenset(
    """
    _aggregate_total_loss _allocate_buffer _allocate_or_extend_buffers _allocate_zeros
    _backward_prologue_per_tensor _bcast_pipe_scalar _bf16_reduce_grads _recv_tensor_meta
    _reduce_outputs _reentrant_activation_checkpointing _send_tensor_meta
    """.split()
)
"""Of the pipeline's engine."""

MODULE_NAMES = frozenset(
    """
    AllGatherCoalescedHandle AllGatherHandle AllReduceCoalescedHandle BackwardHookStateManager
    CUDAQuantizer IPGBucketZ3 InsertPostInitMethodToModuleSubClasses MultipleAllGatherHandles
    NoGatherCoalescedHandle NoGatherHandle QuantizationInfo apply_zero_leaf_module_config
    debug_rank0 defragment get_alignment_padding get_all_subclasses get_allgather_dtype
    get_lst_from_rank0 get_mapping_to_flat_buffer get_new_tensor_fn_for_dtype input is_even isclose
    lcm model_to_params move_to_cpu print_rank_0 print_rank_msg split_half_float_double
    split_half_float_double_sparse
    """.split()
)
"""Functions and classes beside the optimizers, the engine and `zero.Init`."""

HELPERS = frozenset(
    """
    OutputBackwardHookManager TLinear all_gather_dp_groups all_gather_into_tensor_dp_groups
    check_internal_apis_for_count_used_parameters count_used_parameters_in_backward get_grad_zeros
    get_inactive_params get_norm_with_moe_layers get_norm_with_moe_layers_fast graph_process
    is_transformers_cache register_output_backward_hooks
    """.split()
)
"""Of `deepspeed.runtime.utils`."""

CONVERSION = frozenset(
    """
    atoi dp_index_to_str dump_param_fragment extract_zero_shards extract_zero_shards_stage3
    merge_tp_slices merge_zero3_slices natural_keys
    """.split()
)
"""Of `deepspeed.checkpoint.ds_to_universal`."""

INTERNAL_MODULES = frozenset(
    f"deepspeed.{name}"
    for name in """
    comm.backend comm.mori compat launcher.launcher_helper monitor.utils moe.ep_count moe.ep_experts
    moe.ep_kernels moe.ep_repack moe.ep_router moe.ep_tp_dispatch moe.fused_expert_layout
    ops.compile ops.pin_memory ops.triton_ops runtime.data_pipeline.data_sampling.utils
    runtime.zero.contiguous_memory_allocator runtime.zero.linear
    runtime.zero.partitioned_param_profiler runtime.zero.test utils.debug
    utils.mixed_precision_linkage utils.pin_memory utils.pin_memory_tracker utils.static_cache
    utils.types
    """.split()
)
"""Modules."""
