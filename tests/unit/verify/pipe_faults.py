"""Faults of the pipeline engine, of experts and of the norm over stages, for the table in
`faults`.
"""

from __future__ import annotations

from unit.verify.mutation_form import Mutation

PIPELINE = (
    Mutation(
        "a gradient is not received",
        "_lower: kind in (BackwardPass, BackwardInputPass) and part < self._last_part -> ... "
        "and (micro_batch != 2)",
        "simulator: schedules",
        r"before RecvGrad has written it\n *at stage 0, step",
    ),
    Mutation(
        "a gradient is sent before its backward",
        "_lower: self._sends.append(SendGrad(buffer_id, micro_batch=micro_batch, chunk=chunk)) "
        "-> step.insert(-1, SendGrad(buffer_id, micro_batch=micro_batch, chunk=chunk))",
        "simulator: schedules",
        r"before BackwardPass .*\n *at stage [1-3], step \d+, SendGrad",
    ),
    Mutation(
        "activations are not received",
        "_exec_recv_activations: self.pipe_buffers[buffer_id].fill(channel.recv()) -> if "
        "micro_batch == 2:\n    return\n...",
        "engine: pipe",
        r"empty pipeline buffer(.|\n)*no load or receive",
    ),
    Mutation(
        "an activation buffer is used again early",
        "_reserve_pipe_buffers: [PipeBuffer() for _ in range(num_buffers - "
        "len(self.pipe_buffers))] -> [PipeBuffer()] * (num_buffers - len(self.pipe_buffers))",
        "engine: pipe",
        "reuses it early",
    ),
    Mutation(
        "sends are reordered",
        (
            "Channel.send: if is_first or self.dynamic: ... -> pass",
            (
                "Channel.send: self._send_tensors(spec.tensors, tensors) -> ...\nif is_first or "
                "self.dynamic: self._send_description(spec)"
            ),
        ),
        "intent: pipe",
        r"message number 0 (.|\n)*_send_piece(.|\n)*_receive_piece|message number 0 "
        r"(.|\n)*_receive_piece(.|\n)*_send_piece",
    ),
    Mutation(
        "gradients are received into fp32 buffers",
        "keep_roots: torch.empty_like(tensor, device='meta', requires_grad=False) -> "
        "torch.empty_like(tensor, device='meta', requires_grad=False, dtype=torch.float32)",
        "intent: pipe, zero bubble, bf16",
        r"do not agree on message number 0 (.|\n)*_receive_piece",
    ),
    Mutation(
        "an activation is not sent",
        "_exec_send_activations: channel.send(buffer.outputs) -> if micro_batch != 2:\n    ...",
        "intent: pipe",
        r"irecv(.|\n)*_receive_piece",
    ),
    Mutation(
        "the timer waits for the device",
        "begin_span: event = accelerator.Event(enable_timing=True) -> "
        "accelerator.synchronize(); ...",
        "device: pipe",
        r"waits for the whole device at\n.*timer.py:\d+ in begin_span(.|\n)*irecv from rank 0 "
        r"is posted(.|\n)*_receive_piece",
    ),
    Mutation(
        "a receive is posted too early",
        "_Lane.post: self._coming[0][1] <= self._issued -> True",
        "device: pipe, waiting host",
        "wait for work that depends on work which they have not "
        r"issued(.|\n)*work._event.synchronize\(\)(.|\n)*for irecv from rank 0, which was "
        "issued at",
    ),
    Mutation(
        "messages are taken in another order",
        "Channel.recv: posted = self._taken() -> self._posted.rotate(); ...",
        "oracle: pipe",
        "loss .* is not",
    ),
    Mutation(
        "a tied gradient is summed twice",
        "_exec_reduce_tied_grads: dist.all_reduce(sequence.local_gradient(param), group=group) "
        "-> ...; ...",
        "ledger: pipe",
        r"doubled: summed over the parts of the model that share it twice; 1 parameter\(s\): "
        "tied_modules.embed.weight",
    ),
    Mutation(
        "a tied gradient stays on its stage",
        "_exec_reduce_tied_grads: dist.all_reduce(sequence.local_gradient(param), group=group) "
        "-> sequence.local_gradient(param)",
        "ledger: pipe, stage 1, 4 ranks",
        "not summed over the parts of the model that share it: each has its own; 1 "
        r"parameter\(s\): tied_modules.embed.weight",
    ),
    Mutation(
        "a tied gradient leaves before it is summed",
        "PipelineEngine.__init__: self._sequence.hold(...) -> self._sequence.hold(())",
        "ledger: pipe, stage 1, 4 ranks",
        "tied_modules.embed.weight",
    ),
    Mutation(
        "the last micro-batch is skipped",
        "_training_plan: schedule.make_schedule(self._schedule_name, count, self.num_stages, "
        "stage, chunks) -> schedule.make_schedule(self._schedule_name, count - 1, "
        "self.num_stages, stage, chunks)",
        "ledger: pipe",
        r"lost: the backward of micro-batch 4 of 4 never ran on rank\(s\) \[0, 1\]",
    ),
    Mutation(
        "weights miss a micro-batch",
        "_exec_backward_weight_pass: buffer.split is not None and (not buffer.split.is_whole) "
        "-> ... and (micro_batch != 1)",
        "ledger: pipe, zero bubble, bf16",
        "lost: the backward of micro-batch 2 of 4 never ran",
    ),
    Mutation(
        "the loss is not divided",
        "_backward_roots: buffer.loss / self.micro_batches -> buffer.loss * 1.0",
        "ledger: pipe",
        r"not divided by the accumulation steps(.|\n)*1.linear.weight",
    ),
    Mutation(
        "replicas of tied weights count in the norm",
        "norm_selection.counts: if getattr(param, 'ds_pipe_replicated', False): ... -> pass",
        "oracle: pipe",
        "norm .* is not",
    ),
    Mutation(
        "the norm is reduced per group",
        (
            (
                "scaled_global_norm: squares[index] += local_squared_norm(own, self.device, "
                "others).squeeze() -> ...; squares[index] = "
                "reduce_squared_norm(squares[index].clone(), self.norm_group)"
            ),
            (
                "ModelParameters.scaled_global_norm: reduce_squared_norm(squares, "
                "self.norm_group) -> squares"
            ),
        ),
        "intent: pipe, uneven groups",
        "scaled_global_norm|reduce_squared_norm",
    ),
    Mutation(
        "experts are divided by their holders only",
        "reduce_gradients: super()._tell_settled(self.read_factor) -> from deepspeed import comm "
        "as dist\nfor gradients, group in zip(self.reduction.gradients, "
        "self.reduction._replicas):\n    world = "
        "dist.get_world_size(group=self.dp_process_group)\n    gradients.flat.mul_(world / "
        "dist.get_world_size(group=group))\n...",
        "ledger: experts, 4 ranks",
        r"divided by the number of ranks that hold it \(2\) instead of all(.|\n)*deepspeed_experts",
    ),
    Mutation(
        "experts are reduced over the dense group",
        "GradientContext.replicas: expert_group is None -> True",
        "ledger: experts, 4 ranks",
        r"reduced together with other ranks' parameters of the same name(.|\n)*deepspeed_experts",
    ),
    Mutation(
        "a gradient is sent before it is complete",
        "_exec_send_grads: channel.send_like(buffer.input_grads()) -> from "
        "deepspeed.accelerator import get_accelerator\nwith "
        "get_accelerator().stream(get_accelerator().Stream()): ...",
        "streams: pipe",
        r"never waits for(.|\n)*_exec_send_grads",
    ),
    Mutation(
        "a message is used before it is there",
        "_complete: self._wait(work) -> pass",
        "streams: pipe",
        "never waits for <nccl stream.*from rank",
    ),
    Mutation(
        "a message is used before it is there, seen by the numbers",
        "_complete: self._wait(work) -> pass",
        "oracle: pipe on the device",
        "is off by|is not",
    ),
    Mutation(
        "all messages arrive in one buffer",
        "_post_tensors: posted.arrival = layout_of(plain).allocate(self._wire_device) -> "
        "self._one = getattr(self, '_one', None) or "
        "layout_of(plain).allocate(self._wire_device); posted.arrival = self._one",
        "streams: pipe",
        r"race(.|\n)*_receive_piece",
    ),
)
