"""Upstream's public names that are parts of its implementation, which this package does not share.

`_absent` says so to scripts that ask for one of them, and what to use where there is something.
"""

from __future__ import annotations

OPTIMIZER_METHODS = frozenset(
    """
    _DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket
    _DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads
    _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads
    _DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads
    _add_full_reduction_to_compact_grad_partition _add_to_grad_partition_buffer
    _allreduce_noncontiguous_bucket_preserving_fp32 _apply_autoep_folding_tp_correction
    _apply_distributed_muon_update _apply_muon_to_accumulated_grads _apply_muon_updates_cpu_offload
    _assert_same_partition_group _autoep_expert_parallel_group _average_expert_grad_norms
    _buffered_reduce_fallback_preserving_fp32 _build_compact_grad_partition_buffer
    _build_muon_exchange_layout _check_overflow _checkpoint_group_state_dicts
    _clear_fp32_optimizer_param_groups _clear_hp_buffer_references _clear_lp_params_references
    _clear_muon_allgather_buffers _clear_param_grad_only _clear_previous_reduced_grads
    _commit_muon_momentum _configure_moe_settings _configure_offloading _configure_tensor_swapping
    _constant_buffered_norm2 _convert_unpadded_rigid_optimizer_state
    _create_fp16_partitions_with_defragmentation _create_fp16_sub_groups _create_fp32_partitions
    _create_momentum_buffer _create_next_swappable_fp32_groups _create_optimizer_mapping
    _create_param_groups_fp16_flat_cpu_memory _create_param_mapping _enable_universal_checkpoint
    _expand_unpadded_flat_group _fill_param_grad_accum_attribute
    _finalize_cpu_offload_gradient_accumulation _finalize_offload_gradient_accumulation
    _flatten_dense_tensors_aligned _fp32_state_allgather _get_base_optimizer_state
    _get_compact_grad_partition_buffer _get_compact_grad_partition_slice
    _get_flat_partition_unpadded _get_flattened_partition _get_fp32_grad_state_partition
    _get_fp32_opt_state_partition _get_groups_without_padding _get_lean_tensors _get_loss_scale
    _get_norm_groups _get_norm_mask_idx _get_offload_gradient_dict _get_param_coordinator
    _get_param_group_idx _get_param_groups _get_param_partition_group _get_param_partition_rank
    _get_param_partition_world_size _get_parameter_partitions _get_preflattened_grad_partition
    _get_state _get_state_without_padding _get_sub_group_partition_count
    _get_sub_group_partition_rank _get_sub_group_partition_ranks _get_sub_group_partitions
    _get_sub_group_process_group _get_trainable_parameter_groups _get_universal_checkpoint_info
    _global_ranks _grad_norm_counts_every_rank _gradient_averaging_world_size
    _gradient_reduction_buffer_dtype _has_inf_or_nan _is_muon_group
    _lazy_init_hp_params_optimizer_state _link_all_hp_params _load_global_state
    _load_global_state_stage3 _load_legacy_checkpoint _load_universal_checkpoint
    _loco_err_buf_update _loss_scale_update_and_overflow_cleanup
    _maybe_reduce_autoep_folding_tp_gradient _model_parallel_all_reduce _move_to_flat_buffer
    _muon_all_gather_partitions _muon_momentum_buffer _muon_param_batches _muon_staging_momentum
    _muon_update_lacks_loss_scale _muon_update_sub_group _offload_grad_partition_at_boundary
    _optimizer_states_and_gradient_swap_in _optimizer_states_and_gradient_swap_out _optimizer_step
    _overflow_check_and_loss_scale_update _overflow_clean_up _partition_all_parameters
    _partition_base_optimizer_state _partitioned_buffers_all_gather _partitioned_params_swap_out
    _post_step _pre_step _prepare_fp32_grad_for_sub_group _prepare_muon_updates _prepare_sub_group
    _reassign_or_swap_out_partitioned_parameters _record_bucket_producer _record_gradient_stream
    _record_offload_copy _redistribute_unpadded_partition _release_ipg_buffers
    _release_preflattened_grad_buffers _release_sub_group _release_swap_buffers
    _require_avoid_recompute_norm _restore_base_optimizer_state _restore_cpu_offload_grad_to_gpu
    _restore_elastic_base_optimizer_state _restore_from_bit16_weights
    _restore_from_elastic_fp32_weights _restore_from_fp32_weights
    _restore_from_unpadded_fp32_weights _restore_from_unpadded_local_fp32_weights
    _restore_step_from_elastic_checkpoint _rigid_load_state_dict _rigid_state_dict
    _round_robin_reorder _set_fp16_partitioned_groups_flat _set_fp32_optimizer_param_groups
    _set_loss_scale _set_param_groups _set_state _set_zero_group_parallelism
    _setup_for_real_optimizer _skip_invalid_grad_norm _slice_autoep_universal_expert_param
    _split_flat_tensor _swap_in_sub_group_to_flat_buffer _swap_out_offload_fp32_gradients
    _swappable_optimizer_subgroup _unflatten_partitioned_parameters _unpin_offload_buffers
    _update_hp_grad _update_hp_grads_func _update_model_bit16_weights _update_scale
    _update_storage_to_flattened_tensor _use_compact_grad_partition_buffer _wait_for_offload_copies
    _writeback_swap_state _zero3_partition_group_metadata accumulate_hp_grads_and_remove_lp
    allreduce_and_copy allreduce_and_copy_with_multiple_ranks allreduce_and_scatter allreduce_bucket
    allreduce_no_retain async_accumulate_grad_in_cpu_via_gpu
    async_inplace_copy_grad_to_fp32_buffer_from_gpu buffered_reduce_fallback check_overflow
    checkpoint_event_epilogue checkpoint_event_prologue clear_backward_seen_flag
    clear_grad_attribute configure_autoep_folding_tp_gradient_reduction copy_grads_in_partition
    create_reduce_and_remove_grad_hooks create_zenflow_hooks defragment dump_post_step_gradients
    dump_pre_step_gradients empty_partition_cache enter_backward fill_grad_accum_attribute
    finalize_gradient_accumulation_boundary flatten_and_print flatten_dense_tensors_aligned
    free_grad_in_param_list get_all_grad_tensors get_bit16_param_group get_data_parallel_partitions
    get_ep_ranks get_first_param_index get_flat_partition get_fp32_grad_for_param
    get_full_hp_param get_grad_position get_gradient_for_reduction
    get_grads_for_norm get_grads_to_reduce get_groups_without_padding get_hp_param_device
    get_lean_optimizer_state get_local_fp32_grad_for_param get_local_fp32_param get_lr
    get_param_comm_dtype get_param_gradient_attribute get_param_id get_partition_info
    gradient_reduction_w_predivide has_overflow has_overflow_partitioned_grads_serial
    has_overflow_serial independent_gradient_partition_epilogue initialize_ds_offload
    initialize_gradient_partition initialize_gradient_partitioning_data_structures
    initialize_optimizer_states invalidate_secondary_tensor is_moe_group load_hp_checkpoint_state
    load_hp_checkpoint_state_from_checkpoint_dir load_hp_checkpoint_state_from_checkpoint_dir_stage3
    load_module_checkpoint_state_from_checkpoint_dir_stage3
    overlapping_partition_gradients_reduce_epilogue override_loss_scale partition_grads print_rank_0
    process_gradients quantize_nontrainable_params queue_post_backward_callback reduce_ipg_grads
    reenter_backward_if_needed register_grad_acc_post_hook report_ipg_memory_usage reset_cpu_buffers
    reset_partition_gradient_structures reset_swap_buffers run_grad_acc_post_hooks
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
    _DeepSpeedEngine__check_params _apply_autotp_partitioning _assert_valid_mixed_precision_config
    _autoep_expert_parameter_names _autoep_non_expert_param_families _autoep_param_family
    _autoep_sequence_parallel_world_size _autoep_zero3_param_converter
    _autoep_zero_optimizer_param_families _autotuning_exit _backward_post_hook _backward_prologue
    _backward_prologue_per_tensor _cast_inputs_half _cast_module_mixed_precision
    _change_recovery_script_permissions _check_for_duplicates _checkpoint_tag_validation
    _cleanup_deepcompile_native _commit_decoupled_checkpoint _common_checkpoint_state
    _configure_autoep_folding_optimizer_gradient_reduction _configure_basic_optimizer
    _configure_bf16_optimizer _configure_checkpointing _configure_compression_scheduler
    _configure_curriculum_scheduler_legacy _configure_distributed_model _configure_eigenvalue
    _configure_expert_parallel _configure_fp16_optimizer _configure_lr_scheduler
    _configure_optimizer _configure_progressive_layer_drop _configure_python_gc
    _configure_quantization _configure_random_ltd_scheduler _configure_tensor_parallel
    _configure_tensor_parallel_states _configure_with_arguments _configure_zero_optimizer
    _create_checkpoint_file _create_module_forward_post_hook _create_module_forward_pre_hook
    _create_zero_checkpoint_files _deactivate_deepcompile _do_args_sanity_check
    _do_optimizer_sanity_check _do_sanity_check _flush_coalesced_reduction_zero12
    _flush_coalesced_reduction_zero3 _forward_epilogue _forward_prologue _get_all_ckpt_names
    _get_all_zero_checkpoint_names _get_all_zero_checkpoint_state_dicts _get_all_zero_checkpoints
    _get_buffer_names _get_ckpt_name _get_expert_ckpt_name _get_gradients_for_reduction
    _get_model_parameters _get_mp_rank_zero_checkpoint_names _get_non_moe_state_dict
    _get_optimizer_loss_scale _get_optimizer_param _get_param_fragment_func _get_param_shape_func
    _get_rank_zero_ckpt_name _get_shared_params _get_zero_ckpt_name _get_zero_ckpt_prefix
    _get_zero_frozen_param_attributes _get_zero_param_shapes _has_autoep_layers
    _initialize_deepcompile_native _is_same_process_group _is_supported_optimizer _load_checkpoint
    _load_zero_checkpoint _make_autoep_folding_metadata _mixed_precision_dtypes _muon_half_defaults
    _muon_param_groups _optimized_linear_offload_setup _optimizer_has_ckpt_event_epilogue
    _optimizer_has_ckpt_event_prologue _partition_autoep_zero3_experts
    _raise_if_autoep_zero3_consolidated_export _reduce_autoep_folding_tp_replicated_gradients
    _reduce_expert_gradients _reduce_non_expert_gradients _refine_include_states
    _release_deepcompile_compiled_backward_state _release_deepcompile_dynamo_config
    _replace_module_consolidated_state_dict _resolve_zero3_param_placement _return_mics_optimizer
    _save_checkpoint _save_zero_checkpoint _scale_loss_by_gas _scheduler_from_config
    _set_client_model _set_deepcompile_active _set_distributed_vars _start_timers _stop_timers
    _supported_optims _update_wall_clock_timers _uses_autoep_zero3_partitioned_experts
    _validate_autoep_folding_checkpoint_metadata _validate_autoep_zero3_partitioned_metadata
    _validate_zero3_moe_compatibility _write_monitor collect_python_gc get_optimizer_configuration
    zero_compute_grad_norm zero_parameter_alignment
    """.split()
)
"""Of the engine, beside those that it has something else for."""

PIPELINE_METHODS = frozenset(
    """
    _aggregate_total_loss _allocate_buffer _allocate_or_extend_buffers _allocate_zeros
    _backward_prologue_per_tensor _bcast_pipe_scalar _bf16_reduce_grads _build _build_data_iter
    _find_layer_type _get_frozen_parameter_names _index_tied_modules _inference_schedule
    _loss_stage_global_rank _next_batch _partition_layers _precompute_checkpointable_values
    _recv_tensor_meta _reduce_outputs _reentrant_activation_checkpointing _send_tensor_meta
    _set_bounds _synchronize_tied_weights _train_schedule
    """.split()
)
"""Of the pipeline's engine and its module."""

SHARDING_METHODS = frozenset(
    """
    _aligned_size _all_gather _allgather_param _allgather_params_coalesced
    _allgather_params_sequential _convert_to_deepspeed_param _convert_to_zero_parameters
    _ensure_availability_of_partitioned_params _get_granularity_recursively _keep_in_fp32
    _padding_size _param_status _partition _partition_gradient _partition_gradients _partition_numel
    _partition_param _partition_param_sec _partition_rank _partition_world_size _post_init_method
    _reduce_scatter_gradient _reduce_scatter_gradients _remove_module_hooks
    _set_leaf_by_threshold_preorder _set_z3_leaf_modules_by_threshold _update_persist_config
    _validate_remote_device _zero_init_param get_param_coordinator mark_persistent_parameters
    partition_all_parameters post_sub_module_backward_function post_sub_module_forward_function
    pre_sub_module_backward_function pre_sub_module_forward_function release_backward_leftovers
    setup_zero_stage3_hooks
    """.split()
)
"""Of `zero.Init` and of what gathers parameters."""

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
