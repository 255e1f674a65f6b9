"""Faults to put into the package, and the guard of `deepspeed.verify` that must find each.

Unlike those of `unit.mutation.table`, which a regression test must notice, these must be found by
the tools that users run, in a scenario of `unit.verify.scenarios`, and what the tool says must name
the right place.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from unit.mutation.table.fault import Fault, rows_of


@dataclass(frozen=True)
class Mutation(Fault):
    """A fault and how it comes to light: `test` is a scenario, whose first word is the guard."""

    names: str  # what one of the findings must say, as a regular expression over its lines

    @property
    def guard(self) -> str:
        """Which tool must find it."""
        return self.test.partition(":")[0]


def mutations_of(table: str) -> Iterator[Mutation]:
    """The mutations of a table, whose names are `fault => what a finding says`."""
    for said, changes, scenario in rows_of(table):
        name, _, names = said.partition(" =>")
        yield Mutation(name, changes, scenario, names.strip())


MUTATIONS = tuple(
    mutations_of(r"""
streams: stage 2
  no wait for the producers => never waits for <.*which wrote.*gradient of(.|\n)*average_tensor
    average_tensor: self.side_stream.wait_for(bucket.copy_streams or
      {self.side_stream.current_stream()}) -> pass
  a hook records the default stream =>
      never waits for <.*which wrote.*gradient of(.|\n)*average_tensor
    reduce_ready_partitions_and_remove_grads:
      bucket.copy_streams.add(self.side_stream.current_stream()) -> from deepspeed.accelerator
      import get_accelerator; bucket.copy_streams.add(get_accelerator().default_stream())
  no stream is recorded => never waits for <.*which wrote.*gradient of(.|\n)*average_tensor
    reduce_ready_partitions_and_remove_grads: if self.side_stream.has_streams: ... -> pass
  only the last producer is recorded =>
      never waits for <.*which wrote.*gradient of(.|\n)*average_tensor
    reduce_ready_partitions_and_remove_grads:
      bucket.copy_streams.add(self.side_stream.current_stream()) -> bucket.copy_streams =
      {self.side_stream.current_stream()}
  the bucket is filled on the hook's stream =>
      never waits for <.*which wrote.*gradient of(.|\n)*average_tensor
    SideStream.issue: return get_accelerator().stream(self.stream) -> return nullcontext()
  producers do not wait for the copy => (?i)freed(.|\n)*_fill
    average_tensor: self.side_stream.release(producers) -> pass
  the step does not wait for the reduction => gradient shard of group(.|\n)*local_squared_norm
    SideStream.join: get_accelerator().current_stream().wait_stream(self.stream) -> pass
  a reduced piece is used before its reduction => never waits for <nccl stream
    PendingShards.wait: work.wait() -> pass
  gathered parameters are not awaited => never waits for <nccl stream.*flat parameters
    Publisher.finish: self._gathers.popleft().wait -> self._gathers.popleft
streams: stage 1, no overlap
  no fallback to the current stream =>
      never waits for <.*which wrote.*gradient of(.|\n)*average_tensor
    average_tensor: self.side_stream.wait_for(bucket.copy_streams or
      {self.side_stream.current_stream()}) -> self.side_stream.wait_for(bucket.copy_streams)
streams: static gradients
  a gradient is written again while it is copied =>
      race: <default stream> never waits for <reduction stream>, which read(.|\n)*_fill
    average_tensor: self.side_stream.release(producers) -> pass
streams: stage 1
  one of several producers waits for the copy => (?i)freed(.|\n)*_fill
    average_tensor: self.side_stream.release(producers) ->
      self.side_stream.release(sorted(producers, key=str)[:1])
streams: stage 2, no overlap
  producers wait for what came before the copy => (?i)freed(.|\n)*_fill
    average_tensor: self.side_stream.release(producers) -> pass
    average_tensor: payload = self._fill_buffer(buffer, index, grads) ->
      self.side_stream.release(producers); ...
streams: checkpoints on the host
  an input is dropped before its producer waits => (?i)freed(.|\n)*_kept_on_host
    _let_go: stream.wait_event(oldest.event) -> pass
streams: stage 2 on a side stream
  the default stream waits for the reduction => gradient shard of group(.|\n)*local_squared_norm
    SideStream.join: get_accelerator().current_stream -> get_accelerator().default_stream
streams: BF16_Optimizer
  an all-reduced accumulator is not awaited =>
      never waits for <nccl stream.*group(.|\n)*all_reduce_flat
    finish_all_reduce: flight.work.wait() -> pass
streams: BF16_Optimizer, from hooks
  a bf16 hook works on another stream => never waits for <.*gradient of(.|\n)*absorb_one
    Accumulated._arrived: self.accumulator.absorb_one(group_index, index, 1.0 / divisor) -> from
      deepspeed.accelerator import get_accelerator\nwith
      get_accelerator().stream(get_accelerator().default_stream()): ...
streams: stage 2, offload
  the host reads a slice before its copy => the host never waits(.|\n)*_accumulate
    HostSink._land: event.synchronize() -> pass
streams: stage 1, bf16, Adam on the host
  a staging buffer is written while its copy is on its way =>
      the host never waits(.|\n)*(_run|_rule|_deliver)
    StagingBuffers.take: event.synchronize() -> pass
streams: stage 0, overlapped
  stage 0 sends a bucket without waiting for its producers =>
      never waits for <backward stream.*which wrote(.|\n)*_send
    Replicated._send: streams.wait_for(self._producers[bucket]) -> pass
  stage 0 does not wait for its buckets => never waits for <(reduction|nccl) stream
    Replicated._finish: self._streams.join() -> pass
streams: state in files, 1 rank
  a window is updated before it is read =>
      the host never waits for <file lane.*which wrote.*window(.|\n)*_begin(.|\n)*_rule
    Windows._enter: self._slots[number % NUM_WINDOWS].handle.wait() -> pass
  a window is read before the one that it takes the place of is written =>
      never waits for <file lane.*which read.*window(.|\n)*_leave(.|\n)*_begin
    Windows._begin: slot.handle.wait() -> pass
  state is looked at before its last windows are written =>
      never waits for <file lane.*which wrote.*shard(.|\n)*_leave(.|\n)*safe_get_full
    Windows.__exit__: wait_for_all(slot.handle for slot in self._slots) -> pass
  only the first window is waited for at the end =>
      never waits for <file lane.*which wrote.*shard(.|\n)*_leave(.|\n)*safe_get_full
    Windows.__exit__: self._slots -> self._slots[:1]
  all windows have the first one's memory => never waits for <file lane.*window 0 of state
    Windows._places: self._slots[number % NUM_WINDOWS] -> self._slots[0]
  the last window is written when nobody waits any more =>
      never waits for <file lane.*which wrote.*shard(.|\n)*_leave(.|\n)*safe_get_full
    Windows.__exit__: if error is None: self._leave() -> pass
    Windows.__exit__: wait_for_all(slot.handle for slot in self._slots) -> ...; self._leave()
  a window is read by another one's handle =>
      the host never waits for <file lane.*which wrote.*window(.|\n)*_begin
    Windows._begin: slot.handle.async_pread(memory, file, offset) -> self._slots[number - 1 - number
      // NUM_WINDOWS * NUM_WINDOWS].handle.async_pread(memory, file, offset)
  every window is the first of its file =>
      <file lane \d+> never waits for <file lane \d+>, which (read|wrote) bytes 0
    Windows._places: number * WINDOW_NUMEL * tensor.dtype.itemsize -> 0
  a window begins where the one before does =>
      <file lane \d+> never waits for <file lane \d+>, which wrote bytes
    Windows._places: number * WINDOW_NUMEL * tensor.dtype.itemsize -> max(0, number - 1) *
      WINDOW_NUMEL * tensor.dtype.itemsize
  the next window is updated in place of this => the host never waits for <file lane.*window
    Windows.of: self._slots[number % NUM_WINDOWS] -> self._slots[(number + 1) % NUM_WINDOWS]
  tensors of a window share its memory =>
      <file lane \d+> never waits for <file lane \d+>, which wrote.*window
    _Slot.bytes_of: self.memory[index] -> self.memory[0]
  there is memory for one window alone => the host never waits for <file lane.*window 0
    StateFiles.windows: self._slots.append(_Slot(self.make_handle())) ->
      self._slots.append(self._slots[0] if self._slots else _Slot(self.make_handle()))
  all state is written to the file of masters =>
      <file lane \d+> never waits for <file lane \d+>, which wrote.*shard
    StateFiles.windows: file_of(one) -> file_of(to[0])
streams: fp32 state in files, 1 rank
  masters are sent while they are written =>
      the host never waits for <file lane.*which wrote.*shard(.|\n)*_leave
    Windows._leave: places if self.writes_first else places[1:] -> places
  what is read ahead is cleared => the host never waits for <file lane.*which read.*shard
    _deliver_by_windows: update.param.view(-1)[first:last].copy_(param) -> ...;
      update.param.view(-1)[last:].zero_()
streams: state in files ahead, 1 rank
  a window is updated ahead before it is read =>
      the host never waits for <file lane.*which wrote.*window(.|\n)*run_windows_apart
    Windows._enter: self._slots[number % NUM_WINDOWS].handle.wait() -> pass
streams: files by handles, 1 rank
  a handle waits for the first of several =>
      never waits for <file lane.*(.|\n)*write of .*/other on(.|\n)*by_handles
    AsyncIOHandle.wait: wait_for_all(pending) -> wait_for_all(pending[:1])
  a handle waits for nothing => never waits for <file lane.*(.|\n)*async_p(.|\n)*by_handles
    AsyncIOHandle.wait: wait_for_all(pending) -> pass
  a handle does not note what it has begun =>
      never waits for <file lane.*(.|\n)*async_p(.|\n)*by_handles
    AsyncIOHandle._begin: self._pending.append(operation) -> pass
  a handle forgets what it has begun when it begins more =>
      never waits for <file lane.*(.|\n)*async_p(.|\n)*by_handles
    AsyncIOHandle._pool: self._threads is None or self._process != os.getpid() -> True
  a synchronous write returns at once =>
      never waits for <file lane.*which read(.|\n)*sync_pwrite(.|\n)*by_handles
    AsyncIOHandle._begin: operation.wait() -> pass
  a file is closed before its last bytes are written =>
      <file lane.*which wrote bytes .* of file .*/two(.|\n)*close(.|\n)*sync_pread
    FastFileWriter.close: self._handle.wait() -> pass
ledger: stage 2
  an absent gradient leaves what was in the bucket => never|sometimes
    Bucketed._fill: torch._foreach_zero_(absent) -> pass
  the first write adds to the last step's gradient => weight
    DeviceSink.add: bucket not in self.written -> False
  a bucket is sealed early => (?i)late
    ReadinessTracker.mark: self._missing[self._next] == 0 -> self._missing[self._next] <= 1
  a bucket is used again while it is sent => weight|bias
    average_tensor: self.side_stream.join_unless_overlapped() -> ...;
      self.buffers.free.append(buffer)
ledger: stage 0, no accumulation
  an absent gradient leaves what was in the flat buffer => sometimes
    collect_some: torch._foreach_zero_(absent) -> pass
ledger: stage 1
  a reduced piece is added twice => (?i)twice|doubled|instead of
    Bucketed._finish: read = self._take_in(reduction, pieces) -> ...; self._take_in(reduction,
      reduction.pending.wait())
  divided by the number of ranks twice => (?i)divided
    factors: post / accumulation_divisor -> ... / self.world
ledger: BF16_Optimizer
  the boundary micro-batch never joins => (?i)lost(.|\n)*micro-batch
    backward_epilogue: self.update_hp_grads() -> if not self.context.tracker.is_boundary:\n    ...
  reduced before the epilogue => (?i)lost(.|\n)*micro-batch|late
    _backward_epilogue: sequence.backward_epilogue() -> pass
    _backward_epilogue: self._exit_backward(sequence) -> sequence.backward_epilogue(); ...
  the accumulator is not cleared => weight
    clear_hp_grads: self.accumulator.clear() -> pass
ledger: stage 1, no overlap
  the last bucket is not sent => (?i)lost
    reduce_gradients: self.hooks.readiness.remaining() -> list(...)[:-1]
ledger: stage 2, 2 instances
  instances keep their gradients to themselves => (?i)wrong group|ranks
    _reduce_between_instances: self.instances.across is None -> True
intent: stage 2
  one rank skips the norm's reduction => (?i)all_reduce(.|\n)*reduce_squared_norm
    ZeroMasters.scaled_global_norm: return ... -> if dist.get_rank() == 0:
      reduce_squared_norm(squares, self.norm_group)\nreturn self._norm_of(squares)
  buckets leave as they are ready => (?i)do not agree(.|\n)*_start_reduction
    ReadinessTracker.mark: range(first, self._next) -> range(bucket, bucket + (not
      self._missing[bucket]))
intent: stage 1
  one rank skips a bucket => _start_reduction
    reduce_gradients: self.hooks.readiness.remaining() -> list(...)[dist.get_rank():]
oracle: fp16
  unscaled with the next scale => weight is off
    _used_scale: return float(self._scaler.loss_scale) -> import copy; after =
      copy.copy(self._scaler); after.update_scale(False); return float(after.loss_scale)
oracle: stage 1
  parameters are not gathered => weight is off
    _gather: group.num_shards == 1 -> True
oracle: BF16_Optimizer
  masters are not written back => weight is off
    Publisher.updated: not self._rounded and (not group.aliased) -> False
simulator: schedules
  a gradient is not received => before RecvGrad has written it\n *at stage 0, step
    _lower: kind in (BackwardPass, BackwardInputPass) and part < self._last_part -> ... and
      (micro_batch != 2)
  a gradient is sent before its backward =>
      before BackwardPass .*\n *at stage [1-3], step \d+, SendGrad
    _lower: self._sends.append(SendGrad(buffer_id, micro_batch=micro_batch, chunk=chunk)) ->
      step.insert(-1, SendGrad(buffer_id, micro_batch=micro_batch, chunk=chunk))
engine: pipe
  activations are not received => empty pipeline buffer(.|\n)*no load or receive
    _exec_recv_activations: self.pipe_buffers[buffer_id].fill(channel.recv()) -> if micro_batch ==
      2:\n    return\n...
  an activation buffer is used again early => reuses it early
    _reserve_pipe_buffers: [PipeBuffer() for _ in range(num_buffers - len(self.pipe_buffers))] ->
      [PipeBuffer()] * (num_buffers - len(self.pipe_buffers))
intent: pipe
  sends are reordered =>
      message number 0 (.|\n)*_send_piece(.|\n)*_receive_piece|message number 0
      (.|\n)*_receive_piece(.|\n)*_send_piece
    Channel.send: if is_first or self.dynamic: ... -> pass
    Channel.send: self._send_tensors(spec.tensors, tensors) -> ...\nif is_first or self.dynamic:
      self._send_description(spec)
  an activation is not sent => irecv(.|\n)*_receive_piece
    _exec_send_activations: channel.send(buffer.outputs) -> if micro_batch != 2:\n    ...
intent: pipe, zero bubble, bf16
  gradients are received into fp32 buffers => do not agree on message number 0 (.|\n)*_receive_piece
    keep_roots: torch.empty_like(tensor, device='meta', requires_grad=False) ->
      torch.empty_like(tensor, device='meta', requires_grad=False, dtype=torch.float32)
device: pipe
  the timer waits for the device =>
      waits for the whole device at\n.*timer.py:\d+ in begin_span(.|\n)*irecv from rank 0 is
      posted(.|\n)*_receive_piece
    begin_span: event = accelerator.Event(enable_timing=True) -> accelerator.synchronize(); ...
device: pipe, waiting host
  a receive is posted too early =>
      wait for work that depends on work which they have not
      issued(.|\n)*work._event.synchronize\(\)(.|\n)*for irecv from rank 0, which was issued at
    _Lane.post: self._coming[0][1] <= self._issued -> True
oracle: pipe
  messages are taken in another order => loss .* is not
    Channel.recv: posted = self._taken() -> self._posted.rotate(); ...
  replicas of tied weights count in the norm => norm .* is not
    norm_selection.counts: if getattr(param, 'ds_pipe_replicated', False): ... -> pass
ledger: pipe
  a tied gradient is summed twice =>
      doubled: summed over the parts of the model that share it twice; 1 parameter\(s\):
      tied_modules.embed.weight
    _exec_reduce_tied_grads: dist.all_reduce(sequence.local_gradient(param), group=group) -> ...;
      ...
  the last micro-batch is skipped =>
      lost: the backward of micro-batch 4 of 4 never ran on rank\(s\) \[0, 1\]
    _training_plan: schedule.make_schedule(self._schedule_name, count, self.num_stages, stage,
      chunks) -> schedule.make_schedule(self._schedule_name, count - 1, self.num_stages, stage,
      chunks)
  the loss is not divided => not divided by the accumulation steps(.|\n)*1.linear.weight
    _backward_roots: self._losses.scaled(sequence, buffer.loss, True) ->
      self._losses.scaled(sequence, buffer.loss, False)
ledger: pipe, stage 1, 4 ranks
  a tied gradient stays on its stage =>
      not summed over the parts of the model that share it: each has its own; 1 parameter\(s\):
      tied_modules.embed.weight
    _exec_reduce_tied_grads: dist.all_reduce(sequence.local_gradient(param), group=group) ->
      sequence.local_gradient(param)
  a tied gradient leaves before it is summed => tied_modules.embed.weight
    PipelineEngine.__init__: self._sequence.hold(...) -> self._sequence.hold(())
ledger: pipe, zero bubble, bf16
  weights miss a micro-batch => lost: the backward of micro-batch 2 of 4 never ran
    _exec_backward_weight_pass: buffer.split is not None and (not buffer.split.is_whole) -> ... and
      (micro_batch != 1)
intent: pipe, uneven groups
  the norm is reduced per group => scaled_global_norm|reduce_squared_norm
    scaled_global_norm: squares[index] += local_squared_norm(own, self.device, others).squeeze() ->
      ...; squares[index] = reduce_squared_norm(squares[index].clone(), self.norm_group)
    ModelParameters.scaled_global_norm: reduce_squared_norm(squares, self.norm_group) -> squares
ledger: experts, 4 ranks
  experts are divided by their holders only =>
      divided by the number of ranks that hold it \(2\) instead of all(.|\n)*deepspeed_experts
    reduce_gradients: super()._tell_settled(self.read_factor) -> from deepspeed import comm as
      dist\nfor gradients, group in zip(self.reduction.gradients,
      self.reduction._replicas):\n    world =
      dist.get_world_size(group=self.dp_process_group)\n    gradients.flat.mul_(world /
      dist.get_world_size(group=group))\n...
  experts are reduced over the dense group =>
      reduced together with other ranks' parameters of the same name(.|\n)*deepspeed_experts
    GradientContext.replicas: expert_group is None -> True
streams: pipe
  a gradient is sent before it is complete => never waits for(.|\n)*_exec_send_grads
    _exec_send_grads: channel.send_like(buffer.input_grads()) -> from deepspeed.accelerator import
      get_accelerator\nwith get_accelerator().stream(get_accelerator().Stream()): ...
  a message is used before it is there => never waits for <nccl stream.*from rank
    _complete: self._wait(work) -> pass
  all messages arrive in one buffer => race(.|\n)*_receive_piece
    _post_tensors: posted.arrival = wire.layout_of(plain).allocate(self._wire_device) -> self._one =
      getattr(self, '_one', None) or wire.layout_of(plain).allocate(self._wire_device);
      posted.arrival = self._one
oracle: pipe on the device
  a message is used before it is there, seen by the numbers => is off by|is not
    _complete: self._wait(work) -> pass
streams: stage 3
  a shard is gathered before it is updated => never waits for
    GatherResources.loading: stream.wait_event(self.shards_updated) -> pass
  rows are copied out before they are gathered => never waits for(.|\n)*copy_out
    GatherUnit._finish: current.wait_event(done) -> pass
  a buffer of the pool is handed out early => never waits for
    MemoryPool.take: buffer.wait_for_reads(current) -> pass
  a second stream does not wait for the copy-out => never waits for(.|\n)*_finish(.|\n)*forward
    GatherUnit.fetch: stream.wait_event(self._memory.filled) -> pass
  whole memory goes back without its readers => never waits for(.|\n)*forward(.|\n)*copy_out
    GatherUnit.forget: self.resources.pool.give_back(self._memory, self._readers) ->
      self.resources.pool.give_back(self._memory)
  rows go back without their readers => never waits for(.|\n)*copy_out(.|\n)*in start
    GatherUnit._finish: shared.pool.give_back(rows, () if current is None else (current,)) ->
      shared.pool.give_back(rows)
streams: stage 3, on the host, 1 rank
  a unit is gathered before its shard has come from the host =>
      never waits for(.|\n)*<parameter load stream>|parameter load stream(.|\n)*never waits for
    GatherResources.loading: self.gather.stream.wait_event(self._last_load) -> pass
  the host updates a shard that is still being loaded =>
      the host never waits for <parameter load stream>
    before_write: self._last_load.synchronize() -> pass
  a row is loaded that a copy-out still reads => never waits for
    MemoryPool.take: buffer.wait_for_reads(current) -> pass
streams: stage 3, on the host, masters on the device, 1 rank
  the device updates a shard that is still being loaded => never waits for <parameter load stream>
    before_update: get_accelerator().current_stream().wait_event(self.last_gather) -> pass
oracle: stage 3 on the device
  autograd keeps memory that is given away => stage 3:
    SavedTensors._pack: buffer is None -> True
  rows are filled in another order => stage 3: after step 0 are off
    RowFiller.fill: torch._chunk_cat([*joined, *tail], 0, len(self._matrix), out=self._matrix) ->
      torch._chunk_cat([*joined[::-1], *tail], 0, len(self._matrix), out=self._matrix)
oracle: stage 3, all persist
  what persists is not gathered after a step => stage 3:
    after_update: self.gather_persistent() -> pass
oracle: stage 3
  the last cut is left out of the rows => stage 3:
    RowFiller.fill: filling.rest is not None -> False
  an absent gradient is what was there => stage 3:
    RowFiller.fill: zeros.append(self._columns[filling.param]) -> pass
  a parameter read elsewhere is not gathered => stage 3:
    _on_read: self.param_coordinator.enter([unit]) -> pass
  copied shards do not follow an update => stage 3: after step 0 are off: .*blocks\.0\.up\.weight
    _copy_to_units: if self.copied: ... -> pass
  a hold is dropped early => stage 3: .*gate\.weight is sharded
    _retire: unit.holds -> False
  what was gathered ahead has an edited parameter's old value =>
      stage 3: after step \d are off: evaluation
    drop_ahead: self._release(unit) -> pass
  an edit is shown and not kept => stage 3: after step \d are off: blocks\.0\.up\.weight
    publish: record_of(param).write(param.data) -> pass
  an edit does not reach the masters => stage 3: after step \d are off: blocks\.
    _tell_units: record.on_edit(param) -> pass
  shards are put together in another order of ranks => stage 3: .*(inlet|blocks)
    copy_out: rows.view(self._num_shards, -1) -> ....flip(0)
  the norm is that of one shard => stage 3: after step 0 are off: norm by [^,]*$
    ZeroMasters.scaled_global_norm: reduce_squared_norm(squares, self.norm_group) -> squares
oracle: stage 3, kept
  what is gathered stays over a step => stage 3: unit \S+ was gathered before update 1
    before_update: self.param_coordinator.release_all() -> pass
ledger: stage 3
  gradients of a unit are not sent when backward is done with it =>
      lost: micro-batch 1 of 1 of every rank never arrived
    _send_unit: self._send_incomplete(index) -> pass
streams: stage 3, some persist
  an edited shard is gathered while it is written => never waits for(.|\n)*on_edit(.|\n)*in start
    CutMasters.on_edit: self.parameter_offload.shard_changed(param) -> pass
streams: gathered beside forward
  a module does not wait for its parameters => never waits for <nccl stream(.|\n)*gather_scenarios
    ParameterDict.__getitem__: getattr(type(param), 'ds_was_read', None) -> None
  readers wait for what came before the gather => never waits for <nccl stream
    ParameterArrivals.begin: gather().wait -> gather
streams: gathered beside forward, two streams
  a second stream does not wait => never waits for <nccl stream(.|\n)*on_two_streams
    Arrival.wait: stream not in self._waited -> not self._waited
streams: gathered beside forward, read elsewhere
  a read outside of modules does not wait => never waits for <nccl stream(.|\n)*in kept
    PendingParameter.__torch_function__: func not in _NO_READ -> False
streams: gathered beside forward, bf16
  a gather does not wait for the update => never waits for <default stream>
    ParameterArrivals.begin: self._gather.wait_for([self._gather.current_stream()]) -> pass
""")
)
