"""What an engine can let go of the device's memory between steps, and take back."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine_parts.engine_state import EngineState
from deepspeed.runtime.zero.movable_states import Movable, MovableWeights
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

if TYPE_CHECKING:
    from deepspeed.ops.state_files import StateFiles


class EngineDeviceMemory:
    """State of one engine that moves to the host, gathered parameters that go.

    `weights` are those of an engine of stage 3 without an optimizer, once they have moved.
    """

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine
        self.weights: MovableWeights | None = None

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move the optimizer's state (all, or the kinds in `include`) to the host, or to files
        ("nvme", below the `nvme_path` of `offload_optimizer` or `offload_param`), until
        `reload_states`: see `runtime.zero.movable_states.Movable.offload_states`. An engine of
        stage 3 without an optimizer has weights alone.
        """
        movable = self.movable_states("offload_states")
        if device == OffloadDeviceEnum.nvme and movable.files is None:
            movable.files = self._files()
        movable.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        self.movable_states("reload_states").reload_states(non_blocking)

    def _files(self) -> StateFiles:
        tree = self._engine._config.tree
        blocks = tree.zero_optimization.offload_optimizer, tree.zero_optimization.offload_param
        folder = next((block.nvme_path for block in blocks if block and block.nvme_path), None)
        if folder is None:
            raise ValueError(
                "offload_states(device='nvme') needs "
                "zero_optimization.offload_optimizer.nvme_path, a folder on the disk: add it"
            )
        # startup: few runs keep state in files
        from deepspeed.ops.state_files import StateFiles

        return StateFiles.configured(folder, tree.aio)

    def movable_states(self, what: str) -> Movable:
        """Return what may leave the device, or refuse the call `what`."""
        offload = self._engine.parameter_offload
        if self._engine._sequence is None and offload is not None:
            self._engine._refuse_taken(what)
            if self.weights is None:
                self.weights = MovableWeights(offload)
            return self.weights
        sequence = self._engine._require_optimizer(what)
        movable = sequence.movable
        if not isinstance(movable, Movable):
            raise RuntimeError(
                f"engine.{what}() with {type(sequence).__name__} is not supported; use ZeRO stage "
                '2 or 3, or stage 1 without "data_types": {"grad_accum_dtype": "fp32"}'
            )
        return movable

    def empty_partition_cache(self) -> None:
        """Let gathered parameters of stage 3 go, and all memory that the device keeps for them:
        between steps, after evaluating or generating, say. What persists goes too, and is gathered
        by the next pass. All ranks call it.
        """
        if self._engine.parameter_offload is not None:
            self._engine.parameter_offload.empty_partition_cache()
        get_accelerator().empty_cache()
