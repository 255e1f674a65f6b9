"""Faults of the pipeline engine, of experts and of the norm over stages, for the table in
`faults`.
"""

from __future__ import annotations

from unit.verify.mutation_form import Mutation

PIPE = "deepspeed/runtime/pipe/"
ENGINE, CHANNEL, SCHEDULE, BUFFERS = (
    PIPE + name for name in ("engine.py", "channel.py", "schedule.py", "buffers.py")
)
REPLICATED = "deepspeed/runtime/optimizers/replicated_optimizer.py"
MODEL_RANKS = "deepspeed/runtime/sharding/model_ranks.py"
SEQUENCE = "deepspeed/runtime/optimizers/step_sequence.py"
TIMER = "deepspeed/utils/timer.py"
STAGE_CHANNELS = PIPE + "stage_channels.py"

TIED = "            dist.all_reduce(sequence.local_gradient(param), group=group)\n"
SEND_GRADS = """\
        channel.send_like(buffer.input_grads())  # type: ignore[union-attr]  # as above
"""
COMPLETE = "    def _complete(self, posted: _Posted) -> list[torch.Tensor]:\n"
COMPLETE_WAITS = COMPLETE + "        for work in posted.works:\n            self._wait(work)\n"
DESCRIBE = "        if is_first or self.dynamic:\n            self._send_description(spec)\n"
SEND_TENSORS = "        self._send_tensors(spec.tensors, tensors)\n"
NORM = "            squares[index] += local_squared_norm(own, self.device, others).squeeze()\n"
REDUCED_NORM = "        return self._norm_of(reduce_squared_norm(squares, self.norm_group))\n"

PIPELINE = (
    Mutation(
        "a gradient is not received",
        SCHEDULE,
        (
            (
                "if kind in (BackwardPass, BackwardInputPass) and part < self._last_part:",
                "if kind in (BackwardPass, BackwardInputPass) and part < self._last_part "
                "and micro_batch != 2:",
            ),
        ),
        "simulator: schedules",
        r"before RecvGrad has written it\n *at stage 0, step",
    ),
    Mutation(
        "a gradient is sent before its backward",
        SCHEDULE,
        (
            (
                "self._sends.append(SendGrad(buffer_id, micro_batch=micro_batch, chunk=chunk))",
                "step.insert(-1, SendGrad(buffer_id, micro_batch=micro_batch, chunk=chunk))",
            ),
        ),
        "simulator: schedules",
        r"before BackwardPass .*\n *at stage [1-3], step \d+, SendGrad",
    ),
    Mutation(
        "activations are not received",
        ENGINE,
        (
            (
                "        channel = self.channels.chunks[chunk].activations_in\n",
                "        channel = self.channels.chunks[chunk].activations_in\n"
                "        if micro_batch == 2:\n"
                "            return\n",
            ),
        ),
        "engine: pipe",
        r"empty pipeline buffer(.|\n)*no load or receive",
    ),
    Mutation(
        "an activation buffer is used again early",
        ENGINE,
        (
            (
                "[PipeBuffer() for _ in range(num_buffers - len(self.pipe_buffers))]",
                "[PipeBuffer()] * (num_buffers - len(self.pipe_buffers))",
            ),
        ),
        "engine: pipe",
        r"reuses it early",
    ),
    Mutation(
        "sends are reordered",
        CHANNEL,
        ((DESCRIBE + SEND_TENSORS, SEND_TENSORS + DESCRIBE),),
        "intent: pipe",
        r"message number 0 (.|\n)*_send_piece(.|\n)*_receive_piece|"
        r"message number 0 (.|\n)*_receive_piece(.|\n)*_send_piece",
    ),
    Mutation(
        "gradients are received into fp32 buffers",
        BUFFERS,
        (
            (
                'torch.empty_like(tensor, device="meta", requires_grad=False)',
                'torch.empty_like(tensor, device="meta", requires_grad=False, dtype=torch.float32)',
            ),
        ),
        "intent: pipe, zero bubble, bf16",
        r"do not agree on message number 0 (.|\n)*_receive_piece",
    ),
    Mutation(
        "an activation is not sent",
        ENGINE,
        (
            (
                "        channel.send(buffer.outputs)  #",
                "        if micro_batch != 2:\n            channel.send(buffer.outputs)  #",
            ),
        ),
        "intent: pipe",
        r"irecv(.|\n)*_receive_piece",
    ),
    Mutation(
        "the timer waits for the device",
        TIMER,
        (
            (
                "    event = accelerator.Event(enable_timing=True)\n",
                "    accelerator.synchronize()\n"
                "    event = accelerator.Event(enable_timing=True)\n",
            ),
        ),
        "device: pipe",
        r"waits for the whole device at\n.*timer.py:\d+ in begin_span(.|\n)*irecv from rank 0 is "
        r"posted(.|\n)*_receive_piece",
    ),
    Mutation(
        "a receive is posted too early",
        STAGE_CHANNELS,
        (("            and self._coming[0][1] <= self._issued\n", ""),),
        "device: pipe, waiting host",
        r"wait for work that depends on work which they have not issued(.|\n)*"
        r"work._event.synchronize\(\)(.|\n)*for irecv from rank 0, which was issued at",
    ),
    Mutation(
        "messages are taken in another order",
        CHANNEL,
        (
            (
                "        posted = self._taken()\n        tensors",
                "        self._posted.rotate()\n        posted = self._taken()\n        tensors",
            ),
        ),
        "oracle: pipe",
        r"loss .* is not",
    ),
    Mutation(
        "a tied gradient is summed twice",
        ENGINE,
        ((TIED, TIED + TIED),),
        "ledger: pipe",
        r"doubled: summed over the parts of the model that share it twice; "
        r"1 parameter\(s\): tied_modules.embed.weight",
    ),
    Mutation(
        "a tied gradient stays on its stage",
        ENGINE,
        ((TIED, "            sequence.local_gradient(param)\n"),),
        "ledger: pipe, stage 1, 4 ranks",
        r"not summed over the parts of the model that share it: each has its own; "
        r"1 parameter\(s\): tied_modules.embed.weight",
    ),
    Mutation(
        "a tied gradient leaves before it is summed",
        ENGINE,
        (
            (
                "            self._sequence.hold(weight for weight, _ in self._tied)\n",
                "            self._sequence.hold(())\n",
            ),
        ),
        "ledger: pipe, stage 1, 4 ranks",
        r"tied_modules.embed.weight",
    ),
    Mutation(
        "the last micro-batch is skipped",
        ENGINE,
        (
            (
                "schedule.make_schedule(self._schedule_name, count, self",
                "schedule.make_schedule(self._schedule_name, count - 1, self",
            ),
        ),
        "ledger: pipe",
        r"lost: the backward of micro-batch 4 of 4 never ran on rank\(s\) \[0, 1\]",
    ),
    Mutation(
        "weights miss a micro-batch",
        ENGINE,
        (
            (
                "if buffer.split is not None and not buffer.split.is_whole:",
                "if buffer.split is not None and not buffer.split.is_whole and micro_batch != 1:",
            ),
        ),
        "ledger: pipe, zero bubble, bf16",
        r"lost: the backward of micro-batch 2 of 4 never ran",
    ),
    Mutation(
        "the loss is not divided",
        ENGINE,
        (
            (
                "self._with_loss_scale(buffer.loss / self.micro_batches)",
                "self._with_loss_scale(buffer.loss * 1.0)",
            ),
        ),
        "ledger: pipe",
        r"not divided by the accumulation steps(.|\n)*1.linear.weight",
    ),
    Mutation(
        "replicas of tied weights count in the norm",
        MODEL_RANKS,
        (
            (
                '        if getattr(param, "ds_pipe_replicated", False):\n'
                "            return False\n",
                "",
            ),
        ),
        "oracle: pipe",
        r"norm .* is not",
    ),
    Mutation(
        "the norm is reduced per group",
        REPLICATED,
        (
            (
                NORM,
                NORM + "            squares[index] = "
                "reduce_squared_norm(squares[index].clone(), self.norm_group)\n",
            ),
            (REDUCED_NORM, "        return self._norm_of(squares)\n"),
        ),
        "intent: pipe, uneven groups",
        r"scaled_global_norm|reduce_squared_norm",
    ),
    Mutation(
        "experts are divided by their holders only",
        REPLICATED,
        (
            (
                "            super()._settle(self.read_factor)\n",
                "            for gradients, family in zip(self.gradients, self._families):\n"
                "                group = self._replicas(family.expert_group)\n"
                "                world = dist.get_world_size(group=self.dp_process_group)\n"
                "                gradients.flat.mul_(world / dist.get_world_size(group=group))\n"
                "            super()._settle(self.read_factor)\n",
            ),
            ("import torch\n\n", "import torch\n\nfrom deepspeed import comm as dist\n"),
        ),
        "ledger: experts, 4 ranks",
        r"divided by the number of ranks that hold it \(2\) instead of all(.|\n)*deepspeed_experts",
    ),
    Mutation(
        "experts are reduced over the dense group",
        SEQUENCE,
        (
            (
                "        if expert_group is None:\n            return self.dp_process_group\n",
                "        if True:\n            return self.dp_process_group\n",
            ),
        ),
        "ledger: experts, 4 ranks",
        r"reduced together with other ranks' parameters of the same name(.|\n)*deepspeed_experts",
    ),
    Mutation(
        "a gradient is sent before it is complete",
        ENGINE,
        (
            (
                SEND_GRADS,
                "        with get_accelerator().stream(get_accelerator().Stream()):\n"
                "    " + SEND_GRADS,
            ),
            (
                "from deepspeed import comm as dist\n",
                "from deepspeed import comm as dist\n"
                "from deepspeed.accelerator import get_accelerator\n",
            ),
        ),
        "streams: pipe",
        r"never waits for(.|\n)*_exec_send_grads",
    ),
    Mutation(
        "a message is used before it is there",
        CHANNEL,
        ((COMPLETE_WAITS, COMPLETE),),
        "streams: pipe",
        r"never waits for <nccl stream.*from rank",
    ),
    Mutation(
        "a message is used before it is there, seen by the numbers",
        CHANNEL,
        ((COMPLETE_WAITS, COMPLETE),),
        "oracle: pipe on the device",
        r"is off by|is not",
    ),
    Mutation(
        "all messages arrive in one buffer",
        CHANNEL,
        (
            (
                "        posted.arrival = layout_of(plain).allocate(self._wire_device)\n",
                '        self._one = getattr(self, "_one", None) or '
                "layout_of(plain).allocate(self._wire_device)\n"
                "        posted.arrival = self._one\n",
            ),
        ),
        "streams: pipe",
        r"race(.|\n)*_receive_piece",
    ),
)
