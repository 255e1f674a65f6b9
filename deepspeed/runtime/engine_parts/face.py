"""Upstream's methods of an engine that its parts have: one line each, which names the part."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

from deepspeed.checkpoint import file_names
from deepspeed.comm.parallel_map import ParallelMap
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpointing.save_job import put_converter
from deepspeed.runtime.engine_parts.checkpoints import EngineCheckpoints
from deepspeed.runtime.engine_parts.compiling import EngineCompiling
from deepspeed.runtime.engine_parts.data import EngineData
from deepspeed.runtime.engine_parts.device_memory import EngineDeviceMemory
from deepspeed.runtime.engine_parts.reports import EngineReports
from deepspeed.runtime.engine_parts.settings import EngineSettings
from deepspeed.runtime.engine_parts.train_batch import WholeSteps
from deepspeed.runtime.optimizers.step_sequence import forwarded
from deepspeed.utils.exceptions import MisuseError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def of_part(
    part: str, method: Callable[Concatenate[Any, Arguments], Result]
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Return a method, with the signature and help of `method`, that calls the one of its name of
    the engine's attribute `part`.
    """
    name = method.__name__

    @functools.wraps(method)
    def delegate(engine: object, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        result: Result = getattr(getattr(engine, part), name)(*args, **kwargs)
        return result

    return delegate


class EngineFace(EngineSettings):
    """What scripts call on an engine beside forward, backward and step."""

    parallel_map: ParallelMap
    _checkpoints: EngineCheckpoints
    _compiling: EngineCompiling
    _data: EngineData
    _reports: EngineReports
    _whole_steps: WholeSteps

    train_batch = of_part("_whole_steps", WholeSteps.train_batch)

    # Data

    deepspeed_io = of_part("_data", EngineData.deepspeed_io)
    is_map_style_dataset = staticmethod(EngineData.is_map_style_dataset)
    is_iterable_style_dataset = staticmethod(EngineData.is_iterable_style_dataset)
    set_custom_curriculum_learning_schedule = of_part(
        "_data", EngineData.set_custom_curriculum_learning_schedule
    )
    set_data_post_process_func = of_part("_data", EngineData.set_data_post_process_func)

    # Checkpoints

    save_checkpoint = of_part("_checkpoints", EngineCheckpoints.save_checkpoint)
    load_checkpoint = of_part("_checkpoints", EngineCheckpoints.load_checkpoint)
    module_state_dict = of_part("_checkpoints", EngineCheckpoints.module_state_dict)
    load_module_state_dict = of_part("_checkpoints", EngineCheckpoints.load_module_state_dict)
    save_16bit_model = of_part("_checkpoints", EngineCheckpoints.save_16bit_model)
    # What clients gather weights with.
    _consolidated_16bit_state_dict = of_part(
        "_checkpoints", EngineCheckpoints._consolidated_16bit_state_dict
    )

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """Call `save_16bit_model`, of which this is the older name."""
        return self.save_16bit_model(save_dir, save_filename)

    # What writes and reads files, as `checkpoint.writer` says, or a client's own.
    checkpoint_engine: CheckpointEngine = forwarded("_checkpoints", name="writer")

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int) -> str:
        """Path of the optimizer state of one expert rank's experts, in the slices of this rank."""
        name = file_names.expert_optimizer_file(expp_rank, self.parallel_map.model.rank)
        return os.path.join(checkpoints_path, str(tag), name)

    # A name of upstream's that clients put functions of their own under.
    def _copy_recovery_script(self, save_path: str) -> None:
        put_converter(save_path)

    # Device memory and compilation

    offload_states = of_part("_device_memory", EngineDeviceMemory.offload_states)
    reload_states = of_part("_device_memory", EngineDeviceMemory.reload_states)
    movable_states = of_part("_device_memory", EngineDeviceMemory.movable_states)
    empty_partition_cache = of_part("_device_memory", EngineDeviceMemory.empty_partition_cache)
    compile = of_part("_compiling", EngineCompiling.compile)
    is_compiled = property(attrgetter("_compiling.is_compiled"))

    # Reports

    was_step_applied = of_part("_reports", EngineReports.was_step_applied)
    get_global_grad_norm = of_part("_reports", EngineReports.get_global_grad_norm)
    get_group_grad_norms = of_part("_reports", EngineReports.get_group_grad_norms)
    # A name of upstream's that clients put functions of their own under.
    _report_progress = of_part("_reports", EngineReports.report_progress)
    # Because the gradient was not finite. Reading it may wait for the device.
    skipped_steps: int = forwarded("_reports")

    # Ranks

    seq_data_parallel_group = property(
        attrgetter("parallel_map.replicas.group"),
        doc="The ranks that have the same model, those that share sequences too.",
    )

    @property
    def expert_data_parallel_group(self) -> dict[str, Any]:
        """The ranks that hold the same experts, by the name of the experts' group."""
        return {name: axes.data.group for name, axes in self.parallel_map.all_experts.items()}

    def get_data_parallel_rank(self) -> int:
        return self.parallel_map.data.rank

    def get_model_parallel_rank(self) -> int:
        return self.parallel_map.model.rank

    def get_tensor_parallel_rank(self) -> int:
        return self.parallel_map.tensor.rank

    def get_sequence_parallel_group(self) -> Any:
        return self.parallel_map.sequence.group

    # Which micro-batches make up a step

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the micro-batch at hand is the last before an optimizer step."""
        return self.tracker.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set the boundary until set again; not with `managed_gradient_accumulation: false`."""
        self._refuse_unmanaged("set_gradient_accumulation_boundary")
        self.tracker.set_boundary(is_boundary)

    def _refuse_unmanaged(self, what: str) -> None:
        if not self.tracker.managed:
            raise MisuseError(
                f"engine.{what}() with managed_gradient_accumulation: false: the caller's step() "
                "is the boundary; leave the call out, or the key"
            )

    micro_steps: int = forwarded("tracker")
    inside_no_sync_ctxt = property(attrgetter("tracker.in_no_sync"))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add to this rank's local gradients inside, and communicate nothing, on every stage.

        The next backward outside reduces the sum. ZeRO-2 keeps whole gradients meanwhile, which
        costs the memory that it saves otherwise. `step()` inside raises. With the canonical sum,
        which is one of micro-batches, it does nothing.
        """
        is_canonical = self._config.tree.reproducibility.world_size_invariant
        with nullcontext() if is_canonical else self.tracker.no_sync():
            yield
