"""What an engine owns to save and load itself: the checkpoint engine that writes its files, the
save in the background, and the weights as a state dict and as one file.

The engine's methods of these names hand on to here. What a save does is `saving`'s, what a load
does `loading`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.checkpoint.torch_files import write_file
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.moe.auto_ep import own_rows_only
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.utils import make_checkpoint_engine
from deepspeed.runtime.checkpointing.background_save import BackgroundSave
from deepspeed.runtime.checkpointing.folders import together
from deepspeed.runtime.checkpointing.loading import Loader, LoadOptions, refresh_masters
from deepspeed.runtime.checkpointing.model_files import ModelFiles
from deepspeed.runtime.checkpointing.saving import Saver
from deepspeed.runtime.checkpointing.training_state import TrainingState
from deepspeed.runtime.checkpointing.whole_weights import (
    consolidated,
    placeholders,
    save_whole,
    state_of_all,
)
from deepspeed.runtime.sharding.model_slices import slices_of
from deepspeed.utils.logging import logger


class EngineCheckpoint:
    """Saves and loads one engine."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._saver = Saver(state)
        self._loader = Loader(state)
        self._engine: CheckpointEngine | None = None
        self._background_save: BackgroundSave | None = None

    # Files

    @property
    def engine(self) -> CheckpointEngine:
        """What writes and reads files: as `checkpoint.writer` says, or one of the client's."""
        if self._engine is None:
            self._engine = make_checkpoint_engine(self._state._config.tree.checkpoint)
        return self._engine

    @engine.setter
    def engine(self, engine: CheckpointEngine) -> None:
        if not isinstance(engine, CheckpointEngine):
            raise TypeError(
                f"checkpoint_engine: {type(engine).__name__} is no "
                "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine; derive it "
                "from that"
            )
        self._engine = engine

    def save(
        self,
        save_dir: str,
        tag: str | None,
        client_state: dict[str, Any] | None,
        save_latest: bool,
        exclude_frozen_parameters: bool,
    ) -> bool:
        self._background_save = self._saver.save(
            self.engine, save_dir, tag, client_state, save_latest, exclude_frozen_parameters
        )
        return True

    def load(
        self, load_dir: str, tag: str | None, options: LoadOptions
    ) -> tuple[str | None, dict[str, Any] | None]:
        return self._loader.load(self.engine, load_dir, tag, options)

    # The engine's life

    def on_backward(self) -> None:
        if self._background_save is not None:
            self._background_save.on_backward()

    def on_step(self) -> None:
        """After a step, on all ranks: raise if the save in the background has failed."""
        save = self._background_save
        if save is not None and save.settle(self._state.device, wait=False):
            self._background_save = None

    def close(self) -> None:
        """Wait for this rank's part; other ranks may not come here together, so nothing is
        agreed.
        """
        if self._background_save is not None:
            self._background_save.join()
            self._background_save = None
        if self._engine is not None:
            self._engine.cleanup()

    # Weights

    def module_state_dict(
        self, destination: Any, prefix: str, keep_vars: bool, exclude_frozen_parameters: bool
    ) -> dict[str, Any]:
        module = self._state.module
        state = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        is_sharded = self._state.parameter_offload is not None and not (keep_vars or prefix)
        return placeholders(state, module) if is_sharded else state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool,
        custom_load_fn: Callable[..., Any] | None,
    ) -> None:
        module = self._state.module
        if self._state.parameter_offload is not None:
            raise CheckpointError(
                "load_module_state_dict at ZeRO stage 3: a model file has no weights; use "
                "load_checkpoint, or change parameters inside deepspeed.zero.GatheredParameters"
            )
        if custom_load_fn is not None:
            custom_load_fn(src=checkpoint[keys.MODULE], dst=module)
        else:
            module.load_state_dict(checkpoint[keys.MODULE], strict=strict)
        refresh_masters(self._state)

    def save_16bit_model(
        self, save_dir: str, save_filename: str, exclude_frozen_parameters: bool
    ) -> bool:
        offload = self._state.parameter_offload
        zero = self._state._config.tree.zero_optimization
        if offload is not None and not zero.gather_16bit_weights_on_model_save:
            logger.warning(
                "save_16bit_model saved nothing: set "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save to true"
            )
            return False
        temporary = os.path.join(save_dir, file_names.saving(save_filename))
        weights = None
        if offload is None:
            # Before what a rank may fail at alone: slices are gathered.
            weights = self._whole_weights(exclude_frozen_parameters)

        def save() -> None:
            is_first = dist.get_rank() == 0
            if offload is not None:
                save_whole(offload, temporary, exclude_frozen_parameters)
            elif is_first:
                os.makedirs(save_dir, exist_ok=True)
                write_file(temporary, weights)
            if is_first:
                os.replace(temporary, os.path.join(save_dir, save_filename))

        together(save, self._state.device, f"saving {save_filename}")
        return True

    def consolidated_state_dict(self, exclude_frozen_parameters: bool) -> dict[str, Any] | None:
        """The whole state dict on rank 0 (host memory), None elsewhere. All ranks call it."""
        offload = self._state.parameter_offload
        if offload is None:
            return self._whole_weights(exclude_frozen_parameters)
        return consolidated(offload, exclude_frozen_parameters)

    def _whole_weights(self, exclude_frozen_parameters: bool) -> dict[str, Any] | None:
        """The weights on rank 0, in storage of their own, None elsewhere: what the engine, which a
        client may have derived from, gives as its weights. Slices of a model that was cut, and
        experts, of which each rank has some, are gathered tensor by tensor, into host memory.
        """
        is_first, slices = dist.get_rank() == 0, slices_of(self._state.module)
        files = ModelFiles(self._state.module)
        files.collect(is_writer=is_first)
        if slices is None and not is_first and not files.experts.layers:
            return None
        with own_rows_only():
            own = self._state.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        if files.experts.layers:
            own = state_of_all(files.experts, own, keep=is_first)
        if slices is None and not is_first:
            return None
        if slices is None:
            state: dict[str, Any] = clone_tensors_for_torch_save(files.with_gathered(own))
            return state
        put_together: dict[str, Any] = {}
        for name, value in slices.whole(self._state.module, own):
            if is_first:
                put_together[name] = value.to("cpu")
        if not is_first:
            return None
        rest = clone_tensors_for_torch_save(
            {name: value for name, value in own.items() if name not in put_together}
        )
        return {name: put_together.get(name, rest.get(name)) for name in own}
