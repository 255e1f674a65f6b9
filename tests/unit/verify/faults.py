"""Faults to put into the package, and the guard of `deepspeed.verify` that must find each.

Unlike those of `unit.mutation.table`, which a regression test must notice, these must be found by
the tools that users run, in a scenario of `unit.verify.scenarios`, and what the tool says must name
the right place.
"""

from __future__ import annotations

from unit.verify.mutation_form import Mutation
from unit.verify.pipe_faults import PIPELINE
from unit.verify.zero3_faults import GATHERS, ZERO3

PRODUCER_NOT_AWAITED = r"never waits for <.*which wrote.*gradient of(.|\n)*average_tensor"
FREED_TOO_EARLY = r"(?i)freed(.|\n)*_fill"

CHECKER = (
    Mutation(
        "no wait for the producers",
        "average_tensor: self.side_stream.wait_for(bucket.copy_streams or "
        "{self.side_stream.current_stream()}) -> pass",
        "streams: stage 2",
        PRODUCER_NOT_AWAITED,
    ),
    Mutation(
        "a hook records the default stream",
        "reduce_ready_partitions_and_remove_grads: "
        "bucket.copy_streams.add(self.side_stream.current_stream()) "
        "-> from deepspeed.accelerator import get_accelerator; "
        "bucket.copy_streams.add(get_accelerator().default_stream())",
        "streams: stage 2",
        PRODUCER_NOT_AWAITED,
    ),
    Mutation(
        "no stream is recorded",
        "reduce_ready_partitions_and_remove_grads: if self.side_stream.has_streams: ... -> pass",
        "streams: stage 2",
        PRODUCER_NOT_AWAITED,
    ),
    Mutation(
        "only the last producer is recorded",
        "reduce_ready_partitions_and_remove_grads: "
        "bucket.copy_streams.add(self.side_stream.current_stream()) "
        "-> bucket.copy_streams = "
        "{self.side_stream.current_stream()}",
        "streams: stage 2",
        PRODUCER_NOT_AWAITED,
    ),
    Mutation(
        "no fallback to the current stream",
        "average_tensor: self.side_stream.wait_for(bucket.copy_streams or "
        "{self.side_stream.current_stream()}) -> "
        "self.side_stream.wait_for(bucket.copy_streams)",
        "streams: stage 1, no overlap",
        PRODUCER_NOT_AWAITED,
    ),
    Mutation(
        "the bucket is filled on the hook's stream",
        "SideStream.issue: return get_accelerator().stream(self.stream) -> return nullcontext()",
        "streams: stage 2",
        PRODUCER_NOT_AWAITED,
    ),
    Mutation(
        "producers do not wait for the copy",
        "average_tensor: self.side_stream.release(producers) -> pass",
        "streams: stage 2",
        FREED_TOO_EARLY,
    ),
    Mutation(
        "a gradient is written again while it is copied",
        "average_tensor: self.side_stream.release(producers) -> pass",
        "streams: static gradients",
        r"race: <default stream> never waits for <reduction stream>, which read(.|\n)*_fill",
    ),
    Mutation(
        "one of several producers waits for the copy",
        "average_tensor: self.side_stream.release(producers) -> "
        "self.side_stream.release(list(producers)[:1])",
        "streams: stage 1",
        FREED_TOO_EARLY,
    ),
    Mutation(
        "producers wait for what came before the copy",
        (
            "average_tensor: self.side_stream.release(producers) -> pass",
            (
                "average_tensor: payload = self._fill_buffer(buffer, index, grads) -> "
                "self.side_stream.release(producers); ..."
            ),
        ),
        "streams: stage 2, no overlap",
        FREED_TOO_EARLY,
    ),
    Mutation(
        "an input is dropped before its producer waits",
        "_let_go: stream.wait_event(oldest.event) -> pass",
        "streams: checkpoints on the host",
        r"(?i)freed(.|\n)*_kept_on_host",
    ),
    Mutation(
        "the step does not wait for the reduction",
        "SideStream.join: get_accelerator().current_stream().wait_stream(self.stream) -> pass",
        "streams: stage 2",
        r"gradient shard of group(.|\n)*local_squared_norm",
    ),
    Mutation(
        "the default stream waits for the reduction",
        "SideStream.join: get_accelerator().current_stream -> get_accelerator().default_stream",
        "streams: stage 2 on a side stream",
        r"gradient shard of group(.|\n)*local_squared_norm",
    ),
    Mutation(
        "a reduced piece is used before its reduction",
        "PendingShards.wait: work.wait() -> pass",
        "streams: stage 2",
        "never waits for <nccl stream",
    ),
    Mutation(
        "gathered parameters are not awaited",
        "Publisher.finish: self._gathers.popleft().wait -> self._gathers.popleft",
        "streams: stage 2",
        "never waits for <nccl stream.*flat parameters",
    ),
    Mutation(
        "an all-reduced accumulator is not awaited",
        "finish_all_reduce: flight.work.wait() -> pass",
        "streams: BF16_Optimizer",
        r"never waits for <nccl stream.*group(.|\n)*all_reduce_flat",
    ),
    Mutation(
        "a bf16 hook works on another stream",
        "Accumulated._arrived: self.accumulator.absorb_one(group_index, index, 1.0 / "
        "divisor) -> from deepspeed.accelerator import get_accelerator\nwith "
        "get_accelerator().stream(get_accelerator().default_stream()): ...",
        "streams: BF16_Optimizer, from hooks",
        r"never waits for <.*gradient of(.|\n)*absorb_one",
    ),
    Mutation(
        "the host reads a slice before its copy",
        "HostSink._land: event.synchronize() -> pass",
        "streams: stage 2, offload",
        r"the host never waits(.|\n)*_accumulate",
    ),
    Mutation(
        "a staging buffer is written while its copy is on its way",
        "StagingBuffers.take: event.synchronize() -> pass",
        "streams: stage 1, bf16, Adam on the host",
        r"the host never waits(.|\n)*(_run|_rule|_deliver)",
    ),
    Mutation(
        "stage 0 sends a bucket without waiting for its producers",
        "Replicated._send: streams.wait_for(self._producers[bucket]) -> pass",
        "streams: stage 0, overlapped",
        r"never waits for <backward stream.*which wrote(.|\n)*_send",
    ),
    Mutation(
        "stage 0 does not wait for its buckets",
        "Replicated._finish: self._streams.join() -> pass",
        "streams: stage 0, overlapped",
        "never waits for <(reduction|nccl) stream",
    ),
)
LEDGER = (
    Mutation(
        "an absent gradient leaves what was in the bucket",
        "Bucketed._fill: torch._foreach_zero_(absent) -> pass",
        "ledger: stage 2",
        "never|sometimes",
    ),
    Mutation(
        "an absent gradient leaves what was in the flat buffer",
        "collect_some: torch._foreach_zero_(absent) -> pass",
        "ledger: stage 0, no accumulation",
        "sometimes",
    ),
    Mutation(
        "the first write adds to the last step's gradient",
        "DeviceSink.add: bucket not in self.written -> False",
        "ledger: stage 2",
        "weight",
    ),
    Mutation(
        "a reduced piece is added twice",
        "Bucketed._finish: read = self._take_in(reduction, pieces) -> ...; "
        "self._take_in(reduction, reduction.pending.wait())",
        "ledger: stage 1",
        "(?i)twice|doubled|instead of",
    ),
    Mutation(
        "divided by the number of ranks twice",
        "factors: post / accumulation_divisor -> ... / self.world",
        "ledger: stage 1",
        "(?i)divided",
    ),
    Mutation(
        "the boundary micro-batch never joins",
        "backward_epilogue: self.update_hp_grads() -> "
        "if not self.context.tracker.is_boundary:\n    ...",
        "ledger: BF16_Optimizer",
        r"(?i)lost(.|\n)*micro-batch",
    ),
    Mutation(
        "reduced before the epilogue",
        (
            "_backward_epilogue: sequence.backward_epilogue() -> pass",
            (
                "_backward_epilogue: self._exit_backward(sequence) -> "
                "sequence.backward_epilogue(); ..."
            ),
        ),
        "ledger: BF16_Optimizer",
        r"(?i)lost(.|\n)*micro-batch|late",
    ),
    Mutation(
        "the accumulator is not cleared",
        "clear_hp_grads: self.accumulator.clear() -> pass",
        "ledger: BF16_Optimizer",
        "weight",
    ),
    Mutation(
        "a bucket is sealed early",
        "ReadinessTracker.mark: self._missing[self._next] == 0 -> self._missing[self._next] <= 1",
        "ledger: stage 2",
        "(?i)late",
    ),
    Mutation(
        "the last bucket is not sent",
        "reduce_gradients: self.hooks.readiness.remaining() -> list(...)[:-1]",
        "ledger: stage 1, no overlap",
        "(?i)lost",
    ),
    Mutation(
        "instances keep their gradients to themselves",
        "_reduce_between_instances: self.instances.across is None -> True",
        "ledger: stage 2, 2 instances",
        "(?i)wrong group|ranks",
    ),
    Mutation(
        "a bucket is used again while it is sent",
        "average_tensor: self.side_stream.join_unless_overlapped() -> ...; "
        "self.buffers.free.append(buffer)",
        "ledger: stage 2",
        "weight|bias",
    ),
)
INTENT = (
    Mutation(
        "one rank skips the norm's reduction",
        "ZeroMasters.scaled_global_norm: return ... -> if dist.get_rank() == 0: "
        "reduce_squared_norm(squares, self.norm_group)\nreturn self._norm_of(squares)",
        "intent: stage 2",
        r"(?i)all_reduce(.|\n)*reduce_squared_norm",
    ),
    Mutation(
        "one rank skips a bucket",
        "reduce_gradients: self.hooks.readiness.remaining() -> list(...)[dist.get_rank():]",
        "intent: stage 1",
        "_start_reduction",
    ),
    Mutation(
        "buckets leave as they are ready",
        "ReadinessTracker.mark: range(first, self._next) -> range(bucket, bucket + (not "
        "self._missing[bucket]))",
        "intent: stage 2",
        r"(?i)do not agree(.|\n)*_start_reduction",
    ),
)
ORACLE = (
    Mutation(
        "unscaled with the next scale",
        "_used_scale: return float(self._scaler.loss_scale) -> import copy; after = "
        "copy.copy(self._scaler); after.update_scale(False); return float(after.loss_scale)",
        "oracle: fp16",
        "weight is off",
    ),
    Mutation(
        "parameters are not gathered",
        "_gather: group.num_shards == 1 -> True",
        "oracle: stage 1",
        "weight is off",
    ),
    Mutation(
        "masters are not written back",
        "Publisher.updated: not self._rounded and (not group.aliased) -> False",
        "oracle: BF16_Optimizer",
        "weight is off",
    ),
)
MUTATIONS = (*CHECKER, *LEDGER, *INTENT, *ORACLE, *PIPELINE, *ZERO3, *GATHERS)
