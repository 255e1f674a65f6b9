"""Saving and loading, as scripts call it; `checkpointing.engine_checkpoint` does the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime.checkpointing.engine_checkpoint import EngineCheckpoint
from deepspeed.runtime.checkpointing.loading import LoadOptions
from deepspeed.runtime.engine_parts import verification
from deepspeed.runtime.engine_parts.engine_state import EngineState


class EngineCheckpoints:
    """Upstream's methods of saving and loading one engine."""

    def __init__(self, engine: EngineState, checkpoint: EngineCheckpoint) -> None:
        self._engine, self._checkpoint = engine, checkpoint

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
        options = LoadOptions(
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        self._engine._require_states("load_checkpoint")
        return self._checkpoint.load(load_dir, tag, options)

    def module_state_dict(
        self,
        destination: object = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's state dict, in the model's dtype, as it is saved; `destination`,
        `prefix` and `keep_vars` are torch's.
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

        Returns:
            True; False, and nothing is saved, at ZeRO stage 3 without
                `stage3_gather_16bit_weights_on_model_save`.

        Raises:
            CheckpointError: On every rank if it could not be written.
        """
        return self._checkpoint.save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        return self._checkpoint.consolidated_state_dict(exclude_frozen_parameters)
