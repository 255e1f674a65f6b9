"""Resharding: what the ranks of one run saved, made into what the ranks of another run need.

Data-parallel ranks hold *shards* of the optimizer's state, tensor-parallel ranks *slices* of
parameters, stages and expert ranks some of the parameters. A part of a parameter in a shard is a
*fragment*. From files to a rank, each step in a module that knows nothing of those after it:

    checkpoint.file_names, files        which files hold what, and their content
    cuts                                how the run that saved them divided the model
    saved_optimizer.SavedOptimizer      one tensor-parallel rank's state, in fragments by name
    saved_weights.SavedWeights          weights of one tensor-parallel rank by name
    tensor_parallel.SlicePatterns       slices of a parameter, put together to the whole
    consolidation                       all of that: every parameter whole
      .ConsolidatedCheckpoint
    universal.UniversalCheckpoint       the same of a universal checkpoint, of whole parameters
    tensor_parallel.slice_of_rank       a whole parameter, sliced again
    rank_slices.RankSlices              all slices of one rank, in fragments like saved ones
    runtime.checkpointing
      .optimizer_resharding             fragments of either kind, copied to this rank's shard
      .weight_resharding                slices, as weights of this rank's model

A run with other data-parallel ranks, stages or expert ranks goes from `SavedOptimizer` to
`optimizer_resharding` at once: no parameter is ever whole. With another number of tensor-parallel
ranks, and of universal checkpoints, parameters are consolidated one by one. `ds_to_universal` ends
there and writes them.

Files are mapped, nothing communicates, and nothing here changes a model.
"""
