"""The fixes of docs/fixes/, each taken out again as a whole."""

from unit.mutation.table.fault import faults_of

UNDO_FIXES = faults_of(r"""
v1/zero/test_fix1_ipg_bucket_streams.py
  fix1
    IPGBucket: copy_streams: set[Stream] = field(default_factory=set) -> pass
    IPGBucket.clear: self.copy_streams.clear() -> pass
    reduce_ready_partitions_and_remove_grads: if self.side_stream.has_streams: ... -> pass
    _send_incomplete: streams = self.ipg_buckets[index].copy_streams\nif streams: ... -> pass
    average_tensor: self.side_stream.wait_for(bucket.copy_streams or ...) ->
      self.side_stream.wait_for({self.side_stream.current_stream()})
    average_tensor: producers = bucket.copy_streams or ... -> producers =
      {self.side_stream.current_stream()}
v1/zero/test_fix2_hook_stream.py -k TestZero
  fix2
    reduce_ready_partitions_and_remove_grads:
      bucket.copy_streams.add(self.side_stream.current_stream()) -> from deepspeed.accelerator
      import get_accelerator; bucket.copy_streams.add(get_accelerator().default_stream())
v1/zero/test_fix3_grad_norm_one_collective.py
  fix3
    scaled_global_norm: squares[self._param_group_of(group_index)] += local(group_index).squeeze()
      -> squared = reduce_squared_norm(local(group_index), self.norm_group); squares[group_index] +=
      squared.squeeze()
    ZeroMasters.scaled_global_norm: reduce_squared_norm(squares, self.norm_group) -> squares
v1/bf16/test_fix4_boundary_microbatch.py
  fix4
    _backward_epilogue: sequence.backward_epilogue() -> pass
    _backward_epilogue: self._exit_backward(sequence) -> sequence.backward_epilogue(); ...
""")
