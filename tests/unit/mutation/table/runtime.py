"""Faults of what one device computes: gradients, optimizers, the files beside the rooms of
`deepspeed/runtime`, who owns what, pipelines, and tools that check training."""

from unit.mutation.table.fault import faults_of

FAULTS = faults_of(r"""
v1/silent/test_changes.py -k frozen_later
  what is frozen is stepped
    IdleParameters.of_step: (frozen | self._dropped) - self._given -> set()
  a run's count of steps is not kept
    stepped_by_runs: keep_state_of_run(optimizer.state[flat], flat, run, optimizer.state.get(part,
      {})) -> pass
  what is frozen counts the steps of others
    ParameterHistories._planned: own.update({self._names[index]: kept for index in leaving}) -> pass
v1/silent/test_changes.py -k unused_skipped
  what no rank has used is stepped
    StepSequence.step: self.idle.drop(self._unused.of_window()) -> pass
v1/silent/test_changes.py -k copied
  masters do not follow writes into the model
    ModelWrites.take_in: watched.group.follow(index) -> pass
v1/silent/test_changes.py -k moved_back
  parameters with other memory stay apart from the flat buffer
    ModelWrites.rejoin: _move_back(watched, moved) -> pass
v1/silent/test_changes.py -k gradient_assigned
  an assigned gradient that nobody reads is passed over
    StepSequence._refuse_unread: if unread: ... -> pass
  an assigned gradient is not used at stage 0
    FlatGradients.take_edits: self.collect_some(edited) -> pass
v1/silent/test_changes.py -k gradient_dropped
  a dropped gradient is one of zeros
    Replicated._take_edits: self.context.idle.drop(gradients.take_edits()) -> gradients.take_edits()
v1/silent/test_optimizers.py -k counts_a_step_once
  runs of one history count a step each
    LowPrecisionStep._step_group: before[id(run.shared)] -> copy.deepcopy(run.shared)
v1/silent/test_optimizers.py -k Muon
  a frozen matrix of Muon's is stepped
    MuonWithAuxAdam._step_muon: if not self.is_stepped(tensor, part): ... -> pass
v1/silent/test_optimizers.py -k Adafactor
  owners step what is frozen
    OwnerSteps.step: None if name in self._left_out else gradient -> gradient
v1/silent/test_optimizers.py -k half and host
  the part on the device steps what is frozen
    PartialSteps.leave_out: self._beside.leave_out(params) -> pass
runtime/sharding/test_parameter_histories.py
  ranks without its elements do not count a step
    ParameterHistories._runs_of: runs or [ElementRun(0, 0, shared, is_new)] -> runs
runtime/gradients/test_sink.py
  the first write adds to what was left
    DeviceSink.add: bucket not in self.written -> False
runtime/gradients/test_canonical.py
  a mean is a product with the reciprocal
    _Counter.write_mean: torch.div(total, divisor, out=self._target) -> torch.mul(total, 1 /
      divisor, out=self._target)
  a sum that is not exact
    _add: rest = rest.sub_(part) -> pass
  what is not finite is far from the largest
    _add: bits >> MANTISSA_BITS & EXPONENT_MASK -> (bits >> MANTISSA_BITS & EXPONENT_MASK) % 2047
v1/reproducibility/test_bits.py
  what Muon leaves to AdamW is fused on the host
    MuonWithAuxAdam._step_adamw: not (shows_cut and self.squares is not IN_ORDER) -> True
v1/checkpoint/test_window.py -k bit_equal
  a tree goes on as if it had no leaf
    _Counter.load_state: saved["places"] -> ()
  an epoch that goes on in a step has another end
    ResumableDistributedSampler._num_left: self._in_epoch -> 1
v1/reproducibility/test_changes.py -k it_is_repeated
  a window begins anew after its samples
    where_step_began: done - done % host["step_samples"] -> done
v1/reproducibility/test_records.py
  losses of steps without digests are in the next mean
    DeepSpeedEngine._take_model_step: self._losses.forget() -> pass
  losses are in the order of ranks
    Losses.mean_over: zip_longest(*(losses for losses, _ in told)) -> (losses for losses, _ in told)
v1/reproducibility/test_pipelines.py
  a tied weight has the gradient of its first part alone
    CanonicalLeaves._join: grad.add_(later) -> pass
  chunks of several micro-batches are one leaf
    CanonicalLeaves.is_whole: self._taken(micro_batch).items() -> {}.items()
  stages that share a weight keep their own gradient
    CanonicalLeaves.share: owned is not None and not is_first -> False
  a stage draws random numbers from where the last one stood
    PipelineEngine._exec_forward_pass: partial(self._seed_forward, micro_batch) -> None
  a leaf is sent before all of it has come
    Bucketed._sends_whole: self.hooks.readiness.may_be_late -> False
  losses are added as ranks have them
    mean_of_all: table[:, rank] = torch.stack(list(losses)) -> table[0, 0] =
      torch.stack(list(losses)).sum()
v1/fp16/test_dynamic_scaling.py -k divided_first
  fp16 is summed before it is divided
    _split: travels_in == torch.float16 -> False
  a given predivide factor is overruled
    _split: factor is None -> True
runtime/activation_checkpointing/test_in_engine.py -k come_back
  saved inputs come back when they are read
    InputStore._back: self._bring_back(before) -> pass
  a dropped graph's copy back is freed while it runs
    InputStore._bring_back: copies_back.keep_alive([*copies, *kept], [call.stream]) -> pass
runtime/activation_checkpointing/test_torchs.py -k block_moves
  the host has inputs of our own functions alone
    configure: _move_inputs_of_torchs() -> None
  what several functions take is copied for each
    InputStore.pack: self._moved.get(identity) -> None
  an input is copied before it is made
    InputStore._kept_on_host: copies.wait_for([producer]) -> pass
runtime/activation_checkpointing/test_torchs.py -k while_it_is_copied
  who writes to an input that is being copied is not told
    InputStore._look: read._version != version -> False
  an input that was changed is taken for what it was
    _identity: tensor._version -> 0
runtime/activation_checkpointing/test_saved_files.py -k simulated
  an input is written before it is copied
    InputFiles._write: filled.copied.synchronize() -> pass
  an input's place in a file is taken while it is read
    InputFiles._place: self._reads.forget(memory) -> pass
  an input is read while it is written
    InputFiles._wait_until_written: block.last_use.check() -> pass
  inputs in files are read when they are wanted
    InputStore._bring_back: self._files.begin(one.moved.file, one.moved.content) -> pass
runtime/activation_checkpointing/test_saved_files.py -k errors
  the next write of a handle is taken for an earlier one
    _Write.synchronize: handle, self._handle = self._handle, None -> handle = self._handle
comm/test_lookout.py -k who_issues
  the thread that looks for lone waits asks the device
    _oldest_on_device: list(self._on_device)[:1] -> [one for one in self._on_device if not
      _has_passed(one.done)][:1]
runtime/gradients/test_readiness.py
  buckets leave as they are ready
    ReadinessTracker.mark: range(first, self._next) -> range(bucket, bucket + (not
      self._missing[bucket]))
  a late gradient is forgotten
    ReadinessTracker.mark: self.late.add(slot) -> pass
v1/fp16/test_dynamic_scaling.py -k growth
  unscaled with the next scale
    _used_scale: return float(self._scaler.loss_scale) -> import copy; after =
      copy.copy(self._scaler); after.update_scale(False); return float(after.loss_scale)
v1/fp16/test_dynamic_scaling.py -k test_overflow_on_one_rank_skips_on_both
  steps with a gradient that is not finite
    StepSequence.step: not outcomes.overflow -> True
v1/optimizers/test_whole_parameters.py -k test_refused
  a mark that another optimizer does not read
    check_whole_parameters: if is_elementwise: ... -> pass
v1/device/test_host_waits.py -k test_of_a_step
  the host looks at the norm before the update
    StepSequence.step: outcomes.send(outcome) -> ...; outcomes.learn_outcome()
v1/device/test_host_waits.py -k test_training
  the optimizer does not hear that the step is skipped
    GradientScaling.step: optimizer.found_inf = self.found_inf -> optimizer.found_inf = None
v1/device/test_host_waits.py -k nobody_asked
  the host copy of one norm is used for two steps
    Outcomes.send: self._late_norms.rotate() -> pass
runtime/optimizers/test_step_outcome.py -k momentum
  a skipped step of fused SGD makes its momentum
    _makes_momentum: group['momentum'] -> False
v1/zero/test_clients_ways.py -k after_a_skipped_step
  the norm of a skipped step is reported
    learn_outcome: self._report_skip(outcome.scale) -> ...; self._applied = outcome
v1/optimizers/test_whole_parameters.py -k TestAsOneProcess
  an optimizer of whole parameters steps shards
    on_shards: return OwnerSteps(basic) -> return basic
  a matrix is made orthogonal by its parts
    through_owners: arrived = arriving() -> ...; arrived[:message.numel()] =
      message[:arrived.numel()]
  a matrix that starts with its owner is taken for whole
    DealtParameters._cut: (1, numel) -> (1,)
  a trust ratio of parts of a parameter
    sum_parts: dist.all_reduce(summed, group=self._group.process_group) ->
      dist.all_reduce(summed.clone(), group=self._group.process_group)
  masters that an owner has updated stay with it
    OwnerSteps.step: shard.data.copy_(of.from_owners(master, shard.device)[:shard.numel()]) ->
      of.from_owners(master, shard.device)
runtime/optimizers/test_update_probe.py
  an optimizer is tried at a rate of zero
    _way: options['lr'] = _LR -> pass
v1/zero/test_fix2_hook_stream.py -k TestBF16Optimizer
  a bf16 hook works on another stream
    Accumulated._arrived: self.accumulator.absorb_one(group_index, index, 1.0 / divisor) -> from
      deepspeed.accelerator import get_accelerator\nwith
      get_accelerator().stream(get_accelerator().default_stream()): ...
v1/bf16/test_fix4_boundary_microbatch.py
  the last micro-batch never joins
    backward_epilogue: self.update_hp_grads() -> pass
  the accumulator that is reduced is a copy
    reduce_gradients: self.get_grads_for_reduction() -> [flat.clone() for flat in ...]
runtime/optimizers/test_step_outcome.py -k late
  the host reads a norm that is still on its way
    _arrived: self._copied.synchronize() -> pass
v1/zero/test_reduction_settings.py -k kept
  buffers are rounded with the parameters
    cast_module.cast: buffers if id(tensor) in kept else dtype -> dtype
v1/zero/test_compiled.py -k same_gradients
  forwards stay compiled when an engine of stage 3 has ended
    EngineCompiling.remove: compiled.remove() -> pass
  a model of stage 3 is compiled with the gathers of its blocks
    compile_in_place: parts_between_hooks(roots, has_hooks) -> [model]
v1/zero/test_layout.py -k one_bucket
  state is saved as it lies in memory
    Refiling.move: exchange is None -> ... or self._to_files
v1/optimizers/test_whole_parameters.py -k TestCheckpoints
  a rank loads state of whole parameters that are another's
    has_state_of: there == here or not there -> True
v1/device/test_pipelines.py -k one_queue
  two receives ahead on one hardware queue
    messages_ahead: int(given) < DEFAULT_QUEUES -> int(given) < 1
v1/device/test_pipelines.py -k posts_what_depends_on_nothing_to_come
  a receive is posted too early
    _Lane.post: self._coming[0][1] <= self._issued -> True
verify/test_ds_verify.py -k started_apart
  one process is started for ranks that came to nothing
    run_plan: run.beside not in in_vain -> True
verify/test_ds_verify_exact.py
  losses are read rank by rank
    _digest_lines: zip_longest(*each) -> each
verify/test_budgets.py -k blocks_its_queue
  a device whose blocked queues block no other stream
    _Device.__init__: budget.queues -> 99
verify/test_budgets.py -k receives_ahead
  kernels that hold no processors while they wait for other ranks
    _Device.begin: self.free -= self._budget.needs(entry) -> pass
ops/aio/test_handle.py -k come_back
  what ends between blocks of the disk is left out
    _OpenFile.cut: [*middle, *(edge for edge in edges if edge[0] < edge[1])] -> middle
ops/aio/test_handle.py -k no_page
  a page is written past the page cache and through it
    _OpenFile.cut: self.direct != self.plain -> False
ops/aio/test_handle.py -k come_once
  a file that ends too early is read as if it did not
    _Operation.wait: failed != DONE -> failed.errno > 0
  errors of what was begun are nobody's
    wait_for_all: if errors: raise errors[0] -> pass
  descriptors of a transfer stay open
    _Operation.wait: self.file.close() -> pass
ops/aio/test_handle.py -k completed
  the rest of a short read is not read
    Transfer.move: done += count -> done = len(memory)
ops/aio/test_handle.py -k large_pages
  requests of many small pages reach the disk in parts
    new_cpu_locked_tensor: memory.madvise(mmap.MADV_HUGEPAGE) -> pass
ops/aio/test_handle.py -k forked
  a forked process waits for threads of its parent
    AsyncIOHandle._pool: self._threads is None or self._process != os.getpid() ->
      self._threads is None
io/test_file_writers.py -k full_disk
  nobody waits for the last bytes of a file
    FastFileWriter.close: self._handle.wait() -> pass
io/test_file_writers.py -k have_the_bytes
  each buffer goes to the beginning of the file
    FastFileWriter._drain: self._written += self._filled -> pass
io/test_file_writers.py -k several_writers
  each of several writers begins with the first storage
    FastFileWriter.save_torch_storage_object_list: max(0, begin - at) -> 0
v1/offload/test_nvme_offload.py -k read_ahead
  no window is read while the one before is updated
    Windows._enter: self._begin(following) -> pass
  each window is the first of its file
    Windows._places: number * WINDOW_NUMEL * tensor.dtype.itemsize -> 0
v1/offload/test_nvme_offload.py -k all_ranks
  a rank whose disk fails leaves the others in a gather
    Publisher.abandon: self._gather(gather) -> pass
  the others go on while a rank's disk has failed
    MasterWeights._raise_disk_error: raise_disk_error(own, self.norm_group) -> if own is not
      None:\n    raise own
  a checkpoint is loaded into pages that are not there
    MasterWeights._raise_disk_error: mend() -> pass
v1/checkpoint/test_crashes.py -k swap-zero2
  a killed run leaves its files of state
    StateFiles._file: tempfile.TemporaryFile(dir=self._folder, buffering=0) ->
      tempfile.NamedTemporaryFile(dir=self._folder, buffering=0)
v1/offload/test_nvme_params.py -k wherever
  shards are gathered before they are in their files
    ShardWriter.finish: self._writes.finish() -> pass
v1/offload/test_nvme_params.py -k all_ranks_raise
  nobody hears that a shard could not be read before the update
    CutMasters.scaled_global_norm: self.parameter_offload.raise_disk_error() -> pass
  what was gathered of an unreadable shard stays whole
    DeepSpeedZeRoOffload.raise_disk_error: self.empty_partition_cache() -> pass
v1/offload/test_nvme_params.py -k silent
  a part is read into memory that a copy still reads
    ShardReads.parts: event_here() -> None
v1/offload/test_nvme_params.py -k clients
  what was read before a script's edit is gathered
    GatherResources.end_reads: self.reads.drop() -> pass
v1/offload/test_nvme_params.py -k reads_ahead
  shards are read when they are wanted
    PartitionedParameterCoordinator._read_ahead: reads is None -> True
v1/offload/test_nvme_offload.py -k errors_of
  what could not be written is nobody's
    Windows.__exit__: nullcontext() if error is None else suppress(OSError) -> suppress(OSError)
v1/bf16/test_low_precision.py -k test_bits
  random bits are those of the first step
    ElementBits.of: step * _GAMMA -> 0
  values of an element share their random bits
    LowPrecisionStep._round: place % _DRAWS -> 0
  the first piece of a master leaves its state to the second
    _Parts.step: copy.deepcopy(dict(shared)) -> run.shared
v1/bf16/test_low_precision.py -k checkpoint
  fp32 moments are loaded in the dtype of masters
    LowPrecisionStep._load_moments: load_moments(optimizer, self._loaded) -> pass
ops/test_early_update.py -k other_numbers
  an update with another factor or rate is taken
    _Begun.is_that: _bits(wanted.scalars) == _bits(own.scalars) -> True
  what a script has written since is not seen
    _Begun.is_that: [*self._marks, self.grad_mark] == [*self._marks_now(), _mark(own.grad)] -> True
  tensors that were replaced since are not seen
    _Begun.is_that: all(a is b for a, b in pairs) -> True
  a gradient that is written between two slices is not seen
    SpeculativeUpdate.landing: self.forget() -> pass
  an update begins anew where a gradient has changed
    SpeculativeUpdate._begin: self._is_over or param not in self._aliases -> False
ops/test_early_update.py -k is_taken
  views keep the old memory
    _is_shared: here - alone != len(tensors) -> False
  what has no update yet is of the memory beside
    SpeculativeUpdate.take: tensors[0].data.view(-1)[start:end].copy_(old.view(-1)[start:end]) ->
      pass
  what has no update yet gets none
    HostOptimizer._deliver_rest: self._run(update.piece(first, last, None)) -> pass
  the memory beside is that of masters and state
    HostOptimizer.run_apart: self._run(new) -> self._run(old)
ops/test_early_update.py -k windows_of_files
  a window is updated when some of it is there
    _Begun.came: not self._missing[number] -> True
  padding holds a window up
    _Begun.__init__: filled or () -> [(0, update.param.numel())]
  the window ahead is read into the memory of the one at hand
    Windows._enter: (following - number) % NUM_WINDOWS -> True
  what is left is read where it is to be written
    HostOptimizer._deliver_by_windows: self.state_files.windows(old, own, left) ->
      self.state_files.windows(own, own, left)
  what was updated ahead is updated once more
    HostOptimizer._deliver_by_windows: not windows.is_left(first) -> False
  files that are viewed change places
    SpeculativeUpdate.take: any(map(_is_shared, every)) -> False
ops/test_early_update.py -k error_of_the_disk
  nobody hears of an error ahead
    SpeculativeUpdate._run_windows: self._error = error -> pass
  it is heard of in each step
    SpeculativeUpdate.take: self._error, None -> self._error, self._error
  one rank raises in backward what the disk has no room for
    SpeculativeUpdate._begin: self._error, self._is_over = error, True -> raise
ops/test_early_update.py -k pauses
  every window is speculated
    SpeculativeUpdate._begin: self._passed < self._paused -> False
v1/offload/test_product.py -k Pairs
  slices of every micro-batch count as final
    Bucketed.average_tensor: self.context.tracker.is_boundary -> True
v1/offload/test_speculative_update.py -k written
  gradients are added to where an update has begun
    DeviceSink.add: self.early.forget() -> pass
  what a script writes through tensors of its own is not seen
    MasterWeights.lend: self.early.lent() -> pass
  what was made of gradients that were forgotten stays
    DeviceSink.clear: self.early.clear() -> pass
v1/offload/test_speculative_update.py -k streams
  nothing is updated before the step
    DeviceSink._add: joined(ranges) if to.is_last else [] -> []
""")
