"""The fixes of docs/fixes/, each taken out again as a whole."""

from __future__ import annotations

from unit.mutation.table.fault import Fault
from unit.mutation.table.places import ENGINE, FIX1, FIX2, FIX3, FIX4, ZERO

DIST_IMPORT = "from deepspeed import comm as dist\n"
ACCELERATOR_IMPORT = "from deepspeed.accelerator import get_accelerator\n"
RECORD_AND_COMMENT = """\
        if self.side_stream.has_streams:
            # [fix 2] The stream current here, inside the hook, is the one that produced this
            # gradient: autograd runs the hook on the stream of the accumulation node, which need
            # not be the default stream nor the one the optimizer was built on.
            self.ipg_buckets[self._slots[i][0]].copy_streams.add(self.side_stream.current_stream())
"""
WAIT = """\
        self.side_stream.wait_for(bucket.copy_streams or {self.side_stream.current_stream()})
"""
WAIT_COMMENT = """\
        # [fix 1] The gradients of one bucket come from as many streams as their hooks ran on.
        # Reading them is safe only after the work of *all* of these streams; the one current now is
        # right only if no hook recorded any.
"""
CLEAR = '''\
        """Forget the contributions. The streams too [fix 1]: a stale one would order the next
        reduction after unrelated work.
        """
'''
REMAINING_STREAMS = """\
        streams = self.ipg_buckets[index].copy_streams
        if streams:
            streams.add(self.side_stream.current_stream())
"""
NORM_LOOP = """\
            squares[self._param_group_of(group_index)] += local(group_index).squeeze()
        # [fix 3] One reduction after all groups, of a tensor as long on every rank: ranks may own
        # different numbers of groups (pipeline stages do), and a collective per group would then
        # never match. fp32 whatever the model's dtype.
        return self._norm_of(reduce_squared_norm(squares, self.norm_group))
"""
NORM_LOOP_PER_GROUP = """\
            squared = reduce_squared_norm(local(group_index), self.norm_group)
            squares[group_index] += squared.squeeze()
        return self._norm_of(squares)
"""
EPILOGUE = """\
        sequence.backward_epilogue()
        if self.enable_backward_allreduce and not self.inside_no_sync_ctxt:
            self.allreduce_gradients()
        self._exit_backward(sequence)
"""
EPILOGUE_REDUCES_FIRST = """\
        if self.enable_backward_allreduce and not self.inside_no_sync_ctxt:
            self.allreduce_gradients()
        sequence.backward_epilogue()
        self._exit_backward(sequence)
"""
ABSORB = """\
            self.accumulator.absorb_one(group_index, index, 1.0 / self.accumulation_divisor)
"""
ABSORB_ELSEWHERE = """\
            from deepspeed.accelerator import get_accelerator

            with get_accelerator().stream(get_accelerator().default_stream()):
                self.accumulator.absorb_one(group_index, index, 1.0 / self.accumulation_divisor)
"""

UNDO_FIXES = (
    Fault(
        "fix1",
        ZERO,
        (
            ("        copy_streams: Streams that the gradients were produced on.\n", ""),
            ("    copy_streams: set[Stream] = field(default_factory=set)\n", ""),
            (CLEAR, '        """Forget the contributions."""\n'),
            ("        self.copy_streams.clear()\n", ""),
            (RECORD_AND_COMMENT, ""),
            (REMAINING_STREAMS, ""),
            (WAIT_COMMENT, ""),
            (WAIT, "        self.side_stream.wait_for({self.side_stream.current_stream()})\n"),
            (
                "        producers = bucket.copy_streams or {self.side_stream.current_stream()}\n",
                "        producers = {self.side_stream.current_stream()}\n",
            ),
        ),
        FIX1,
    ),
    Fault(
        "fix2",
        ZERO,
        (
            (
                "copy_streams.add(self.side_stream.current_stream())",
                "copy_streams.add(get_accelerator().default_stream())",
            ),
            (DIST_IMPORT, DIST_IMPORT + ACCELERATOR_IMPORT),
        ),
        FIX2,
        "TestZero",
    ),
    Fault("fix3", ZERO, ((NORM_LOOP, NORM_LOOP_PER_GROUP),), FIX3),
    Fault("fix4", ENGINE, ((EPILOGUE, EPILOGUE_REDUCES_FIRST),), FIX4),
)
