"""The training engine: forward, backward, step.

Reads from top to bottom as a micro-batch lives: construction, forward, backward, reduction, step,
and the engine's end. What else scripts call, and a plain `loss.backward()` that the engine does not
run itself, are parts that it has (`engine_parts`), one subject a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, overload

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed._absent import reason
from deepspeed._lazy import lazy_attributes
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.initialization import ensure_distributed
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.activation_checkpointing.checkpointing import configure_for_engine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.data_pipeline.curriculum_scheduler import make_scheduler
from deepspeed.runtime.engine_parts import verification
from deepspeed.runtime.engine_parts.checkpoints import EngineCheckpoints
from deepspeed.runtime.engine_parts.compiling import EngineCompiling
from deepspeed.runtime.engine_parts.data import EngineData
from deepspeed.runtime.engine_parts.device_memory import EngineDeviceMemory
from deepspeed.runtime.engine_parts.digest import StepDigests, digest_of_all, digests_by_name
from deepspeed.runtime.engine_parts.face import EngineFace
from deepspeed.runtime.engine_parts.losses import Losses, check_loss
from deepspeed.runtime.engine_parts.model_setup import (
    broadcast_model,
    cast_model,
    make_parallel_groups,
    spread_experts,
)
from deepspeed.runtime.engine_parts.optimizers import make_optimizer, shard
from deepspeed.runtime.engine_parts.plain_backward import PlainBackward
from deepspeed.runtime.engine_parts.ranks import take_place
from deepspeed.runtime.engine_parts.reports import EngineReports
from deepspeed.runtime.engine_parts.timing import EngineTimers
from deepspeed.runtime.engine_parts.train_batch import WholeSteps
from deepspeed.runtime.gradients.accumulation import AccumulationTracker, BackwardState, Foreign
from deepspeed.runtime.gradients.scope import GradientScope
from deepspeed.runtime.gradients.sequence_parts import SequenceParts
from deepspeed.runtime.optimizers.lr_scheduler_factory import build_lr_scheduler
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.sharding.model_ranks import ModelRanks
from deepspeed.runtime.step_observers import observers_of
from deepspeed.runtime.tensor_parallel.cutting import cut_model, mpu_of
from deepspeed.runtime.tensor_parallel.same_inputs import SameInputs
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.logging import logger, set_log_level_from_string

# Upstream's further names here say what to use instead.
__getattr__ = lazy_attributes(__name__)


def autocast_if_enabled(engine: DeepSpeedEngine) -> AbstractContextManager[Any]:
    """Enter the engine's `torch_autocast`, if it is on; for scripts that write its forward anew."""
    if not engine.torch_autocast_enabled():
        return nullcontext()
    return torch.autocast(engine.device.type, dtype=engine.torch_autocast_dtype())


class DeepSpeedEngine(EngineFace, nn.Module):
    """A model with its optimizer, data-parallel and checked.

    Args:
        args: Namespace of command-line arguments; `local_rank` or `device_rank` chooses the device.
        model: The module to train.
        optimizer: A torch optimizer, or a callable of parameters; None: the configuration's.
        model_parameters: Parameters or groups to optimize; None: those that require a gradient.
        training_data: Dataset to make `training_dataloader` from.
        lr_scheduler: A scheduler, or a callable of the optimizer; None: the configuration's.
        mpu: Megatron-style object that knows the model- and data-parallel groups.
        dist_init_required: Initialize torch.distributed; None: if nobody did.
        collate_fn: For `training_dataloader`.
        config: Configuration (path, dict, or base64).
        config_class: The same, read already.
        mesh_device: torch DeviceMesh with axes `data_parallel` and `sequence_parallel`; None: the
            configuration's `sequence_parallel_size` makes one.
        dont_change_device: Leave the model where it is.

    Attributes:
        optimizer: What `initialize` returns: the wrapper, or at stage 0 without masters the
            client's own optimizer.
        lr_scheduler: Stepped after each applied step; set to None, it is the client's to step.
        global_steps, global_samples: Optimizer steps, skipped ones included, and samples seen.
        monitor: For scripts' own metrics: `monitor.write_events([(name, value, step)])`.
    """

    _calls_model = True  # as a whole
    _plain_backward: PlainBackward

    def __init__(
        self,
        args: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
        model_parameters: Iterable[Any] | None = None,
        training_data: Any = None,
        lr_scheduler: Any = None,
        mpu: Any = None,
        dist_init_required: bool | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        config: Any = None,
        config_class: DeepSpeedConfig | None = None,
        mesh_device: Any = None,
        dont_change_device: bool = False,
    ) -> None:
        super().__init__()
        self._check_arguments(model)
        ensure_distributed(dist_init_required)
        self.module = model
        self.collate_fn = collate_fn
        self._config = config_class if config_class is not None else DeepSpeedConfig(config, mpu)
        self.mpu = mpu = mpu_of(model, self._config.tree.tensor_parallel, mpu)
        self._check_settings()
        self._take_place(args, mpu, mesh_device)
        self.curriculum_scheduler_legacy = make_scheduler(
            self._config.tree.curriculum_learning,
            model,
            self._calls_model,
            self.parallel_map.sequence.size,
        )
        configure_for_engine(self._config, mpu)
        self._start_counters()
        # Raises without its packages: before the model is touched.
        self.monitor: MonitorMaster = MonitorMaster(self._config.monitor_config)
        self._prepare(model, dont_change_device)
        self._sequence_parts = SequenceParts(model, self.model_ranks.tensor_group)
        self._same_inputs = SameInputs(model, self.device)
        self.timers = EngineTimers(self._config, self._config.train_batch_size)
        self._make_parts()
        self.optimizer: Any = self.parameter_offload
        self.basic_optimizer: torch.optim.Optimizer | None = None
        self._sequence: StepSequence | None = None
        made = make_optimizer(
            self, optimizer, model_parameters, self._plain_backward.on_parameter_gradient
        )
        if made is not None:
            self.basic_optimizer, self._sequence = made
            self.optimizer = self._sequence.public_optimizer
            if self._sequence_parts.params:
                self._sequence.hold(self._sequence_parts.params)
        self.lr_scheduler = build_lr_scheduler(self._config, lr_scheduler, self.basic_optimizer)
        self.training_dataloader: Any = (
            self.deepspeed_io(training_data) if training_data is not None else None
        )
        self._check_at_step: Callable[[], None] | None = verification.configure(
            self, self._config.tree.verify
        )
        self.timers.observers = observers_of(self)
        self._reports.announce()
        self._data.warn_of_no_data()

    # Construction

    @staticmethod
    def _check_arguments(model: object) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")

    def _take_place(self, args: object, mpu: object, mesh_device: object) -> None:
        place = take_place(self._config, args, mpu, mesh_device)
        self.parallel_map, self._map_in_force = place.parallel_map, place.map_in_force
        self.device, self.local_rank = place.device, place.local_rank
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.data_parallel_group: dist.Group = self.parallel_map.data.group
        self.dp_world_size = self.parallel_map.data.size
        self.mp_world_size = self.parallel_map.model.size

    def _prepare(self, model: nn.Module, dont_change_device: bool) -> None:
        """Cut, cast, move and shard the model, and make it the same on all ranks."""
        shards_model = self._config.zero_optimization_stage == ZeroStageEnum.weights
        cut_model(model, self._config, self.mpu, self.device)
        self._model_dtype = cast_model(model, self._config, in_place=not shards_model)
        spread_experts(model, self._config, self.parallel_map, self.device)
        if not dont_change_device and not shards_model:
            model.to(self.device)
        make_parallel_groups(model, self._config)
        self.model_ranks = ModelRanks.of(model, self.parallel_map)
        wanted = None if dont_change_device else self.device
        self.parameter_offload = (
            shard(model, self._config, self.model_ranks, wanted) if shards_model else None
        )
        self._broadcast_model()

    def _check_settings(self) -> None:
        """Refuse settings that this kind of engine cannot honour, before anything is built."""

    # A name of upstream's that clients put functions of their own under.
    def _broadcast_model(self) -> None:
        broadcast_model(self.module, self.model_ranks)

    def _start_counters(self) -> None:
        tree = self._config.tree
        if tree.log_level is not None:
            set_log_level_from_string(tree.log_level)
        self.global_steps = 0
        self.global_samples = 0
        self._digests: StepDigests | None = None  # of the last step, if it is one with digests
        self.loaded_checkpoint_tag: str | None = None
        self.enable_backward_allreduce = True
        self.tracker = AccumulationTracker(
            self._config.gradient_accumulation_steps, tree.managed_gradient_accumulation
        )

    def _make_parts(self) -> None:
        self._checkpoints = EngineCheckpoints(self)
        self._data = EngineData(self)
        self._whole_steps = WholeSteps(self)
        self._reports = EngineReports(self)
        self._device_memory = EngineDeviceMemory(self)
        self._compiling = EngineCompiling(self)
        bits = self._config.tree.reproducibility
        self._losses = Losses(
            self.tracker,
            self.timers,
            bits.world_size_invariant,
            keeps=bits.digest_every > 0 and self._calls_model,
        )
        self._plain_backward = PlainBackward(self, self._losses)

    def __getattr__(self, name: str) -> Any:
        """Attributes that the engine does not have are the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
        # Once: a model's property may be dear.
        try:
            return getattr(module, name)
        except AttributeError:
            absent = reason(f"{DeepSpeedEngine.__module__}.{DeepSpeedEngine.__name__}", name)
            if absent is None:
                raise
            raise AttributeError(absent) from None

    # Forward

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Call the model, under autocast if configured."""
        self._require_states("forward")
        if self.training:
            kwargs |= self._data.arguments_of_curriculum()
        self.timers.start_forward(self.training, inputs, kwargs)
        if self.tracker.state is BackwardState.RUNNING and torch._C._current_graph_task_id() == -1:
            # The last backward raised before it could finish. One that runs now has called: it
            # recomputes a checkpointed engine.
            self._abort_backward()
        if self.fp16_auto_cast():
            inputs, kwargs = self._cast_inputs(inputs, kwargs)
        if self.training and self._seeds_forwards:
            # Backwards are counted where step() is called at the boundary alone, too.
            self._seed_forward(self.tracker.backwards)
        with autocast_if_enabled(self):
            outputs = self.module(*inputs, **kwargs)
        if self.training and torch.is_grad_enabled() and self._sequence is not None:
            self._plain_backward.watch(outputs)
        self.timers.stop_forward()
        return outputs

    @property
    def _seeds_forwards(self) -> bool:
        settings = self._config.tree.reproducibility
        return settings.world_size_invariant and settings.seed_forwards

    def _seed_forward(self, micro_step: int, *within: int) -> None:
        """Let random numbers of a forward depend on its micro-batch alone, and where in it
        (`within`) a stage begins; see `canonical`.
        """
        ranks = self.model_ranks.replicas
        number = micro_step * dist.get_world_size(group=ranks) + dist.get_rank(group=ranks)
        place = (self._config.tree.reproducibility.seed, self.global_steps, number, *within)
        digest = hashlib.sha256(repr(place).encode()).digest()
        seed = int.from_bytes(digest[:8], "little")
        # Not `torch.manual_seed`: it keeps a stack for each vendor's device, 0.5 ms a forward.
        torch.default_generator.manual_seed(seed)
        get_accelerator().manual_seed(seed)

    @overload
    def state_digest(self, per_parameter: Literal[False] = False) -> str: ...
    @overload
    def state_digest(self, per_parameter: Literal[True]) -> dict[str, str]: ...
    def state_digest(self, per_parameter: bool = False) -> str | dict[str, str]:
        """Hash names, masters and optimizer state, however they are cut and wherever they lie: 64
        hexadecimal digits, or (`per_parameter`) as many by name. All ranks call it.
        """
        sequence = self._require_optimizer("state_digest")
        sequence.masters.writes.take_in()
        # Of those that hold the same: one instance of several, or the first of all ranks.
        shard_rank = getattr(sequence.masters, "shard_rank", 0)
        is_first = dist.get_rank(group=self.model_ranks.replicas) == shard_rank
        counts = self.model_ranks.counts_shard or (lambda param: True)
        names = {
            param: name
            for name, param in self.module.named_parameters()
            if is_first and counts(param)
        }
        by_name = digests_by_name(sequence, names)
        return by_name if per_parameter else digest_of_all(by_name)

    def _cast_inputs(self, inputs: object, kwargs: object) -> tuple[Any, Any]:
        def cast(value: object) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return value.to(self.model_dtype)
            return value

        return torch.utils._pytree.tree_map(cast, (inputs, kwargs))

    # Backward

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Divide `loss` by the accumulation steps and multiply it by the loss scale; call
        `.backward()` on the result.
        """
        sequence = self._require_optimizer("scale")
        check_loss("scale", loss, needs_graph=True)
        self._losses.tell_opened(sequence, loss, scale_wrt_gas=True)
        self._losses.show(loss, scale_wrt_gas=True)
        self.tracker.state = BackwardState.ANNOUNCED
        return self._losses.scaled(sequence, loss, scale_wrt_gas=True)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run backward of `loss`; gradients accumulate and, if it is time, are reduced.

        Args:
            loss: Scalar, the mean over this rank's micro-batch.
            retain_graph: As torch's.
            scale_wrt_gas: Divide by the accumulation steps; False if the caller did.

        Returns:
            The loss, divided as said.
        """
        self._require_optimizer("backward")
        check_loss("backward", loss, needs_graph=False)
        sequence = self._begin_managed_backward()
        self._losses.tell_opened(sequence, loss, scale_wrt_gas)
        self._losses.show(loss, scale_wrt_gas)
        try:
            scaled = self._losses.scaled(sequence, loss, scale_wrt_gas)
            scaled.backward(retain_graph=retain_graph)
            self._backward_epilogue()
        except BaseException:
            self._abort_backward()
            # Torch does not name a parameter that a script has converted.
            sequence.masters.writes.rejoin()
            raise
        return self._losses.divided(loss, scale_wrt_gas)

    def _begin_managed_backward(self) -> StepSequence:
        """Begin a backward whose loss, or incoming gradient, the engine divided and scaled."""
        sequence = self._require_optimizer("backward")
        self.timers.start_backward()
        self._begin_window(plain=False)
        self.tracker.state = BackwardState.RUNNING
        self._plain_backward.is_unscaled = False
        sequence.accumulation_divisor = self._losses.late_divisor()
        sequence.backward_prologue()
        return sequence

    def _gradient_scope(self) -> GradientScope:
        ranks = self.model_ranks
        parts = self._sequence_parts
        return GradientScope(
            ranks.num_replicas,
            ranks.holders,
            ranks.everyone,
            self.device,
            shared=[(param, parts.group) for param in parts.params],
        )

    def _begin_window(self, plain: bool, foreign: Foreign | None = None) -> None:
        """Refuse managed and plain backwards (of `foreign` engines too) in one step: they are
        divided at different places.
        """
        self._sequence_parts.opened()
        window = self.tracker.window
        if window.is_plain not in (None, plain) and self.tracker.divisor > 1:
            self._abort_backward()
            if foreign := foreign or window.foreign:
                self._plain_backward.refuse_foreign(
                    foreign,
                    "whose accumulation window has backwards of its own, divided by "
                    "gradient_accumulation_steps elsewhere",
                )
            raise RuntimeError(
                "engine.backward(loss) and plain loss.backward() in one accumulation window: the "
                f"first divides by gradient_accumulation_steps ({self.tracker.divisor}) before, "
                "the second after backward. Use one of them, or engine.scale(loss).backward()"
            )
        window.is_plain = plain
        if foreign is not None:
            window.foreign = window.foreign or foreign
        elif window.foreign is not None:
            window.foreign.is_joined |= window.foreign.has_stepped()
        self._checkpoints.on_backward()

    def _abort_backward(self) -> None:
        if self._sequence is not None:
            self._exit_backward(self._sequence)
        self.tracker.state = BackwardState.IDLE

    def _backward_epilogue(self) -> None:
        """Reduce after the last gradient of a backward.

        [fix 4] The order is the fix: the micro-batch at hand joins the accumulator, *then* the
        accumulator is reduced. Reduced first, the boundary micro-batch would be added to an already
        averaged sum and stay local to each rank.
        """
        sequence = self._require_optimizer("backward")
        self.timers.start_reduce()
        sequence.backward_epilogue()
        if self.enable_backward_allreduce and not self.inside_no_sync_ctxt:
            self.allreduce_gradients()
        self._exit_backward(sequence)
        self.tracker.state = BackwardState.IDLE
        self.tracker.backwards += 1
        self.timers.stop_backward()

    @staticmethod
    def _exit_backward(sequence: StepSequence) -> None:
        sequence.exit_backward()
        sequence.observer.closed()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce what this micro-batch has to, in buckets of `reduce_bucket_size` as configured."""
        planned = self._config.zero_config.reduce_bucket_size
        if bucket_size is not None and bucket_size != planned:
            raise ValueError(
                f"allreduce_gradients(bucket_size={bucket_size}): buckets are planned once; set "
                f"zero_optimization.reduce_bucket_size (now {planned})"
            )
        sequence = self._require_optimizer("allreduce_gradients")
        if self._sequence_parts.params and sequence.reduces_now:
            self._sequence_parts.complete(sequence)
        sequence.reduce_gradients()
        is_reduced = self.tracker.is_boundary and not self.inside_no_sync_ctxt
        self.tracker.window.is_reduced = is_reduced
        if sequence.reduces_now:
            sequence.await_step()

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Run several backwards and one reduction: as `no_sync()`, and reduces at the end of the
        block. Refused with `managed_gradient_accumulation: false`; with the canonical sum, nothing.
        """
        self._refuse_unmanaged("coalesce_grad_reduction")
        with self.no_sync():
            yield
        if not self._config.tree.reproducibility.world_size_invariant:
            self.allreduce_gradients()
            self._exit_backward(self._require_optimizer("coalesce_grad_reduction"))

    # Step

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End the micro-batch; at the boundary, step optimizer and schedule. Raises inside
        `no_sync()`.

        `lr_kwargs` are passed to `lr_scheduler.step`.
        """
        self._require_optimizer("step")
        if self.inside_no_sync_ctxt:
            raise RuntimeError(
                "engine.step() inside no_sync(): leave the block before the boundary's backward"
            )
        self._reports.step_taken = False
        is_boundary = self.is_gradient_accumulation_boundary()
        if is_boundary:
            self.timers.start_step()
            self._take_model_step(lr_kwargs)
            self.timers.stop_step(self.global_steps)
        self.tracker.advance()
        if is_boundary:
            self._checkpoints.on_step()  # last: when it raises, the step has been taken

    def _take_model_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        sequence = self._require_optimizer("step")
        if self.tracker.window.is_plain is None:
            self._plain_backward.adopt_unnoticed_gradients()
        elif (foreign := self.tracker.window.foreign) and foreign.is_joined:
            self._plain_backward.tell_foreign(foreign)
        if not self.tracker.window.is_reduced:
            # The boundary was set after backward, or no gradient passed a hook on this rank: reduce
            # now, as the others do.
            sequence.backward_epilogue()
            self.allreduce_gradients()
            self._exit_backward(sequence)
        sequence.step()
        if self._check_at_step is not None:
            self._check_at_step()
        self._reports.step_taken = True
        # Only a schedule has to know here whether the step was skipped, which waits for the device;
        # by now the update and the gathers behind it are queued there.
        if self.lr_scheduler is not None and not sequence.overflow:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        samples_of_one = self._config.train_batch_size // self.tracker.steps
        self.global_samples += samples_of_one * self.tracker.micro_batches
        self.tracker.backwards = 0
        self._digests = None
        digest_every = self._config.tree.reproducibility.digest_every
        if digest_every and self.global_steps % digest_every == 0:
            digests = self.state_digest(per_parameter=True)
            mean_loss = self._losses.mean_over(self.model_ranks.replicas)
            self._digests = StepDigests(digests, *mean_loss)
        self._losses.forget()
        every = self._config.tree.steps_per_print
        if every and self.global_steps % every == 0:
            self._report_progress(self.global_steps)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget every gradient since the last step, accumulated and reduced ones too."""
        if self._sequence is not None:
            self._sequence.zero_grad(set_to_none)

    def _require_optimizer(self, what: str) -> StepSequence:
        self._refuse_taken(what)
        if self._sequence is None:
            raise RuntimeError(
                f"engine.{what}() needs an optimizer: initialize(optimizer=...) or the key "
                "'optimizer'"
            )
        return self._sequence

    def _refuse_taken(self, what: str) -> None:
        if self.parameter_offload is not None and self.parameter_offload.was_taken:
            raise RuntimeError(
                f"engine.{what}(): another engine has this model since, and what this one kept of "
                "it is out of date (ZeRO stage 3). Use the engine that initialize() returned last"
            )

    def _require_states(self, what: str) -> None:
        if self._sequence is not None:
            self._sequence.require_states(what)
        elif self._device_memory.weights is not None:
            self._device_memory.weights.require_states(what)

    # The rest of the engine's life

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        super().train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        return self.train(False)

    def destroy(self) -> None:
        """Remove hooks, release buffers; the model stays usable."""
        self._checkpoints.close()
        self.timers.close()
        self.monitor.close()
        verification.detach_ledger(self)
        self._sequence_parts.close()
        self._same_inputs.close()
        self._compiling.remove()
        if self._sequence is not None:
            self._reports.close()
            self._sequence.destroy()
        elif self.parameter_offload is not None:
            if self._device_memory.weights is not None:
                self._device_memory.weights.reload_states()
            self.parameter_offload.destroy()
        self.parameter_offload = None
        self._sequence = None
        self.optimizer = None
        self.basic_optimizer = None
        self.lr_scheduler = None
        self._map_in_force.remove()
        verification.engine_ended(self)
        logger.debug("engine destroyed")
