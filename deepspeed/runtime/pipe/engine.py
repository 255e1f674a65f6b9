"""The pipeline engine: runs a schedule's instructions on one stage, and hands gradients to the same
step sequence as every engine.

Reads as a batch goes: `train_batch`, the instructions (load, receive, forward, send, backward), the
two reductions, the step.

With m micro-batches the loss of each is divided by m where it arises, on the last stage; what flows
back is then the gradient of the mean, and no stage divides again. Each stage reduces over the ranks
that hold its layers; the norm is one reduction over all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from deepspeed import comm as dist
from deepspeed._lazy import lazy_attributes
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.engine import DeepSpeedEngine, autocast_if_enabled
from deepspeed.runtime.gradients.accumulation import BackwardState
from deepspeed.runtime.gradients.scope import GradientScope, Passes
from deepspeed.runtime.optimizers.master_weights import MasterWeights
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.buffers import BatchOutputs, MicroBatches, PipeBuffer, described
from deepspeed.runtime.pipe.canonical_leaves import CanonicalLeaves
from deepspeed.runtime.pipe.messages.failure import FailureWatch
from deepspeed.runtime.pipe.messages.posting import Plan, plan_of
from deepspeed.runtime.pipe.messages.stage_channels import StageChannels
from deepspeed.runtime.pipe.module import PipelineError, PipelineModule
from deepspeed.runtime.pipe.settings import apply_settings
from deepspeed.runtime.pipe.split_backward import SplitBackward
from deepspeed.runtime.utils import move_to_device
from deepspeed.utils.logging import log_dist, logger

# Upstream's further names here say what to use instead.
__getattr__ = lazy_attributes(__name__)


class PipelineEngine(DeepSpeedEngine):
    """Trains a `PipelineModule`, one stage per rank, by `train_batch` and `eval_batch`.

    Attributes:
        micro_batches: Micro-batches per `train_batch`, the gradient accumulation steps.
        agg_train_loss: What the last `train_batch` returned; the same on all ranks.
    """

    module: PipelineModule
    _calls_model = False

    def __init__(
        self, has_bool_tensors: bool = False, *super_args: Any, **super_kwargs: Any
    ) -> None:
        super().__init__(*super_args, **super_kwargs)
        module = self.module
        self.grid = module.grid
        self.num_stages = module.num_stages
        self.stage_id = module.stage_id
        self._failures = FailureWatch(
            range(self.world_size), name="pipeline", place=f"stage {module.stage_id}"
        )
        self.channels = StageChannels(module, self.device, self._failures)
        self.pipe_buffers: list[PipeBuffer] = []
        self._plans: dict[int, Plan] = {}  # by number of micro-batches
        self._difficulty: int | None = None  # of the batch before, with `curriculum_learning`
        self._micro_batches = MicroBatches()
        if self.training_dataloader is not None:
            # First and last stage see the same order: it is seeded, not drawn.
            self._micro_batches.iterator = iter(RepeatingLoader(self.training_dataloader))
        self._tied = self._tied_weights()
        is_canonical = self._config.tree.reproducibility.world_size_invariant
        self._leaves = (
            CanonicalLeaves(module, self.device, self._failures) if is_canonical else None
        )
        if self._sequence is not None:
            # Complete only after the reduction over stages, or with another chunk: no bucket may
            # take it from its hook.
            waits_for_chunks = self._leaves is not None and module.num_model_chunks > 1
            others = module.parameters() if waits_for_chunks else ()
            self._sequence.hold([weight for weight, _ in self._tied] + list(others))
        self._passes_left = 0  # backwards that still accumulate into weights in this batch
        self._training_batch = True
        self._compute_loss = True
        # Of micro-batches whose last part comes later, by micro-batch.
        self._labels: dict[int | None, Any] = {}
        self._outputs = BatchOutputs(self.parallel_map, self.device)
        self.agg_train_loss: torch.Tensor | None = None

    # Construction

    def _check_settings(self) -> None:
        self._schedule_name = apply_settings(self._config, self.module)

    def _tied_weights(self) -> list[tuple[torch.nn.Parameter, Any]]:
        """Trainable weights that other stages hold too, with the group of those stages."""
        tied = self.module.get_tied_weights_and_groups()
        return [
            (w, group) for w, group in tied if isinstance(w, torch.nn.Parameter) and w.requires_grad
        ]

    def _gradient_scope(self) -> GradientScope:
        """The base class's, with the weights that stages share and the passes of the schedule."""
        passes = Passes(
            self.tracker.divisor, self.module.num_model_chunks, self.parallel_map.pipe.group
        )
        scope = super()._gradient_scope()
        return replace(scope, shared=[*self._tied_weights(), *scope.shared], passes=passes)

    def set_dataloader(self, loader: Iterable[Any] | None) -> None:
        """Read micro-batches from `loader`, on the first and the last stage."""
        if self.is_first_stage() or self.is_last_stage():
            self.training_dataloader = loader
            self._micro_batches.iterator = iter(loader) if loader is not None else None

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        if self.is_first_stage() or self.is_last_stage():
            self.training_dataloader = None
            self._micro_batches.iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Pass every micro-batch through `fn`, which returns `(inputs, labels)`."""
        self._micro_batches.prepare = fn

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: channels see by themselves which tensors need gradients."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches per `train_batch`."""
        return self._config.gradient_accumulation_steps

    # Place

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    def _is_first_part(self, chunk: int) -> bool:
        return self.is_first_stage() and chunk == 0

    def _is_last_part(self, chunk: int) -> bool:
        return self.is_last_stage() and chunk == self.module.num_model_chunks - 1

    # Batches

    # A pipeline's loss is its module's loss_fn.
    def train_batch(  # type: ignore[override]
        self, data_iter: Iterator[Any] | None = None
    ) -> torch.Tensor:
        """Run `micro_batches` micro-batches and one optimizer step on all ranks.

        Args:
            data_iter: Where first and last stage read `(inputs, labels)` from, in the same order;
                None: as set before.

        Returns:
            Mean loss over micro-batches and data-parallel ranks, fp32, 0-dim, on all ranks.

        Raises:
            RuntimeError: If gradients are disabled.
            PipelinePeerError: If another rank raised; with its traceback.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "train_batch() needs gradients, but they are disabled here; use eval_batch() "
                "instead"
            )
        sequence = self._require_optimizer("train_batch")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._passes_left = self.micro_batches * self.module.num_model_chunks
        self._begin_window(plain=False)
        sequence.accumulation_divisor = self._losses.late_divisor()
        if self._leaves is not None:
            self._leaves.begin()
        micro_steps = self.micro_steps
        with self._failures.guard():
            self._take_difficulty()
            self._run_batch(self._training_plan(), training=True)
            self.agg_train_loss = self._outputs.mean_loss(self.micro_batches)
            self.timers.saw_batch_loss(self.agg_train_loss)
        self.micro_steps = micro_steps + self.micro_batches
        self._checkpoints.on_step()  # last: when it raises, the step has been taken
        return self.agg_train_loss

    def _take_difficulty(self) -> None:
        """Go to this batch's difficulty, by which the script's `batch_fn` cuts it."""
        scheduler = self.curriculum_scheduler_legacy
        if scheduler is None:
            return
        difficulty = scheduler.update_difficulty(self.global_steps + 1)
        if difficulty != self._difficulty:
            self._difficulty = difficulty
            self.reset_activation_shape()  # other lengths are other shapes

    def _training_plan(self) -> Plan:
        count, chunks = self.micro_batches, self.module.num_model_chunks
        if count not in self._plans:
            stages = [
                schedule.make_schedule(self._schedule_name, count, self.num_stages, stage, chunks)
                for stage in range(self.num_stages)
            ]
            self._plans[count] = plan_of(stages, self.stage_id)
        return self._plans[count]

    def _evaluation_plan(self, count: int) -> Plan:
        chunks = self.module.num_model_chunks
        stages = [
            schedule.InferenceSchedule(count, self.num_stages, stage, chunks)
            for stage in range(self.num_stages)
        ]
        return plan_of(stages, self.stage_id)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run forward of several micro-batches without gradients. All ranks must call it.

        Args:
            data_iter: Where first and last stage read `(inputs, labels)` from.
            return_logits: Return the last layer's outputs too, a list on the last stage, else None.
            compute_loss: Apply the module's `loss_fn`; otherwise the result is made of the outputs.
            reduce_output: "avg": mean over micro-batches and data-parallel ranks; None: the list
                over micro-batches.
            bcast_loss: Let all stages have the reduced loss; otherwise, and without `compute_loss`,
                only the last stage has it.
            num_micro_batches: How many; None: as many as `train_batch`.

        Returns:
            The result, None where there is none; with `return_logits` a tuple with the logits.
        """
        if reduce_output not in ("avg", None):
            raise ValueError(f"eval_batch(reduce_output={reduce_output!r}): use 'avg' or None")
        micro_batches = num_micro_batches or self.micro_batches
        was_training, source = self.module.training, self._micro_batches
        kept = source.iterator, self.training_dataloader
        self.set_dataiterator(data_iter)
        self._compute_loss = compute_loss
        try:
            with torch.no_grad(), self._failures.guard():
                self._run_batch(self._evaluation_plan(micro_batches), training=False)
                result: Any = self._outputs.results if self.is_last_stage() else None
                if reduce_output is not None:
                    result = self._outputs.mean_result()
                    if bcast_loss and compute_loss:
                        result = self._outputs.broadcast_scalar(result)
        finally:
            source.iterator, self.training_dataloader = kept
            self._compute_loss = True
            self.module.train(was_training)
        logits = self._outputs.logits if self.is_last_stage() else None
        return (result, logits) if return_logits else result

    def _run_batch(self, plan: Plan, training: bool) -> None:
        self.module.train(training)
        if training != self._training_batch:
            # Evaluation has other shapes, and no gradients: both ends of every channel forget what
            # they know, at the same message.
            self.channels.reset()
            self._training_batch = training
        self._outputs = BatchOutputs(self.parallel_map, self.device)
        self._labels.clear()
        for buffer in self.pipe_buffers:
            buffer.release()
        self.channels.expect(plan.schedule.num_micro_batches, plan.arrivals)
        self._exec_schedule(plan.schedule)
        self.channels.finish()

    def reset_activation_shape(self) -> None:
        """Let the next batch have other shapes. Call it on all ranks between two batches; not
        needed with `dynamic_shape`.
        """
        self.channels.reset()

    def _reserve_pipe_buffers(self, num_buffers: int) -> None:
        self.pipe_buffers += [PipeBuffer() for _ in range(num_buffers - len(self.pipe_buffers))]

    def _exec_schedule(self, pipe_schedule: schedule.PipeSchedule) -> None:
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        commands = (command for step in pipe_schedule.steps() for command in step)
        self.channels.issued(0)
        for count, command in enumerate(commands, 1):
            self._INSTRUCTION_MAP[type(command)](self, **command.kwargs)
            self.channels.issued(count)

    # Data

    def _exec_load_micro_batch(
        self, buffer_id: int, micro_batch: int | None = None, chunk: int = 0
    ) -> None:
        """Read a micro-batch, once on every rank: its inputs on the first part, its labels on the
        last. A rank that has both ends of the pipeline, in different chunks, puts the labels aside.
        """
        buffer = self.pipe_buffers[buffer_id]
        if self._is_last_part(chunk) and micro_batch in self._labels:
            labels = self._labels.pop(micro_batch)
        else:
            inputs, labels = self._micro_batches.next()
            if self._is_first_part(chunk):
                buffer.fill(self._prepared(inputs))
        if self._is_last_part(chunk):
            buffer.labels = move_to_device(labels, self.device) if labels is not None else None
        elif self.num_stages == 1:
            self._labels[micro_batch] = labels

    def _prepared(self, inputs: object) -> Any:
        if isinstance(inputs, list):
            inputs = tuple(inputs)
        inputs = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda tensor: move_to_device(tensor.detach(), self.device), inputs
        )
        if self.fp16_auto_cast():
            inputs, _ = self._cast_inputs(inputs, {})
        return inputs

    # Messages

    def _exec_recv_activations(
        self, buffer_id: int, micro_batch: int | None = None, chunk: int = 0
    ) -> None:
        channel = self.channels.chunks[chunk].activations_in
        self.pipe_buffers[buffer_id].fill(channel.recv())  # type: ignore[union-attr]  # schedules receive where there is a channel

    def _exec_send_activations(
        self, buffer_id: int, micro_batch: int | None = None, chunk: int = 0
    ) -> None:
        buffer, channel = self.pipe_buffers[buffer_id], self.channels.chunks[chunk].activations_out
        channel.send(buffer.outputs)  # type: ignore[union-attr]  # schedules send where there is a channel
        buffer.outputs = None
        if self._training_batch:
            self.channels.chunks[chunk].gradients_in.expect_like(buffer.likes)  # type: ignore[union-attr]  # as above
        else:
            buffer.release()

    def _exec_recv_grads(
        self, buffer_id: int, micro_batch: int | None = None, chunk: int = 0
    ) -> None:
        buffer, channel = self.pipe_buffers[buffer_id], self.channels.chunks[chunk].gradients_in
        buffer.grads = channel.recv_like(buffer.likes)  # type: ignore[union-attr]  # as above

    def _exec_send_grads(
        self, buffer_id: int, micro_batch: int | None = None, chunk: int = 0
    ) -> None:
        buffer, channel = self.pipe_buffers[buffer_id], self.channels.chunks[chunk].gradients_out
        channel.send_like(buffer.input_grads())  # type: ignore[union-attr]  # as above
        if buffer.split is None:
            buffer.release()
        if self._leaves is not None:
            self._leaves.send()

    # The forward pass

    def _exec_forward_pass(
        self, buffer_id: int, micro_batch: int | None = None, chunk: int = 0
    ) -> None:
        buffer = self.pipe_buffers[buffer_id]
        inputs = buffer.take_inputs()
        data = (inputs,) if self._is_first_part(chunk) else ()
        self.timers.start_forward(self._training_batch, data)
        seed = None
        if self._training_batch and self._seeds_forwards and micro_batch is not None:
            seed = partial(self._seed_forward, micro_batch)
        with autocast_if_enabled(self):
            outputs = self.module.forward_chunk(chunk, inputs, seed)
            if self._is_last_part(chunk):
                self._take_output(buffer, outputs)
            else:
                buffer.outputs = outputs
                buffer.keep_roots(outputs)
        self.timers.stop_forward()

    def _take_output(self, buffer: PipeBuffer, outputs: object) -> None:
        """Keep the loss, or what stands for it in a module without `loss_fn`."""
        loss_fn = self.module.loss_fn if self._compute_loss else None
        result = outputs if loss_fn is None else loss_fn(outputs, buffer.labels)
        if not self._training_batch:
            self._outputs.results.append(result)
            self._outputs.logits.append(outputs)
            buffer.release()
            return
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            raise PipelineError(
                "the last stage must end in a scalar loss to be trained: give "
                "PipelineModule(loss_fn=...), or a last layer that returns one (got "
                f"{described(result)})"
            )
        buffer.loss = result
        self._outputs.add_loss(result, self.module.get_additional_losses())

    # The backward pass

    def _backward_roots(
        self, buffer: PipeBuffer, micro_batch: int, chunk: int
    ) -> list[torch.Tensor | None]:
        """Fill in where backward starts on the last part; returns the gradient of each root."""
        if not self._is_last_part(chunk):
            return list(buffer.grads)
        if not buffer.loss.requires_grad:
            return []
        sequence = self._require_optimizer("train_batch")
        sequence.observer.loss_known(micro_batch, buffer.loss)
        scaled = self._losses.scaled(sequence, buffer.loss, True)
        buffer.keep_roots(scaled)
        return [torch.ones_like(scaled)]

    def _exec_backward_pass(self, buffer_id: int, micro_batch: int, chunk: int = 0) -> None:
        buffer = self.pipe_buffers[buffer_id]
        with self._weight_gradients(micro_batch, chunk):
            grads = self._backward_roots(buffer, micro_batch, chunk)
            if grads:
                torch.autograd.backward(buffer.roots, grads)
        if self._is_first_part(chunk):
            buffer.release()

    def _exec_backward_input_pass(self, buffer_id: int, micro_batch: int, chunk: int = 0) -> None:
        """Zero bubble: what the stage before waits for."""
        buffer = self.pipe_buffers[buffer_id]
        grads = self._backward_roots(buffer, micro_batch, chunk)
        buffer.split = SplitBackward(buffer.roots, grads, buffer.leaves)
        if buffer.split.is_whole:
            with self._weight_gradients(micro_batch, chunk):
                buffer.split.backward_inputs()
            return
        for leaf, grad in zip(buffer.leaves, buffer.split.backward_inputs(), strict=True):
            leaf.grad = grad

    def _exec_backward_weight_pass(self, buffer_id: int, micro_batch: int, chunk: int = 0) -> None:
        """Zero bubble: what nobody waits for before the step."""
        buffer = self.pipe_buffers[buffer_id]
        if buffer.split is not None and not buffer.split.is_whole:
            with self._weight_gradients(micro_batch, chunk):
                buffer.split.backward_weights()
            if self._leaves is not None:
                self._leaves.send()
        buffer.release()

    @contextmanager
    def _weight_gradients(self, micro_batch: int, chunk: int) -> Iterator[None]:
        """A backward that accumulates into weights; the last one of a batch is the boundary."""
        self._passes_left -= 1
        self.tracker.set_boundary(self._passes_left == 0)
        sequence = self._begin_managed_backward()
        sequence.observer.pass_opened(micro_batch, chunk)
        try:
            yield
        except BaseException:
            self._abort_backward()
            raise
        self.timers.start_reduce()
        sequence.backward_epilogue()
        if self._leaves is not None and self._leaves.is_whole(micro_batch, chunk):
            self.allreduce_gradients()
        sequence.observer.closed()
        if self._passes_left > 0:
            sequence.exit_backward()
            self.tracker.advance()
        self.tracker.state = BackwardState.IDLE
        self.timers.stop_backward()

    # The end of a batch

    def _exec_reduce_tied_grads(self) -> None:
        """Sum the gradients of weights that several stages share.

        Before the reduction over data-parallel ranks: afterwards each rank would hold other pieces
        of them. In one order on all stages (that of the module's list), so that stages with several
        tied weights do not wait for each other in a circle.
        """
        if self._leaves is not None:
            return  # done, by micro-batches
        sequence = self._require_optimizer("train_batch")
        for param, group in self._tied:
            dist.all_reduce(sequence.local_gradient(param), group=group)

    def _exec_reduce_grads(self) -> None:
        """Average over the ranks that hold the same layers."""
        # A stage without backwards of its own (all frozen) has not heard of it.
        self.tracker.set_boundary(True)
        self.timers.start_reduce()
        sequence = self._require_optimizer("train_batch")
        if self._leaves is None:
            self.allreduce_gradients()
        else:
            sequence.finish_gradients()
            assert isinstance(sequence.masters, MasterWeights), "owners are who sum"
            self._leaves.share(sequence.masters)
        self._exit_backward(sequence)
        self.timers.stop_backward()

    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        self._reports.step_taken = False
        self.timers.start_step()
        self._take_model_step(lr_kwargs)
        self.timers.stop_step(self.global_steps)

    _INSTRUCTION_MAP: dict[type[schedule.PipeInstruction], Callable[..., None]] = {
        schedule.LoadMicroBatch: _exec_load_micro_batch,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
        schedule.BackwardInputPass: _exec_backward_input_pass,
        schedule.BackwardWeightPass: _exec_backward_weight_pass,
        schedule.SendActivation: _exec_send_activations,
        schedule.RecvActivation: _exec_recv_activations,
        schedule.SendGrad: _exec_send_grads,
        schedule.RecvGrad: _exec_recv_grads,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
        schedule.ReduceGrads: _exec_reduce_grads,
        schedule.OptimizerStep: _exec_optimizer_step,
    }

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Average over the last batch what `get_additional_losses` reports; last stage only."""
        return self._outputs.mean_additional_losses(self.micro_batches)

    # What the schedule does by itself

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        raise PipelineError(
            "engine(...) on a PipelineModule: use train_batch() or eval_batch(), which run all "
            "stages"
        )

    def backward(self, *args: object, **kwargs: object) -> NoReturn:
        raise PipelineError(
            "engine.backward() on a PipelineModule: train_batch() runs backward on all stages"
        )

    def step(self, *args: object, **kwargs: object) -> NoReturn:
        raise PipelineError(
            "engine.step() on a PipelineModule: train_batch() steps after its last micro-batch"
        )

    def destroy(self) -> None:
        self._failures.close()
        self.pipe_buffers = []
        super().destroy()

    def log_for_device(self, *msg: object) -> None:
        logger.debug(
            "stage %d, rank %d: %s", self.stage_id, self.global_rank, " ".join(map(str, msg))
        )

    def tput_log(self, *msg: object) -> None:
        every = self._config.tree.steps_per_print
        if every and self.global_steps % every == 0:
            log_dist(" ".join(map(str, msg)), ranks=[0])
