"""Faults to put into the package, and the guard of `deepspeed.verify` that must find each.

Unlike those of `unit.mutation.table`, which a regression test must notice, these must be found by
the tools that users run, in a scenario of `unit.verify.scenarios`, and what the tool says must name
the right place.
"""

from __future__ import annotations

from unit.mutation.table.fixes import (
    ABSORB,
    ABSORB_ELSEWHERE,
    ACCELERATOR_IMPORT,
    DIST_IMPORT,
    EPILOGUE,
    EPILOGUE_REDUCES_FIRST,
    RECORD_AND_COMMENT,
    WAIT,
)
from unit.mutation.table.places import BF16, ENGINE, READINESS, REDUCE_RULE, SEQUENCE, SINK, ZERO
from unit.verify.gather_faults import GATHERS
from unit.verify.mutation_form import Mutation
from unit.verify.pipe_faults import PIPELINE
from unit.verify.zero3_faults import ZERO3

STREAMS = "deepspeed/runtime/streams.py"
SHARD_OPS = "deepspeed/comm/shard_ops.py"
REPLICATED = "deepspeed/runtime/gradients/replicated.py"
REPLICATED_REDUCTION = "deepspeed/runtime/optimizers/replicated_reduction.py"
PUBLISHER = "deepspeed/runtime/sharding/publisher.py"


JOIN = """\
            get_accelerator().current_stream().wait_stream(self.stream)
            while self._kept:
                self._let_go()
"""
RELEASE = "            self.side_stream.release(producers)\n"
FILL = "            payload = self._fill_buffer(buffer, index, grads)\n"
PRODUCER_NOT_AWAITED = r"never waits for <.*which wrote.*gradient of(.|\n)*average_tensor"
FREED_TOO_EARLY = r"(?i)freed(.|\n)*_fill"

CHECKER = (
    Mutation(
        "no wait for the producers", ZERO, ((WAIT, ""),), "streams: stage 2", PRODUCER_NOT_AWAITED
    ),
    Mutation(
        "a hook records the default stream",
        ZERO,
        (
            (
                "copy_streams.add(self.side_stream.current_stream())",
                "copy_streams.add(get_accelerator().default_stream())",
            ),
            (DIST_IMPORT, DIST_IMPORT + ACCELERATOR_IMPORT),
        ),
        "streams: stage 2",
        PRODUCER_NOT_AWAITED,
    ),
    Mutation(
        "no stream is recorded",
        ZERO,
        ((RECORD_AND_COMMENT, ""),),
        "streams: stage 2",
        PRODUCER_NOT_AWAITED,
    ),
    Mutation(
        "only the last producer is recorded",
        ZERO,
        (
            (
                "copy_streams.add(self.side_stream.current_stream())",
                "copy_streams = {self.side_stream.current_stream()}",
            ),
        ),
        "streams: stage 2",
        PRODUCER_NOT_AWAITED,
    ),
    Mutation(
        "no fallback to the current stream",
        ZERO,
        (
            (
                "wait_for(bucket.copy_streams or {self.side_stream.current_stream()})",
                "wait_for(bucket.copy_streams)",
            ),
        ),
        "streams: stage 1, no overlap",
        PRODUCER_NOT_AWAITED,
    ),
    Mutation(
        "the bucket is filled on the hook's stream",
        STREAMS,
        (
            (
                "        return get_accelerator().stream(self.stream)\n",
                "        return nullcontext()\n",
            ),
        ),
        "streams: stage 2",
        PRODUCER_NOT_AWAITED,
    ),
    Mutation(
        "producers do not wait for the copy",
        ZERO,
        ((RELEASE, ""),),
        "streams: stage 2",
        FREED_TOO_EARLY,
    ),
    Mutation(
        "a gradient is written again while it is copied",
        ZERO,
        ((RELEASE, ""),),
        "streams: static gradients",
        r"race: <default stream> never waits for <reduction stream>, which read(.|\n)*_fill",
    ),
    Mutation(
        "one of several producers waits for the copy",
        ZERO,
        ((RELEASE, RELEASE.replace("producers", "list(producers)[:1]")),),
        "streams: stage 1",
        FREED_TOO_EARLY,
    ),
    Mutation(
        "producers wait for what came before the copy",
        ZERO,
        ((RELEASE, ""), (FILL, RELEASE + FILL)),
        "streams: stage 2, no overlap",
        FREED_TOO_EARLY,
    ),
    Mutation(
        "an input is dropped before its producer waits",
        STREAMS,
        (("            stream.wait_event(oldest.event)\n", "            pass\n"),),
        "streams: checkpoints on the host",
        r"(?i)freed(.|\n)*_kept_on_host",
    ),
    Mutation(
        "the step does not wait for the reduction",
        STREAMS,
        ((JOIN, "".join(JOIN.splitlines(keepends=True)[1:])),),
        "streams: stage 2",
        r"gradient shard of group(.|\n)*local_squared_norm",
    ),
    Mutation(
        "the default stream waits for the reduction",
        STREAMS,
        ((JOIN, JOIN.replace("current_stream()", "default_stream()")),),
        "streams: stage 2 on a side stream",
        r"gradient shard of group(.|\n)*local_squared_norm",
    ),
    Mutation(
        "a reduced piece is used before its reduction",
        SHARD_OPS,
        (
            (
                "        for work in self._works:\n"
                "            work.wait()\n"
                "        self._works = []\n",
                "        self._works = []\n",
            ),
        ),
        "streams: stage 2",
        r"never waits for <nccl stream",
    ),
    Mutation(
        "gathered parameters are not awaited",
        PUBLISHER,
        (
            (
                "                self._gathers.popleft().wait()\n",
                "                self._gathers.popleft()\n",
            ),
        ),
        "streams: stage 2",
        r"never waits for <nccl stream.*flat parameters",
    ),
    Mutation(
        "an all-reduced accumulator is not awaited",
        REPLICATED,
        (("            flight.work.wait()\n", "            pass\n"),),
        "streams: BF16_Optimizer",
        r"never waits for <nccl stream.*group(.|\n)*all_reduce_flat",
    ),
    Mutation(
        "a bf16 hook works on another stream",
        BF16,
        ((ABSORB, ABSORB_ELSEWHERE),),
        "streams: BF16_Optimizer, from hooks",
        r"never waits for <.*gradient of(.|\n)*absorb_one",
    ),
    Mutation(
        "the host reads a slice before its copy",
        SINK,
        (("        event.synchronize()\n", ""),),
        "streams: stage 2, offload",
        r"the host never waits(.|\n)*_accumulate",
    ),
    Mutation(
        "a staging buffer is written while its copy is on its way",
        STREAMS,
        (("                event.synchronize()\n", "                pass\n"),),
        "streams: stage 1, bf16, Adam on the host",
        r"the host never waits(.|\n)*(_run|_rule|_deliver)",
    ),
    Mutation(
        "stage 0 sends a bucket without waiting for its producers",
        REPLICATED_REDUCTION,
        (
            (
                "        streams.wait_for(self._producers[bucket])\n",
                "",
            ),
        ),
        "streams: stage 0, overlapped",
        r"never waits for <backward stream.*which wrote(.|\n)*_send",
    ),
    Mutation(
        "stage 0 does not wait for its buckets",
        REPLICATED_REDUCTION,
        (("            self._streams.join()\n", ""),),
        "streams: stage 0, overlapped",
        r"never waits for <(reduction|nccl) stream",
    ),
)
LEDGER = (
    Mutation(
        "an absent gradient leaves what was in the bucket",
        ZERO,
        (("            torch._foreach_zero_(absent)\n", "            pass\n"),),
        "ledger: stage 2",
        r"never|sometimes",
    ),
    Mutation(
        "an absent gradient leaves what was in the flat buffer",
        REPLICATED,
        (("            torch._foreach_zero_(absent)\n", "            pass\n"),),
        "ledger: stage 0, no accumulation",
        r"sometimes",
    ),
    Mutation(
        "the first write adds to the last step's gradient",
        SINK,
        (("first = bucket not in self.written", "first = False"),),
        "ledger: stage 2",
        r"weight",
    ),
    Mutation(
        "a reduced piece is added twice",
        ZERO,
        (
            (
                "        if self.contiguous_gradients:\n"
                "            reduction.buffer.last_read = read\n",
                "        self._take_in(reduction, reduction.pending.wait())\n"
                "        if self.contiguous_gradients:\n"
                "            reduction.buffer.last_read = read\n",
            ),
        ),
        "ledger: stage 1",
        r"(?i)twice|doubled|instead of",
    ),
    Mutation(
        "divided by the number of ranks twice",
        REDUCE_RULE,
        (("post / accumulation_divisor)", "post / accumulation_divisor / self.world)"),),
        "ledger: stage 1",
        r"(?i)divided",
    ),
    Mutation(
        "the boundary micro-batch never joins",
        BF16,
        (
            (
                "        self.update_hp_grads()\n",
                "        if not self.tracker.is_boundary:\n            self.update_hp_grads()\n",
            ),
        ),
        "ledger: BF16_Optimizer",
        r"(?i)lost(.|\n)*micro-batch",
    ),
    Mutation(
        "reduced before the epilogue",
        ENGINE,
        ((EPILOGUE, EPILOGUE_REDUCES_FIRST),),
        "ledger: BF16_Optimizer",
        r"(?i)lost(.|\n)*micro-batch|late",
    ),
    Mutation(
        "the accumulator is not cleared",
        BF16,
        (
            (
                "        self.accumulator.clear()\n        self._reduced = False\n",
                "        self._reduced = False\n",
            ),
        ),
        "ledger: BF16_Optimizer",
        r"weight",
    ),
    Mutation(
        "a bucket is sealed early",
        READINESS,
        (("self._missing[self._next] == 0:", "self._missing[self._next] <= 1:"),),
        "ledger: stage 2",
        r"(?i)late",
    ),
    Mutation(
        "the last bucket is not sent",
        ZERO,
        (
            (
                "        for index in self.readiness.remaining():\n",
                "        for index in list(self.readiness.remaining())[:-1]:\n",
            ),
        ),
        "ledger: stage 1, no overlap",
        r"(?i)lost",
    ),
    Mutation(
        "instances keep their gradients to themselves",
        ZERO,
        (("        if self.instances.across is None:\n", "        if True:\n"),),
        "ledger: stage 2, 2 instances",
        r"(?i)wrong group|ranks",
    ),
    Mutation(
        "a bucket is used again while it is sent",
        ZERO,
        (
            (
                "        self.side_stream.join_unless_overlapped()\n",
                "        self.side_stream.join_unless_overlapped()\n"
                "        self._free_buffers.append(buffer)\n",
            ),
        ),
        "ledger: stage 2",
        r"weight|bias",
    ),
)
INTENT = (
    Mutation(
        "one rank skips the norm's reduction",
        ZERO,
        (
            (
                "        return self._norm_of(reduce_squared_norm(squares, self.norm_group))\n",
                "        if dist.get_rank() == 0:\n"
                "            reduce_squared_norm(squares, self.norm_group)\n"
                "        return self._norm_of(squares)\n",
            ),
        ),
        "intent: stage 2",
        r"(?i)all_reduce(.|\n)*reduce_squared_norm",
    ),
    Mutation(
        "one rank skips a bucket",
        ZERO,
        (
            (
                "        for index in self.readiness.remaining():\n",
                "        for index in list(self.readiness.remaining())[dist.get_rank() :]:\n",
            ),
        ),
        "intent: stage 1",
        r"_start_reduction",
    ),
    Mutation(
        "buckets leave as they are ready",
        READINESS,
        (
            (
                "        return range(first, self._next)\n\n    def remaining",
                "        return range(bucket, bucket + (not self._missing[bucket]))\n\n"
                "    def remaining",
            ),
        ),
        "intent: stage 2",
        r"(?i)do not agree(.|\n)*_start_reduction",
    ),
)
ORACLE = (
    Mutation(
        "unscaled with the next scale",
        SEQUENCE,
        (
            (
                "        return float(self._scaler.loss_scale)\n",
                "        after = type(self._scaler).__new__(type(self._scaler))\n"
                "        after.__dict__.update(self._scaler.__dict__)\n"
                "        after.update_scale(False)\n"
                "        return float(after.loss_scale)\n",
            ),
        ),
        "oracle: fp16",
        r"weight is off",
    ),
    Mutation(
        "parameters are not gathered",
        PUBLISHER,
        (("        if group.num_shards == 1:\n", "        if True:\n"),),
        "oracle: stage 1",
        r"weight is off",
    ),
    Mutation(
        "masters are not written back",
        PUBLISHER,
        (("        elif not self._rounded and not group.aliased:\n", "        elif False:\n"),),
        "oracle: BF16_Optimizer",
        r"weight is off",
    ),
)
MUTATIONS = (*CHECKER, *LEDGER, *INTENT, *ORACLE, *PIPELINE, *ZERO3, *GATHERS)
