"""Saving and loading, as scripts call it, and what an engine owns for that: the checkpoint engine
that writes its files and the save in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.utils import make_checkpoint_engine
from deepspeed.runtime.checkpointing import loading, saving
from deepspeed.runtime.checkpointing.background_save import BackgroundSave
from deepspeed.runtime.checkpointing.whole_weights import consolidated, placeholders, save_weights
from deepspeed.runtime.engine_parts import verification
from deepspeed.runtime.engine_parts.engine_state import EngineState
from deepspeed.utils.logging import logger


class EngineCheckpoints:
    """Upstream's methods of saving and loading one engine."""

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine
        self._writer: CheckpointEngine | None = None
        self._background_save: BackgroundSave | None = None

    @property
    def writer(self) -> CheckpointEngine:
        """What writes and reads files: as `checkpoint.writer` says, or one of the client's."""
        if self._writer is None:
            self._writer = make_checkpoint_engine(self._engine._config.tree.checkpoint)
        return self._writer

    @writer.setter
    def writer(self, engine: CheckpointEngine) -> None:
        if not isinstance(engine, CheckpointEngine):
            raise TypeError(
                f"checkpoint_engine: {type(engine).__name__} is no "
                "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine; derive it "
                "from that"
            )
        self._writer = engine

    def on_backward(self) -> None:
        if self._background_save is not None:
            self._background_save.on_backward()

    def on_step(self) -> None:
        """After a step, on all ranks: raise if the save in the background has failed."""
        save = self._background_save
        if save is not None and save.settle(self._engine.device, wait=False):
            self._background_save = None

    def close(self) -> None:
        """Wait for this rank's part; other ranks may not come here together, so nothing is
        agreed.
        """
        if self._background_save is not None:
            self._background_save.join()
            self._background_save = None
        if self._writer is not None:
            self._writer.cleanup()

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything needed to go on, under `save_dir/tag`, also between micro-batches of a
        step. All ranks must call it.

        With `checkpoint.writer.decoupled` it returns when the state is copied to host memory; what
        fails after that is raised by a later `step()`, on all ranks at the same one, after that
        step is taken: training can go on.

        Args:
            save_dir: Folder of all checkpoints of a run.
            tag: Name of this one, the same on all ranks; None is `global_step{N}`.
            client_state: Returned by `load_checkpoint`.
            save_latest: Let the `latest` file name it.
            exclude_frozen_parameters: Leave frozen parameters out of the weights.

        Raises:
            CheckpointError: On every rank if any could not write, or an earlier save in the
                background has failed; an earlier checkpoint of that tag is untouched. Inside a
                backward.
            ValueError: For a tag that is no folder name, or client keys that are the engine's own.
        """
        self._engine._require_states("save_checkpoint")
        self._engine._refuse_taken("save_checkpoint")
        verification.check_patches(self._engine)
        if self._engine._sequence is not None:
            self._engine._sequence.masters.writes.take_in()
        options = saving.SaveOptions(
            save_dir, tag, client_state, save_latest, exclude_frozen_parameters
        )
        self._background_save = saving.save(self._engine, self.writer, options)
        return True

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
            load_optimizer_states: Restore moments, and the gradients of an accumulation window that
                was open; with False, masters and weights only.
            load_lr_scheduler_states: Restore the schedule.
            load_module_only: Restore weights only.
            custom_load_fn: Called as `fn(src=state_dict, dst=module)` to load the weights.

        Returns:
            Path of the checkpoint and the client state; `(None, None)`, with a warning, if
            `load_dir` has no `latest` file and no tag was given.

        Raises:
            CheckpointError: On every rank if any could not read its files or they don't fit;
                nothing was changed then.
        """
        options = loading.LoadOptions(
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        self._engine._require_states("load_checkpoint")
        return loading.load(self._engine, self.writer, load_dir, tag, options)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's state dict, in the model's dtype, as it is saved; `destination`,
        `prefix` and `keep_vars` are torch's.
        """
        module = self._engine.module
        state = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        is_sharded = self._engine.parameter_offload is not None and not (keep_vars or prefix)
        return placeholders(state, module) if is_sharded else state

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
        module = self._engine.module
        if self._engine.parameter_offload is not None:
            raise CheckpointError(
                "load_module_state_dict at ZeRO stage 3: a model file has no weights; use "
                "load_checkpoint, or change parameters inside deepspeed.zero.GatheredParameters"
            )
        if custom_load_fn is not None:
            custom_load_fn(src=checkpoint[keys.MODULE], dst=module)
        else:
            module.load_state_dict(checkpoint[keys.MODULE], strict=strict)
        loading.refresh_masters(self._engine)

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights alone, in the model's dtype, as one file. All ranks must call it.

        Returns:
            True; False, and nothing is saved, at ZeRO stage 3 without
                `stage3_gather_16bit_weights_on_model_save`.

        Raises:
            CheckpointError: On every rank if it could not be written.
        """
        zero = self._engine._config.tree.zero_optimization
        is_sharded = self._engine.parameter_offload is not None
        if is_sharded and not zero.gather_16bit_weights_on_model_save:
            logger.warning(
                "save_16bit_model saved nothing: set "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save to true"
            )
            return False
        save_weights(self._engine, save_dir, save_filename, exclude_frozen_parameters)
        return True

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        return consolidated(self._engine, exclude_frozen_parameters)
