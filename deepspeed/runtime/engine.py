"""The training engine: forward, backward, step.

Reads from top to bottom as a micro-batch lives: construction, forward, backward (managed by
`engine.backward` or plain `loss.backward()`), reduction, step. Who owns gradients and how a step
goes is the optimizer's (`optimizers.StepSequence`), what is the boundary the tracker's, saving and
loading `checkpointing`'s; configuration getters are in `engine_settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed._absent import reason
from deepspeed._lazy import lazy_attributes
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.device_choice import select_device
from deepspeed.comm.initialization import ensure_distributed
from deepspeed.comm.parallel_map import make_mesh
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime import verification
from deepspeed.runtime.activation_checkpointing.checkpointing import configure_for_engine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpointing.engine_checkpoint import EngineCheckpoint
from deepspeed.runtime.checkpointing.loading import LoadOptions
from deepspeed.runtime.compiler import CompiledForward, compile_in_place
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.data_pipeline.sequence_curriculum import make_scheduler
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.engine_features import EngineFeatures
from deepspeed.runtime.engine_settings import EngineSettings
from deepspeed.runtime.engine_timing import EngineTimers
from deepspeed.runtime.gradients.accumulation import AccumulationTracker, BackwardState
from deepspeed.runtime.gradients.scope import GradientScope
from deepspeed.runtime.gradients.sequence_parts import SequenceParts
from deepspeed.runtime.model_setup import (
    broadcast_model,
    buffer_dtype,
    cast_model,
    comm_dtype_lookup,
    make_parallel_groups,
    model_dtype,
    spread_experts,
)
from deepspeed.runtime.optimizer_factory import (
    WrapContext,
    check_needs_no_optimizer,
    make_basic_optimizer,
    parameters_to_train,
    separate_experts,
    wrap_optimizer,
)
from deepspeed.runtime.optimizers.lr_scheduler_factory import build_lr_scheduler
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.sharding.model_ranks import ModelRanks
from deepspeed.runtime.step_observers import observers_of
from deepspeed.runtime.tensor_parallel.cutting import cut_model, mpu_of
from deepspeed.runtime.tensor_parallel.same_inputs import SameInputs
from deepspeed.runtime.utils import tensors_in
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.movable_states import MovableStates
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.utils import groups
from deepspeed.utils.exceptions import MisuseError
from deepspeed.utils.logging import log_dist, logger, print_dist, set_log_level_from_string

if TYPE_CHECKING:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

# Upstream's further names here say what to use instead.
__getattr__ = lazy_attributes(__name__)


def _check_loss(what: str, loss: Any, needs_graph: bool) -> None:
    """Refuse what has no gradient to start from.

    Raises:
        MisuseError: `loss` is no tensor of one element, or with `needs_graph` nothing made it.
    """
    is_scalar = isinstance(loss, torch.Tensor) and loss.numel() == 1
    if not is_scalar or (needs_graph and not loss.requires_grad):
        kind = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise MisuseError(
            f"engine.{what}(loss): expected a scalar tensor that the model made, got {kind}. For "
            "other outputs call tensor.backward(gradient)"
        )


class DeepSpeedEngine(EngineSettings, EngineFeatures, nn.Module):
    """A model with its optimizer, data-parallel and checked.

    Args:
        args: Namespace of command-line arguments; `local_rank` or `device_rank` chooses the device.
        model: The module to train.
        optimizer: A torch optimizer, or a callable that makes one from parameters; None takes the
            configuration's.
        model_parameters: Parameters or groups to optimize; None: those that require a gradient.
        training_data: Dataset to make `training_dataloader` from.
        lr_scheduler: A scheduler, or a callable that makes one from the optimizer; None takes the
            configuration's.
        mpu: Megatron-style object that knows the model- and data-parallel groups.
        dist_init_required: Initialize torch.distributed; None: if nobody did.
        collate_fn: For `training_dataloader`.
        config: Configuration (path, dict, or base64).
        config_class: The same, read already.
        mesh_device: torch DeviceMesh with axes `data_parallel` and `sequence_parallel`; None: the
            configuration's `sequence_parallel_size` makes one.
        dont_change_device: Leave the model where it is.

    Attributes:
        module: The model.
        parallel_map: Which ranks share what.
        optimizer: What `initialize` returns: the wrapper, or at stage 0 without masters the
            client's own optimizer.
        lr_scheduler: Stepped by the engine after each applied step; clients may set it to None to
            step it themselves.
        global_steps: Optimizer steps, skipped ones included.
        global_samples: Samples seen.
        monitor: Where scripts can write metrics of their own: `monitor.write_events([(name, value,
            step)])`.
    """

    _calls_model = True  # as a whole

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
        self._configure_distributed(args, mpu, mesh_device)
        self.curriculum_scheduler_legacy = make_scheduler(
            self._config.tree.curriculum_learning,
            model,
            self._calls_model,
            self.parallel_map.sequence.size,
        )
        configure_for_engine(self._config, mpu)
        self._start_counters()
        self._checkpoint = EngineCheckpoint(self)
        # Raises without its packages: before the model is touched.
        self.monitor: MonitorMaster = MonitorMaster(self._config.monitor_config)
        shards_model = self._config.zero_optimization_stage == ZeroStageEnum.weights
        cut_model(model, self._config, mpu, self.device)
        self._model_dtype = cast_model(model, self._config, in_place=not shards_model)
        spread_experts(model, self._config, self.parallel_map, self.device)
        if not dont_change_device and not shards_model:
            model.to(self.device)
        make_parallel_groups(model, self._config)
        self.model_ranks = ModelRanks.of(model, self.parallel_map)
        self.parameter_offload = self._shard(model, dont_change_device) if shards_model else None
        broadcast_model(model, self.model_ranks)
        self._sequence_parts = SequenceParts(model, self.model_ranks.tensor_group)
        self._same_inputs = SameInputs(model, self.device)
        self.timers = EngineTimers(self._config, self.train_batch_size())
        self.optimizer: Any = None
        self.basic_optimizer: torch.optim.Optimizer | None = None
        self._sequence: StepSequence | None = None
        self._configure_optimizer(optimizer, model_parameters)
        if self._sequence is not None and self._sequence_parts.params:
            self._sequence.hold(self._sequence_parts.params)
        self.lr_scheduler = build_lr_scheduler(self._config, lr_scheduler, self.basic_optimizer)
        self.training_dataloader: Any = (
            self.deepspeed_io(training_data) if training_data is not None else None
        )
        self._check_at_step = verification.configure(self, self._config.tree.verify)
        self.timers.observers = observers_of(self)
        self._announce()

    # Construction

    def _shard(self, model: nn.Module, dont_change_device: bool) -> DeepSpeedZeRoOffload:
        # startup: only stage 3 needs it
        from deepspeed.runtime.zero.model_sharding import shard_model

        return shard_model(
            model,
            self._config.tree.zero_optimization,
            self.model_ranks,
            model_dtype(self._config),
            buffer_dtype(self._config),
            None if dont_change_device else self.device,
        )

    @staticmethod
    def _check_arguments(model: Any) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")

    def _configure_distributed(self, args: Any, mpu: Any, mesh_device: Any) -> None:
        sequence = self._config.sequence_parallel_size
        if mesh_device is None and mpu is None and sequence > 1:
            mesh_device = make_mesh(self._config.world_size, sequence)
        self.parallel_map = groups.map_of(mpu, mesh_device)
        self._map_in_force = groups.put_in_force(self.parallel_map)
        self.local_rank, told_by = self._local_rank(args)
        select_device(self.local_rank, told_by)
        self.device = torch.device(get_accelerator().current_device_name())
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.data_parallel_group = self.parallel_map.data.group
        self.dp_world_size = self.parallel_map.data.size
        self.mp_world_size = self.parallel_map.model.size
        if self._config.tree.comms_logger.enabled:
            dist.configure(self._config.tree)

    @staticmethod
    def _local_rank(args: Any) -> tuple[int, str]:
        """This process's ordinal on its machine, and who said so."""
        for name in ("local_rank", "device_rank"):
            value = getattr(args, name, None)
            if value is not None and value >= 0:
                return int(value), f"args.{name}"
        return dist.get_local_rank(), "LOCAL_RANK"

    def _start_counters(self) -> None:
        tree = self._config.tree
        if tree.log_level is not None:
            set_log_level_from_string(tree.log_level)
        self.global_steps = 0
        self._skipped_elsewhere = 0  # by whom else but the step sequence at hand
        self.global_samples = 0
        self.loaded_checkpoint_tag: str | None = None
        self.enable_backward_allreduce = True
        self.tracker = AccumulationTracker(
            self._config.gradient_accumulation_steps, tree.managed_gradient_accumulation
        )
        self._reduced_at_boundary = False
        # How this accumulation window runs backward; None until it begins.
        self._window_is_plain: bool | None = None
        self._unscaled_plain = False  # a plain backward is running that needed a loss scale
        self._step_taken = False  # or skipped
        self._is_compiled = False
        self._compiled: list[CompiledForward] = []

    def _configure_optimizer(self, client: Any, model_parameters: Iterable[Any] | None) -> None:
        if client is None and self._config.tree.optimizer is None:
            self.model_ranks.agree_on_num_groups(None, self.device)
            check_needs_no_optimizer(self._config)
            self.optimizer = self.parameter_offload
            return
        parameters = parameters_to_train(self.module, model_parameters, self.model_ranks)
        self.basic_optimizer = make_basic_optimizer(self._config, client, parameters, self.module)
        if self.model_ranks.experts:
            separate_experts(self.basic_optimizer, self._config)
        self._sequence = wrap_optimizer(self.basic_optimizer, self._wrap_context())
        self.optimizer = self._sequence.public_optimizer

    def _wrap_context(self) -> WrapContext:
        return WrapContext(
            config=self._config,
            param_names={param: name for name, param in self.module.named_parameters()},
            tracker=self.tracker,
            ranks=self.model_ranks,
            num_norm_groups=self.model_ranks.agree_on_num_groups(self.basic_optimizer, self.device),
            model_dtype=self.model_dtype,
            device=self.device,
            model=self.module,
            backward_started=self._on_parameter_gradient,
            comm_dtype_of=comm_dtype_lookup(self.module, self._config),
            parameter_offload=self.parameter_offload,
        )

    def _announce(self) -> None:
        kind = type(self.optimizer).__name__ if self.optimizer is not None else "no optimizer"
        log_dist(
            f"DeepSpeed info: stage {self.zero_optimization_stage()}, {self.model_dtype}, {kind}, "
            f"{self.dp_world_size} data-parallel ranks, batch {self.train_batch_size()} = "
            f"{self.train_micro_batch_size_per_gpu()} x {self.gradient_accumulation_steps()} x "
            f"{self.dp_world_size}",
            ranks=[0],
        )
        if self._chooses_samples and self.training_dataloader is None:
            logger.warning(
                "data_efficiency.data_sampling orders what deepspeed.initialize(training_data=...) "
                "or engine.deepspeed_io(dataset) loads; this engine was given no training_data"
            )
        if self.dump_state():
            self._config.print("DeepSpeedEngine configuration")

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader of this rank's part of `dataset`, resumable from checkpoints if it is the
        training one.
        """
        batch_size = batch_size or self.train_micro_batch_size_per_gpu()
        if data_sampler is None and route == "train":
            data_sampler = self._sampler_of(dataset, batch_size)
            if data_sampler is not None:
                sampling = self._config.tree.data_efficiency.data_sampling
                pin_memory = sampling.pin_memory
                num_local_io_workers = num_local_io_workers or sampling.num_workers
        return DeepSpeedDataLoader(
            dataset=dataset,
            batch_size=batch_size,
            pin_memory=pin_memory and self.device.type != "cpu",
            collate_fn=collate_fn or self.collate_fn,
            local_rank=self.local_rank,
            tput_timer=self.timers.throughput if route == "train" else None,
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=self.dp_world_size,
            data_parallel_rank=dist.get_rank(group=self.data_parallel_group),
            dataloader_drop_last=self.dataloader_drop_last(),
        )

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

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward, under autocast if configured."""
        self._require_states("forward")
        if self.training:
            kwargs |= self._arguments_of_curriculum()
        self.timers.start_forward(self.training, inputs, kwargs)
        if self.tracker.state is BackwardState.RUNNING and torch._C._current_graph_task_id() == -1:
            # The last backward raised before it could finish. One that runs now has called: it
            # recomputes a checkpointed engine.
            self._abort_backward()
        if self.fp16_auto_cast():
            inputs, kwargs = self._cast_inputs(inputs, kwargs)
        with self._autocast():
            outputs = self.module(*inputs, **kwargs)
        if self.training and torch.is_grad_enabled() and self._sequence is not None:
            self._watch(outputs)
        self.timers.stop_forward()
        return outputs

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.torch_autocast_enabled():
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.torch_autocast_dtype())

    def _cast_inputs(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        def cast(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return value.to(self.model_dtype)
            return value

        return torch.utils._pytree.tree_map(cast, (inputs, kwargs))

    def _watch(self, outputs: Any) -> None:
        """Notice a backward that starts from these outputs, in its own autograd task, before any
        parameter's gradient.
        """
        for tensor in tensors_in(outputs):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._on_output_gradient)

    def _on_output_gradient(self, grad: torch.Tensor) -> None:
        self._enter_backward()

    # Backward

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` divided by the accumulation steps and times the loss scale; call `.backward()` on
        the result.
        """
        sequence = self._require_optimizer("scale")
        _check_loss("scale", loss, needs_graph=True)
        self._tell_opened(sequence, loss, scale_wrt_gas=True)
        self._show_loss(loss, scale_wrt_gas=True)
        self.tracker.state = BackwardState.ANNOUNCED
        return self._scaled(loss, scale_wrt_gas=True)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Backward of `loss`; gradients join the accumulation and, if it is their time, are
        reduced.

        Args:
            loss: Scalar, the mean over this rank's micro-batch.
            retain_graph: As torch's.
            scale_wrt_gas: Divide by the accumulation steps; False if the caller did.

        Returns:
            The loss, divided as said.
        """
        self._require_optimizer("backward")
        _check_loss("backward", loss, needs_graph=False)
        self._tell_opened(self._begin_managed_backward(), loss, scale_wrt_gas)
        self._show_loss(loss, scale_wrt_gas)
        loss = self._divided(loss, scale_wrt_gas)
        try:
            self._with_loss_scale(loss).backward(retain_graph=retain_graph)
        except BaseException:
            self._abort_backward()
            raise
        self._backward_epilogue()
        return loss

    def _begin_managed_backward(self) -> StepSequence:
        """A backward begins whose loss, or incoming gradient, the engine has divided and scaled
        itself.
        """
        sequence = self._require_optimizer("backward")
        self.timers.start_backward()
        self._begin_window(plain=False)
        self.tracker.state = BackwardState.RUNNING
        self._unscaled_plain = False
        sequence.accumulation_divisor = 1.0
        sequence.backward_prologue()
        return sequence

    def _refuse_taken(self, what: str) -> None:
        if self.parameter_offload is not None and self.parameter_offload.was_taken:
            raise RuntimeError(
                f"engine.{what}(): another engine has this model since, and what this one kept of "
                "it is out of date (ZeRO stage 3). Use the engine that initialize() returned last"
            )

    def _require_optimizer(self, what: str) -> StepSequence:
        self._refuse_taken(what)
        if self._sequence is None:
            raise RuntimeError(
                f"engine.{what}() needs an optimizer: initialize(optimizer=...) or the key "
                "'optimizer'"
            )
        return self._sequence

    def _gradient_scope(self) -> GradientScope:
        """Whose contributions make up a gradient, for observers."""
        ranks = self.model_ranks
        parts = self._sequence_parts
        return GradientScope(
            ranks.num_replicas,
            ranks.holders,
            ranks.everyone,
            self.device,
            shared=[(param, parts.group) for param in parts.params],
        )

    def _tell_opened(
        self, sequence: StepSequence, loss: torch.Tensor | None, scale_wrt_gas: bool
    ) -> None:
        """Let the gradients' observer know that a backward begins; `loss` is the client's, without
        loss scale and, with `scale_wrt_gas`, without accumulation yet.
        """
        sequence.observer.opened(loss, self.tracker.divisor if scale_wrt_gas else 1)

    def _show_loss(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        """Let observers see the loss of a micro-batch; what the caller has divided by the
        accumulation steps, as it was before.
        """
        if self.timers.observers:
            self.timers.saw_loss(
                loss.detach() if scale_wrt_gas else loss.detach() * self.tracker.divisor
            )

    def _divided(self, loss: torch.Tensor, scale_wrt_gas: bool) -> torch.Tensor:
        divisor = self.tracker.divisor if scale_wrt_gas else 1
        return loss / divisor if divisor != 1 else loss

    def _with_loss_scale(self, loss: torch.Tensor) -> torch.Tensor:
        sequence = self._require_optimizer("backward")
        # fp32: the scaled loss itself must not overflow in half precision.
        return loss.float() * sequence.loss_scale if sequence.needs_scaler() else loss

    def _scaled(self, loss: torch.Tensor, scale_wrt_gas: bool) -> torch.Tensor:
        return self._with_loss_scale(self._divided(loss, scale_wrt_gas))

    def _enter_backward(self) -> None:
        """A gradient flows. If nobody said so, this is a plain `loss.backward()`: run the epilogue
        when its task ends.
        """
        state = self.tracker.state
        if state is BackwardState.RUNNING:
            return
        sequence = self._require_optimizer("backward")
        announced = state is BackwardState.ANNOUNCED
        self._begin_window(plain=not announced)
        sequence.accumulation_divisor = 1.0 if announced else float(self.tracker.divisor)
        self.tracker.state = BackwardState.RUNNING
        self._unscaled_plain = not announced and sequence.needs_scaler()
        sequence.backward_prologue()
        if not announced:
            self._tell_opened(sequence, None, scale_wrt_gas=True)
        self.timers.start_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_plain_backward)

    def _on_parameter_gradient(self) -> None:
        """From a parameter's hook: refuses an unscaled gradient before the optimizer can send it
        off.
        """
        self._enter_backward()
        if self._unscaled_plain:
            self._refuse_unscaled()

    def _finish_plain_backward(self) -> None:
        if self._unscaled_plain and any(
            param.grad is not None for param in self.module.parameters()
        ):
            self._refuse_unscaled()
        self._backward_epilogue()

    def _refuse_unscaled(self) -> None:
        self._abort_backward()
        raise RuntimeError(
            "loss.backward() under fp16 loss scaling: gradients were computed without the loss "
            "scale and would underflow. Call engine.backward(loss), or "
            "engine.scale(loss).backward()"
        )

    def _begin_window(self, plain: bool) -> None:
        """Micro-batches of one step are divided at different places, so they must all be managed or
        all be plain.
        """
        self._sequence_parts.opened()
        if (
            self._window_is_plain is not None
            and self._window_is_plain != plain
            and self.tracker.divisor > 1
        ):
            self._abort_backward()
            raise RuntimeError(
                "engine.backward(loss) and plain loss.backward() in one accumulation window: the "
                f"first divides by gradient_accumulation_steps ({self.tracker.divisor}) before, "
                "the second after backward. Use one of them, or engine.scale(loss).backward()"
            )
        self._window_is_plain = plain
        self._checkpoint.on_backward()

    def _abort_backward(self) -> None:
        if self._sequence is not None:
            self._exit_backward(self._sequence)
        self.tracker.state = BackwardState.IDLE

    def _backward_epilogue(self) -> None:
        """After the last gradient of a backward.

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
        self.timers.stop_backward()

    @staticmethod
    def _exit_backward(sequence: StepSequence) -> None:
        sequence.exit_backward()
        sequence.observer.closed()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce what this micro-batch has to reduce. The bucket size is the configuration's
        `reduce_bucket_size`.
        """
        if bucket_size is not None and bucket_size != self.zero_reduce_bucket_size():
            raise ValueError(
                f"allreduce_gradients(bucket_size={bucket_size}): buckets are planned once; set "
                f"zero_optimization.reduce_bucket_size (now {self.zero_reduce_bucket_size()})"
            )
        sequence = self._require_optimizer("allreduce_gradients")
        if self._sequence_parts.params and sequence.reduces_now:
            self._sequence_parts.complete(sequence)
        sequence.reduce_gradients()
        self._reduced_at_boundary = self.tracker.is_boundary and not self.inside_no_sync_ctxt

    @property
    def inside_no_sync_ctxt(self) -> bool:
        """Whether a `no_sync()` block is open."""
        return self.tracker.in_no_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward adds to this rank's local gradients and nothing is communicated, on
        every stage.

        The next backward outside reduces the sum. ZeRO-2 keeps whole gradients meanwhile, which
        costs the memory that it saves otherwise. `step()` inside raises.
        """
        with self.tracker.no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards, one reduction: as `no_sync()`, and reduces at the end of the block.

        Raises:
            MisuseError: With `managed_gradient_accumulation: false`.
        """
        self._refuse_unmanaged("coalesce_grad_reduction")
        with self.tracker.no_sync():
            yield
        self.allreduce_gradients()
        self._exit_backward(self._require_optimizer("coalesce_grad_reduction"))

    # Step

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last before an optimizer step."""
        return self.tracker.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set it from outside; holds until set again.

        Raises:
            MisuseError: With `managed_gradient_accumulation: false`.
        """
        self._refuse_unmanaged("set_gradient_accumulation_boundary")
        self.tracker.set_boundary(is_boundary)

    def _refuse_unmanaged(self, what: str) -> None:
        if not self.tracker.managed:
            raise MisuseError(
                f"engine.{what}() with managed_gradient_accumulation: false: the caller's step() "
                "is the boundary; leave the call out, or the key"
            )

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far."""
        return self.tracker.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self.tracker.micro_steps = value

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End the micro-batch; at the boundary, step optimizer and schedule.

        Args:
            lr_kwargs: Passed to `lr_scheduler.step`.

        Raises:
            RuntimeError: Inside `no_sync()`.
        """
        self._require_optimizer("step")
        if self.inside_no_sync_ctxt:
            raise RuntimeError(
                "engine.step() inside no_sync(): leave the block before the boundary's backward"
            )
        self._step_taken = False
        is_boundary = self.is_gradient_accumulation_boundary()
        if is_boundary:
            self.timers.start_step()
            self._take_model_step(lr_kwargs)
            self.timers.stop_step(self.global_steps)
        self.tracker.advance()
        if is_boundary:
            self._checkpoint.on_step()  # last: when it raises, the step has been taken

    def _take_model_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        sequence = self._require_optimizer("step")
        if self._window_is_plain is None:
            self._adopt_unnoticed_gradients()
        if not self._reduced_at_boundary:
            # The boundary was set after backward, or no gradient passed a hook on this rank: reduce
            # now, as the others do.
            sequence.backward_epilogue()
            self.allreduce_gradients()
            self._exit_backward(sequence)
        sequence.step()
        if self._check_at_step is not None:
            self._check_at_step()
        self._reduced_at_boundary = False
        self._window_is_plain = None
        self._step_taken = True
        # Only a schedule has to know here whether the step was skipped, which waits for the device;
        # by now the update and the gathers behind it are queued there.
        if self.lr_scheduler is not None and not sequence.overflow:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        every = self.steps_per_print()
        if every and self.global_steps % every == 0:
            self._report_progress()

    def _adopt_unnoticed_gradients(self) -> None:
        """No backward of this window was noticed: the model itself was called, not the engine, so
        nobody has divided or scaled.
        """
        sequence = self._require_optimizer("step")
        sequence.accumulation_divisor = float(self.tracker.divisor)
        if sequence.needs_scaler() and any(
            param.grad is not None for param in self.module.parameters()
        ):
            self._refuse_unscaled()

    def _report_progress(self) -> None:
        # Asked for by steps_per_print, so it is shown whatever the log level.
        print_dist(
            f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, "
            f"mom={self.get_mom()}, grad_norm={self.get_global_grad_norm()}, "
            f"{self.timers.summary()}",
            ranks=[0],
        )

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the parameters. Asking may wait for the device."""
        sequence = self._sequence
        return self._step_taken and (sequence is None or not sequence.overflow)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because the gradient was not finite. Reading it may wait for the device."""
        if self._sequence is None:
            return self._skipped_elsewhere
        self._sequence.learn_outcome()
        return self._skipped_elsewhere + self._sequence.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self._skipped_elsewhere += value - self.skipped_steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget every gradient since the last step, accumulated and reduced ones too."""
        if self._sequence is not None:
            self._sequence.zero_grad(set_to_none)
        self._reduced_at_boundary = False
        self._window_is_plain = None

    def get_global_grad_norm(self) -> float | torch.Tensor | None:
        """Global gradient norm of the last step that was not skipped, unscaled and before clipping;
        None before the first step. `was_step_applied` and `skipped_steps` tell of skips.
        """
        return None if self._sequence is None else self._sequence.global_grad_norm

    def get_group_grad_norms(self) -> list[float] | None:
        """`get_global_grad_norm` per parameter group, without communication; None before the first
        step.

        Entry `i` is over the `i`-th parameter groups of all ranks, which stages of a pipeline may
        have different numbers of.
        """
        return None if self._sequence is None else self._sequence.group_grad_norms

    # Checkpoints

    @property
    def checkpoint_engine(self) -> CheckpointEngine:
        """What writes and reads files: as `checkpoint.writer` says, or one of the client's, set
        here before saving.
        """
        return self._checkpoint.engine

    @checkpoint_engine.setter
    def checkpoint_engine(self, engine: CheckpointEngine) -> None:
        self._checkpoint.engine = engine

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything needed to go on, under `save_dir/tag`. All ranks must call it.

        With `checkpoint.writer.decoupled` it returns when the state is copied to host memory; what
        fails after that is raised by a later `step()`, on all ranks at the same one, after that
        step is taken: training can go on.

        Args:
            save_dir: Folder of all checkpoints of a run.
            tag: Name of this one, the same on all ranks; None is `global_step{N}`.
            client_state: Returned by `load_checkpoint`.
            save_latest: Let the `latest` file name it.
            exclude_frozen_parameters: Leave frozen parameters out of the weights.

        Returns:
            True.

        Raises:
            CheckpointError: On every rank if any could not write, or an earlier save in the
                background has failed; an earlier checkpoint of that tag is untouched.
            ValueError: For a tag that is no folder name, or client keys that are the engine's own.
        """
        self._require_states("save_checkpoint")
        self._refuse_taken("save_checkpoint")
        return self._checkpoint.save(
            save_dir, tag, client_state, save_latest, exclude_frozen_parameters
        )

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Restore a checkpoint. All ranks must call it.

        Args:
            load_dir: Folder that `save_checkpoint` was given.
            tag: Which; None reads the `latest` file.
            load_module_strict: Names of weights must match exactly.
            load_optimizer_states: Restore moments; with False, masters and weights only.
            load_lr_scheduler_states: Restore the schedule.
            load_module_only: Restore weights only.
            custom_load_fn: Called as `fn(src=state_dict, dst=module)` to load the weights.

        Returns:
            Path of the checkpoint and the client state; `(None, None)` if `load_dir` has no
            `latest` file and no tag was given.

        Raises:
            CheckpointError: On every rank if any could not read its files or they don't fit;
                nothing was changed then.
        """
        options = LoadOptions(
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        self._require_states("load_checkpoint")
        return self._checkpoint.load(load_dir, tag, options)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's state dict, in the model's dtype; what is saved as its weights.

        Args:
            destination, prefix, keep_vars: As torch's.
            exclude_frozen_parameters: Leave frozen parameters out.
        """
        return self._checkpoint.module_state_dict(
            destination, prefix, keep_vars, exclude_frozen_parameters
        )

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load the model's weights from a model-states file's content; masters follow.

        Args:
            checkpoint: Content of the file.
            strict: Names must match exactly.
            custom_load_fn: Called as `fn(src=state_dict, dst=module)` instead.
            fetch_z3_params: No effect below stage 3.
        """
        self._checkpoint.load_module_state_dict(checkpoint, strict, custom_load_fn)

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights alone, in the model's dtype, as one file. All ranks must call it.

        Args:
            save_dir: Folder, made if it is not there.
            save_filename: Name in it.
            exclude_frozen_parameters: Leave frozen parameters out.

        Returns:
            True; False, and nothing is saved, at ZeRO stage 3 without
            `stage3_gather_16bit_weights_on_model_save`.

        Raises:
            CheckpointError: On every rank if it could not be written.
        """
        return self._checkpoint.save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """Upstream's older name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    # What clients gather weights with.

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        return self._checkpoint.consolidated_state_dict(exclude_frozen_parameters)

    # The rest of the engine's life

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set training mode of engine and model."""
        super().train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        """Set evaluation mode of engine and model."""
        return self.train(False)

    def compile(
        self,
        backend: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model in place with torch.compile.

        Where gradients are reduced, or moved to their place, while backward goes on, its repeated
        blocks (`runtime.compiler.blocks_of`) are compiled one by one, and what is around them is
        not: the backward of one graph gives all its gradients at its end, too late for either. A
        model without such blocks is compiled as a whole. At ZeRO stage 3 it is the forwards of
        blocks, so that gathering stays outside of graphs.

        Args:
            backend: torch.compile backend; None is the accelerator's.
            compile_kwargs: Further arguments of torch.compile.
            schedule: DeepCompile schedules are not supported.
            compiled_autograd_enabled: Not supported: gradient hooks would be traced into the graph.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise NotImplementedError(
                "compile(schedule=..., compiled_autograd_enabled=...): not supported; leave both "
                "out"
            )
        if self._is_compiled:
            return
        offload = self.parameter_offload
        self._compiled = compile_in_place(
            self.module,
            by_block=self._sequence is not None and self._sequence.works_during_backward,
            has_hooks=None if offload is None else offload.gathers_for,
            **{
                "backend": backend or get_accelerator().get_compile_backend(),
                **(compile_kwargs or {}),
            },
        )
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile()` was called."""
        return self._is_compiled

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move the optimizer's state (all, or the kinds in `include`) to the host until
        `reload_states`: see `runtime.zero.movable_states.MovableStates.offload_states`.
        """
        sequence = self._movable("offload_states")
        sequence.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what `offload_states` has moved."""
        self._movable("reload_states").reload_states(non_blocking)

    def _require_states(self, what: str) -> None:
        if self._sequence is not None:
            self._sequence.require_states(what)

    def _movable(self, what: str) -> MovableStates:
        sequence = self._require_optimizer(what)
        if not isinstance(sequence, MovableStates):
            raise RuntimeError(
                f"engine.{what}() with {type(sequence).__name__} is not supported; use ZeRO stage "
                '2 or 3, or stage 1 without "data_types": {"grad_accum_dtype": "fp32"}'
            )
        return sequence

    def empty_partition_cache(self) -> None:
        """Let gathered parameters of stage 3 go, and the memory that the device keeps for them:
        between steps, after evaluating or generating, say.
        """
        if self.parameter_offload is not None:
            self.parameter_offload.param_coordinator.release_all()
        get_accelerator().empty_cache()

    def destroy(self) -> None:
        """Remove hooks, release buffers; the model stays usable."""
        self._checkpoint.close()
        self.timers.close()
        self.monitor.close()
        verification.detach_ledger(self)
        verification.engines.discard(self)
        self._sequence_parts.close()
        self._same_inputs.close()
        for compiled in self._compiled:
            compiled.remove()
        self._compiled = []
        if self._sequence is not None:
            self._step_taken, self._skipped_elsewhere = self.was_step_applied(), self.skipped_steps
            self._sequence.destroy()
        elif self.parameter_offload is not None:
            self.parameter_offload.destroy()
        self.parameter_offload = None
        self._sequence = None
        self.optimizer = None
        self.basic_optimizer = None
        self.lr_scheduler = None
        self._map_in_force.remove()
        logger.debug("engine destroyed")
