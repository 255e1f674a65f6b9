"""Faults of ZeRO: stages 1 and 2, stage 3, and stage 3 with several instances."""

from unit.mutation.table.fault import faults_of

FAULTS = faults_of(r"""
v1/offload/test_offload_overlap.py -k takes_the_way
  a simulated device reduces in pairs, as hosts do
    is_pairwise: get_accelerator().defers_collectives -> False
  the native optimizer passes a simulated device by
    HostOptimizer._run: get_accelerator().defers_collectives -> False
  masters and gradients on the host are page-locked
    ShardedGroup.empty: get_accelerator().host_empty(numel, dtype, pin) ->
      get_accelerator().host_empty(numel, dtype, self.pin)
v1/zero/test_fix1_ipg_bucket_streams.py -k TestProducerStreams
  no stream is recorded
    reduce_ready_partitions_and_remove_grads: if self.side_stream.has_streams: ... -> pass
v1/zero/test_fix1_ipg_bucket_streams.py -k TestFallback
  no fallback to the current stream
    average_tensor: self.side_stream.wait_for(bucket.copy_streams or
      {self.side_stream.current_stream()}) -> self.side_stream.wait_for(bucket.copy_streams)
v1/zero/test_fix1_ipg_bucket_streams.py -k clear
  clear keeps the streams
    IPGBucket.clear: self.copy_streams.clear() -> pass
v1/zero/test_fix3_grad_norm_one_collective.py -k TestOneCollective
  the offloaded norm is reduced per group
    complete_grad_norm_calculation_for_cpu_offload: return ... -> squared =
      self._squared_norm(group_index, torch.device('cpu')).to(self.device); dist.all_reduce(squared,
      group=self.norm_group); return squared
  the norm stays local
    ZeroMasters.scaled_global_norm: reduce_squared_norm(squares, self.norm_group) -> squares
v1/zero/test_fix3_grad_norm_one_collective.py -k bf16_norm
  squares are summed in bf16
    Squares.zeros: torch.float32 -> torch.bfloat16
v1/zero/test_large_worlds.py -k no_python
  a round for every rank before a gather
    gather_from_owners: own = _part(flat, rank, world) -> own = [_part(flat, one, world) for one in
      range(world)][rank]
v1/zero/test_layout.py -k padding
  a bucket's padding is what was there before
    average_tensor: buffer.tensor[plan.used:plan.numel].zero_() -> pass
v1/offload/test_offload_states.py -k without_an
  weights of an engine without an optimizer leave while they are gathered
    let_leave: unit.put_away() -> pass
v1/zero/test_clients_ways.py -k of_every_stage
  zero.Init cuts a model for a stage that does not gather it
    Init.__init__: str(_zero_block(given).get('stage', 3)) in _STAGE_3 -> True
v1/zero/stage3/test_lifetimes.py -k base_in_bf16
  a frozen base in bf16 becomes fp32 at stage 3
    shard_model: None if dtype == torch.float32 else dtype -> dtype
v1/zero/stage3/test_lifetimes.py -k trained_ones
  an adapter that comes late is trained by nobody, in silence
    _take_in_late: late and self.give_up is not None -> False
v1/zero/stage3/test_lifetimes.py -k frozen_ones
  a frozen layer that comes late keeps each rank's own values
    begin_forward: self._late.may_be_there -> False
v1/zero/stage3/test_vertical.py -k on_the_host
  micro-batches that go together send a bucket in the order in which they have it
    comes_next: self._sent[bucket] == self._number -> True
  micro-batches that go together add up their gradients before they are reduced
    select: self._own = self._leaves[number] -> self._own = self._leaves[0]
  all micro-batches that go together count as not the last one
    select: self._first_step + number -> self._first_step
v1/zero/stage3/test_vertical.py -k in_each_direction
  a unit goes when the first of several micro-batches has used it
    begin_round: self._round = [] -> pass
  a unit goes in backward when the first of several micro-batches is done with it
    leave_round: (unit for each in inside for unit in each.gathered) -> ()
  each micro-batch numbers its nodes from nothing
    Turns._take: _number_from(self._number) -> pass
v1/zero/stage3/test_vertical.py -k inputs_alone
  micro-batches begin a round with numbers that others have
    Turns._take: _number_from(self._number) -> _number_from(self._number // 2)
v1/zero/stage3/test_vertical.py -k on_a_device
  a micro-batch's thread does not say which device is its own
    Turns._thread: accelerator.set_device(device) -> pass
v1/zero/stage3/test_vertical.py -k of_each_micro_batch
  micro-batches that go together draw random numbers in turn
    Turns._take: self._random[self._now].restore() -> pass
  a step takes random numbers from the script
    Turns.run: self._seed is None -> True
  seeds of forwards that go together are those of the last one
    select: self._first_step + number, number -> self._first_step + number, 0
v1/zero/stage3/test_vertical.py -k raises_once
  micro-batches go on when one has failed
    Turns._take: if self._failure is not None: raise _Ended -> pass
  a gradient that belongs to no micro-batch is lost
    refuse_others: param.grad is not None -> False
  buffers are written in the order of turns
    _refuse_written: own._version != version -> False
  a backward inside of loss_fn goes unnoticed
    _forward: engine.tracker.window.is_plain is not None -> False
  the graphs of micro-batches meet
    refuse_shared_nodes: owner is not None or name is not None -> False
v1/zero/stage3/test_vertical.py -k not_go_together
  a script's hook on a parameter is passed by
    _made: sum(len(each or ()) for each in hooks) > own -> False
  a whole step is run inside of no_sync
    _refuse_begun: tracker.in_no_sync or tracker.is_set -> False
v1/zero/stage3/test_vertical.py -k one_after
  a call begins the data anew
    _next: self._batches is None -> True
v1/zero/stage3/test_training.py -k leaves_what
  a unit is let go that a failed gather kept from being taken
    _before_forward: frame.units.append(unit) -> pass
    _before_forward: self._frames.append(frame) -> ...; frame.units += (*self._uses.get(module, ()),
      *external)
  a failed gather counts as whole
    PartitionedParameterCoordinator._use: unit.fetch() -> self.live_numel += added; ...
    PartitionedParameterCoordinator._use: self.live_numel += added -> pass
  a block that was not entered still reads its parameters
    hold_whole: hide(param) -> record_of(param).readers += 1
v1/zero/stage3/test_training.py -k pass_by
  a unit is gathered in backward only where something was computed with it
    _write_down: frame.has_saved or not isinstance(frame.module, nn.Embedding) -> frame.has_saved
v1/zero/stage3/test_uneven.py -k frozen_behind
  a frozen module is gathered in backward on the ranks that have a gradient for it
    _write_down: not frame.carries -> True
  what is small and trained does not count as coming before a frozen module
    _frame_of: plan.is_beside_small -> False
  what is read and trained does not count as coming before a frozen module
    _on_read: self._carries or param.requires_grad -> self._carries
v1/zero/stage3/test_uneven.py -k refused_on_all
  a rank whose parameters are unused raises alone
    refuse_unused: dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group) -> pass
v1/zero/stage3/test_lifetimes.py -k without_an_optimizer
  an edit is not heard without an optimizer
    DeepSpeedZeRoOffload.__init__: self.shard_changed -> None
v1/zero/stage3/test_lifetimes.py -k be_lost_raises
  a weight that a forward changes is what it was in the next one
    GatherUnit.release: _refuse_lost(written) -> pass
  a small weight that a forward changes is what it was after the step
    refuse_holders: unit.refuse_lost_writes() -> pass
v1/zero/stage3/test_lifetimes.py -k around_a_forward
  parameters are hidden when a block ends while their unit is whole
    let_go: record.unit.show_again(param) -> pass
v1/zero/stage3/test_lifetimes.py -k inside_the_block
  a unit that is whole does not follow an edit
    shard_changed: unit.follow(param) -> pass
v1/zero/stage3/test_lifetimes.py -k on_all_ranks
  a rank whose edit would be lost raises alone
    _said_by_all: said_by_all(found, self._sharers()[0], lambda: 'the end of GatheredParameters') ->
      [found]
v1/zero/stage3/test_lifetimes.py -k nothing_has_changed
  what rounding leaves of an undone edit stays in what persists
    _refuse_lost_edits: if _stays_whole(param): ... -> pass
v1/zero/stage3/test_lifetimes.py -k a_small_change_is_lost
  an edit of what another rank owns passes for an undone one
    _refuse_lost_edits: not is_undone(original, after) -> False
v1/zero/stage3/test_lifetimes.py -k with_streams_and_in_a_block
  memory goes back to the allocator before it was read
    MemoryPool._let_go: buffer.wait_for_reads(buffer.made_for) -> pass
runtime/sharding/test_fragments.py -k rows_and_back
  padding of rows is not zero
    RowFiller.fill: list(self._padding) -> []
v1/zero/stage3/test_lifetimes.py -k memory_is_not_kept
  rows of a failed gather are used again
    GatherUnit.start: shared.pool.drop -> shared.pool.give_back
  rows of a gather that nobody can wait for are kept
    GatherUnit._wait: self.resources.pool.drop(rows)\nself._has_no_gather() -> pass
v1/zero/stage3/test_uneven.py -k one_process
  gradients of a unit leave when the last of them comes
    backward_prologue: bool(self.parameter_offload.units) -> False
v1/zero/stage3/test_uneven.py -k other_ways
  gradients of a unit leave before those of its earlier use
    _is_used_before: self._has_forgotten or any(...) -> False
  a backward that the engine does not run ends at another place on each rank
    come_to: engine.queue_callback(lambda: self._end_task(task)) -> pass
v1/zero/stage3/test_uneven.py -k recomputation
  a recomputation runs ahead of what comes before it
    _come_to_recomputation: self.come_to((forward, index)) -> pass
v1/zero/stage3/test_uneven.py -k leave_during
  gradients of all units leave at the end of backward
    _send_unit: self._units_readiness.release(index) -> False
v1/moe/test_moe_contract.py -k stage_3
  experts of stage 3 are cut for all ranks
    shard_model.cut: sharers(param) -> instances
  gradients of experts of stage 3 are cut for all ranks
    buckets_of: unit.table.num_shards -> groups[0].num_shards
v1/zero/stage3/test_uneven.py -k under_init
  zero.Init hands out shards of another shape on each rank
    Init.cut_own: agree_on_parameters -> print
v1/zero/stage3/test_fusion.py -k waits_for_what_reads
  an update does not wait for a stream that reads the shard
    GatherResources.before_update: get_accelerator().current_stream().wait_stream(stream) -> pass
v1/zero/stage3/test_fusion.py -k one_at_a_time
  a unit that several modules share stays when others are used
    PartitionedParameterCoordinator._use: not unit.is_fused or any((last.name != unit.name for last
      in self._last_fused)) -> not unit.is_fused and False
v1/zero/stage3/test_fusion.py -k own_stream
  a module whose unit others share does not wait on its own stream
    PartitionedParameterCoordinator.enter: unit.fetch() -> pass
v1/zero/stage3/test_fusion.py -k equals_one_process
  what a recomputation has used goes when another unit is used
    _end_fused: [unit for unit in units if unit not in self._recomputed] -> units
  what a recomputation has used goes after the first of its uses
    _close: self.coordinator.is_recomputed(unit) and self._is_used_before(forward, unit, use) ->
      False
v1/zero/stage3/test_fusion.py -k between_steps
  a unit that several modules share goes when one of them is done
    _retire: unit in self._last_fused -> False
v1/zero/stage3/test_lifetimes.py -k TestOrder
  only what fits into the key as a whole is gathered ahead
    UseOrder.ahead: sums[self._named] - sums[now] < numel -> sums[self._named + 1] - sums[now] <=
      numel
  the first backward gathers nothing ahead
    PartitionedParameterCoordinator.foresee: self._start(unit) -> 0
  what is in use leaves no room for the next unit
    PartitionedParameterCoordinator._start: self._ahead or unit.numel > self._max_live_numel -> True
  what stays for reuse leaves no room for the next unit
    PartitionedParameterCoordinator._start: self._make_room(unit.numel) -> 0
  the next unit is gathered whatever the limit
    PartitionedParameterCoordinator._start: unit.numel > self._max_live_numel -> False
v1/offload/test_stage3_offload.py -k PartsOnStreams
  a bucket is filled anew while the part of it that goes to the host is on its way
    _take_in: event if event is not None else read -> event
v1/offload/test_offload_states.py -k streams
  shards that have come back are gathered before they are there
    have_back: offload.resources.mark_updated() -> pass
  a unit's own copy of shards that left is not the one that came back
    _weights: yield from pair -> yield pair[0]
v1/offload/test_stage3_offload.py -k half_precision_with
  the part of an optimizer that stays on the device is scaled and decayed as at first
    DevicePart.step: {key: theirs[key] for key in self._host.defaults if key in mine} -> {key:
      theirs[key] for key in ()}
v1/zero/stage3/test_modules.py -k copies_of_shards
  a copy of a sharded parameter has the same shard
    _sharded_copy: of.shard.clone() -> of.shard
v1/zero/stage3/test_hybrid.py -k test_init
  each instance of stage 3 starts with the values of its own first rank
    _cut: across is not None and shard.numel() -> False
  zero.Init cuts for all ranks what instances share
    _instances: instances_at_stage_3(count, size, ranks) -> 1
v1/zero/stage3/test_hybrid.py -k edits_reach
  an edit stays in the instance of the rank that made it
    publish: record_of(same[0]).instances.everyone -> record_of(same[0]).group
    publish: dist.get_world_size(group=group) > 1 and flat.numel() -> source in
      dist.get_all_ranks_from_group(group)
v1/zero/stage3/test_hybrid.py -k disagree
  instances of stage 3 do not compare what they enter with
    _sharers: record_of(param).instances.everyone -> record_of(param).group
v1/zero/stage3/test_hybrid.py -k between_passes
  copies of gathered shards outlive a pass
    release_all: unit.forget_secondary() -> pass
  copies of gathered shards outlive an edit
    before_write: self.forget_secondary() -> pass
v1/zero/stage3/test_hybrid.py -k one_process
  copies of gathered shards are those of another rank
    SecondaryShards.__init__: dist.get_rank(group=group) -> 0
v1/zero/stage3/test_hybrid.py -k collectives
  backward gathers over all ranks though there are copies
    SecondaryShards.keep: self._is_wanted, self._is_right = (False, True) -> self._is_wanted = False
  rows are kept before they are gathered
    GatherUnit._issue: pending.wait() -> pass
    GatherUnit._issue: self._keep(rows) -> ...; pending.wait()
v1/zero/stage3/test_hybrid.py -k nobody_came
  a shard is updated that a gather begun ahead still reads
    before_update: get_accelerator().current_stream().wait_event(self.last_gather) ->
      get_accelerator().current_stream()
  masters that gathers read are updated at once
    CutMasters.update: resources.before_update() -> 0
""")
