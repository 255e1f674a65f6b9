"""Faults of saving, loading and exporting."""

from unit.mutation.table.fault import faults_of

FAULTS = faults_of(r"""
v1/silent/test_checkpoints.py
  what is frozen for some steps is filed as untrained
    _frozen_state: pair[1] not in trained -> not pair[1].requires_grad
  what has taken no step has the zeros of its place
    _fragments_in: run.filed_as in by_parameter and (not own) -> False
  what has taken no step is taken for damage
    _Target.take: fragment.options and (not fragment.has_state) -> False
  counts of the host stay numbers for an optimizer of torch's
    load_apart: settle_loaded(loaded) -> pass
v1/checkpoint/test_window.py -k what_other
  an engine's own window is added to that of the checkpoint
    restore_window: sequence.zero_grad() -> pass
v1/checkpoint/test_window.py -k bit_equal and stage2
  what was reduced of a window is not resumed
    load_window_state: group.grad.copy_(grad) -> pass
v1/tensor/test_tensor_parallel.py -k resumed
  parts of a resumed window's gradients are taken for summed
    restore_window: state._sequence_parts.opened() -> pass
v1/checkpoint/test_async.py -k lock_what
  page-locked memory of a save is not kept for the next
    HostCopy.reset: self._free[block.numel()].append(block) -> pass
v1/checkpoint/test_async.py -k waits_for_its_device
  each step of a save waits for what it has issued
    _ask: self._is_asked = not wait and runs_ahead(least) -> self._is_asked = False
v1/checkpoint/test_options.py -k client_state
  a rank without a folder to save in leaves the others in a gather
    _is_tag_of_all: if has_no_path: ... -> if not is_path: raise ValueError
v1/checkpoint/test_safetensors.py -k owns
  every rank of stage 3 reads the first one's elements of a safetensors file
    _Loading.load: own.param_start -> 0
v1/checkpoint/test_stage3.py -k cannot_be_written
  a rank whose disk is full leaves the others in a gather
    save_whole: for _ in values: pass -> pass
v1/checkpoint/test_stage3.py -k TestResume and fp32
  masters of stage 3 are those of another rank
    cut_runs: firsts.get(name, 0) + place * cut -> firsts.get(name, 0) + (ranks - 1 - place) * cut
v1/tensor/test_autotp.py -k Architectures
  whole parameters are sliced as if one tensor-parallel rank had saved slices
    RankSlices._own: self._patterns is not None -> False
v1/moe/test_auto_ep.py -k files
  rows of experts are taken for the first ones
    _Resharding.__init__: first_element(run.param) + run.start -> run.start
  rows of experts are exported in the order of the ranks
    SavedRank.pieces: sorted(self.fragments[name], key=lambda fragment: fragment.start) ->
      list(reversed(self.fragments[name]))
  rows of experts are taken for the first ones in shards of stage 3
    cut_runs: firsts.get(name, 0) + place * cut -> place * cut
  every rank of stage 3 reads the first rows of experts that are not trained
    own_fragment: first_element(param) + own.param_start -> own.param_start
  the rows of experts that ranks of stage 3 share last are exported first
    first_element: expert_rank(rank, ranks, size, data_first) * shape.numel() -> (size - 1 -
      expert_rank(rank, ranks, size, data_first)) * shape.numel()
  one rank's experts are saved in 16 bit as if they were all
    whole_parameters: spread.with_all_rows(param.data) -> param.data
v1/checkpoint/test_experts.py -k same_by_name
  experts of stage 3 are numbered by each rank in its files
    cuts_of: held * share -> 0 * share
v1/optimizers/test_whole_parameters.py -k TestCheckpoints
  state of whole parameters is taken for a sign that no masters were saved
    _Resharding.fill: FP32 not in fragment.values and (not fragment.is_state_alone) -> FP32 not in
      fragment.values
v1/checkpoint/test_updates.py -k one_count
  a step count that a file has for all is counted on by each
    load_apart: own[key] = own[key].clone() -> pass
v1/checkpoint/test_updates.py -k TestUpdates
  padding has the state of another group
    _offer: target.resemble(fragment, likeness=2) -> target.resemble(fragment, likeness=1)
v1/checkpoint/test_updates.py -k TestRates
  a schedule's rates stay with the number of a group
    restore_training: scheduler = loaded.optimizer.schedule(scheduler) -> pass
""")
