"""Faults of experts and of layers that are cut over ranks."""

from unit.mutation.table.fault import faults_of

FAULTS = faults_of(r"""
v1/moe/test_auto_ep.py -k equals
  a rank without tokens for its experts stays away from exchange and reduction
    run_on_owners: rows + nothing.to(rows.dtype) -> rows
  experts of stage 3 are shared by ranks that hold others
    sharers: ranks.holders(param) -> ranks.replicas
  the norm counts experts as if all ranks held them
    scaled_global_norm: local(group_index).squeeze() -> ... * group.num_shards / self.num_shards
v1/checkpoint/test_stage3_experts.py -k by_name
  a frozen expert of stage 3 is put together, or exported, of all ranks' shards
    share_and_place: self._sizes.get(prefix, 1) -> 1
v1/checkpoint/test_stage3_experts.py -k export
  the experts of other ranks are saved under the numbers of neighbours
    names_of_all: share * held -> share
  experts start with the buffers of the first rank's
    broadcast_model: holders = of_experts.setdefault(layer, holders) -> pass
v1/moe/test_stage3_init.py -k built_plainly and turns
  experts that zero.Init cuts have the first rank's weights
    _Construction.on_read: self.draws.of(param) -> None
  zero.Init cuts experts for all ranks
    _sharers: expert_group_of(param) -> None
v1/moe/test_stage3_init.py -k edits
  what a script makes of an expert is published by the modifier of others
    _modified: has[group] -> True
v1/moe/test_auto_ep.py -k files
  experts of zero.Init stand whole until the last is spread
    cut_anew: cut_parameters(cut, sharers) -> pass
v1/tensor/test_autotp.py -k Architectures
  a norm of heads is trained by the heads of its rank
    _explain: plan.partial.append(name) -> pass
  the input of a column-parallel layer has the gradient of its rank's columns
    _SumGradient.backward: dist.all_reduce(total, group=ctx.ranks.group) -> pass
  queries, keys and values in one weight are cut as one
    own_part: own_slice('', whole, sizes, dim, share) -> own_slice('', whole, whole.shape[dim:dim +
      1], dim, share)
  every rank has the alibi of the first one's heads
    OwnAlibi.__call__: by_head[:, ...] -> by_head[:, :self.share.own]
  ranks that share layers start from weights of their own
    cut_by: (*whole, *model.buffers()) -> ()
  slices are counted in the norm by the first rank
    _keep_own: param.tensor_model_parallel = True -> param.tensor_model_parallel = False
v1/tensor/test_autotp_structure.py
  the width of queries' heads is that of keys with other heads
    head_size: pairs or num_outputs(keys) // width -> num_outputs(keys) // width
  gates and ups in one layer of another's name are paired with each other
    _plan_scope: _check_widths(by_name, problems) -> pass
  what is not known in a block is left whole between layers that are cut
    plan_of: _explain(plan, model, partition, problems) -> pass
  gathered outputs have the gradient of the first rank's
    _GatherOutputs.backward: ctx.ranks.rank -> 0
  an embedding's weight is cut with the head that it is tied to
    plan_of: _leave_whole(plan, model) -> pass
  a model's plan comes before the families that are known
    plan_of: partition is None and family not in FAMILIES -> partition is None
  a plan's parameter that acts on what is cut keeps its rank's gradient
    _explain: is_of_head or (is_inside and spec is not None and spec.is_partial) -> is_of_head
v1/tensor/test_autotp_ranks.py
  ranks that share layers train on different batches
    SameInputs._check: any(found) -> False
  ranks that share layers drop out different activations
    SameInputs.__init__: self._share_random_states() -> pass
  an input's gradient is read before the ranks have summed it
    _OverlappedLinear.backward: work.wait() -> pass
v1/tensor/test_autotp.py -k uneven
  queries are dealt out without their keys
    _plan_scope: replace(cut, pieces=pieces) -> cut
  slices are gathered as if all were as large as the first
    SlicePatterns.shapes: share.own -> shares[0].own
  a checkpoint of uneven slices is cut evenly
    slice_of_rank: entry.get(keys.PIECES, size) -> size
  stage 3 puts slices together in the order of each rank's own units
    whole_parameters: if slices is not None: ... -> pass
v1/tensor/test_autotp.py -k Stage3
  stage 3 cuts slices over ranks that have others
    shard_model: ranks.parallel_map.optimizer_instances(zero.num_optimizer_instances) ->
      OptimizerInstances(dist.get_world_group())
  stage 3 leaves other ranks' slices out of the norm
    _steps: ranks.norm_group -> ranks.replicas
  stage 3 counts a parameter in the norm on every rank that shares layers
    _steps: ranks.counts_shard -> None
  stage 3 exports the first rank's slices
    whole_parameters: slices.put_together(_name_of(param), param.data) -> param.data
  frozen slices of stage 3 are read from the first rank's files
    _read_sharded: weights = read_shard_weights(...) -> weights = read_shard_weights(files, folder,
      model, slices, wanted, options.load_module_strict, 0)
  a universal checkpoint of stage 3 has the model file of one part
    _copy_files: state.weights_of_ranks() -> list(...)[:1]
v1/tensor/test_tensor_parallel.py -k do_not_wait
  stage 3 lets a block's gradients wait for norms that are summed over ranks
    buckets_of: has_parts(param) -> False
""")
