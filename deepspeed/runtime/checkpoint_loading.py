"""`load_checkpoint`: every rank reads and checks everything; only when all ranks could, is anything changed.

What is in the files is `model_files`', `optimizer_files`' and `host_state`'s; saving is `checkpoint_saving`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.files import CheckpointError, read_file, read_latest, recover_folder, together
from deepspeed.runtime.checkpoint_parts import CheckpointParts
from deepspeed.runtime.host_state import restore_host_state, restore_position
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
from deepspeed.runtime.model_files import Cut, ModelFiles, ReadWeights
from deepspeed.runtime.recut import RecutState
from deepspeed.runtime.sharding.state import CheckpointMismatchError
from deepspeed.utils import groups
from deepspeed.utils.logging import logger


class LoadedFiles(NamedTuple):
    """What was read of a checkpoint on this rank; None where there is no such file.

    Attributes:
        model: The model file.
        weights: The model's weights.
        optimizer: State as this rank's optimizer would have saved it.
        host: State of the process in this one's place, if the run that saved it was divided over its ranks as this one is.
        position: State of any process, for the position in the data.
    """

    model: dict[str, Any]
    weights: ReadWeights
    optimizer: RecutState | None = None
    host: dict[str, Any] | None = None
    position: dict[str, Any] | None = None


class LoadingMixin(CheckpointParts):
    """`load_checkpoint` of `DeepSpeedEngine`."""

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
            Path of the checkpoint and the client state; `(None, None)` if `load_dir` has no `latest` file and no tag was given.

        Raises:
            CheckpointError: On every rank if any could not read its files or they don't fit; nothing was changed then.
        """
        load_dir = os.path.abspath(load_dir)
        if tag is None:
            tag = read_latest(load_dir)
            if tag is None:
                logger.warning(f"no checkpoint loaded: {load_dir} has no file 'latest'; give a tag if there is one")
                return None, None
        folder = os.path.join(load_dir, str(tag))
        together(lambda: recover_folder(folder) if dist.get_rank() == 0 else None, self.device, f"looking for {folder}")
        if custom_load_fn is not None and ModelFiles(self.module).is_layered:
            raise ValueError(
                "custom_load_fn: a PipelineModule's weights are in a file per layer; load them with its load_state_dir()"
            )
        strict = load_module_strict and custom_load_fn is None
        loaded: LoadedFiles = together(
            lambda: self._read(load_dir, folder, load_module_only, strict, load_optimizer_states), self.device, f"loading {folder}"
        )
        ModelFiles(self.module).load(loaded.weights, load_module_strict, custom_load_fn)
        self._refresh_masters()
        if not load_module_only:
            self._restore_training(loaded, load_optimizer_states, load_lr_scheduler_states)
        self.loaded_checkpoint_tag = str(tag)
        client_keys = set(loaded.model) - (keys.MODEL_STATE_KEYS - {keys.DS_VERSION})
        return folder, {key: loaded.model[key] for key in loaded.model if key in client_keys}

    def _read(self, load_dir: str, folder: str, module_only: bool, strict: bool, load_optimizer_states: bool) -> LoadedFiles:
        if not os.path.isdir(folder):
            tags = (
                sorted(n for n in os.listdir(load_dir) if os.path.isdir(os.path.join(load_dir, n)) and not n.startswith("."))
                if os.path.isdir(load_dir)
                else []
            )
            raise CheckpointError(f"tag {os.path.basename(folder)!r} is not in {load_dir}; there are: {', '.join(tags) or 'none'}")
        model = self._read_model_file(folder)
        weights = ModelFiles(self.module).read(folder, model, strict)
        if module_only:
            return LoadedFiles(model, weights)
        host, position = self._read_host(folder)
        return LoadedFiles(model, weights, self._read_optimizer(folder, model, load_optimizer_states), host, position)

    def _read_optimizer(self, folder: str, model: dict[str, Any], load_optimizer_states: bool) -> RecutState | None:
        try:
            return self._optimizer_files().read(folder, model)
        except (CheckpointError, CheckpointMismatchError):
            if load_optimizer_states:
                raise
            return None  # masters are rounded up from the weights

    def _read_model_file(self, folder: str) -> dict[str, Any]:
        """This rank's, or with other pipeline stages that of the first: what they have in common is the same."""
        own, path = Cut.of_this_run(), os.path.join(folder, keys.model_file(groups._get_model_parallel_rank()))
        first: dict[str, Any] = read_file(os.path.join(folder, keys.model_file(0)), mmap=True)
        saved = Cut.of_file(first)
        if saved.tensor != own.tensor:
            raise CheckpointError(
                f"{folder} was saved with {saved.tensor} tensor-parallel ranks, this run has {own.tensor}: only the model "
                "knows how its weights are sliced, so run with as many"
            )
        model: dict[str, Any] = read_file(path) if saved == own else first
        return model

    def _read_host(self, folder: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        path = os.path.join(folder, keys.host_file(dist.get_rank()))
        own = read_file(path) if os.path.isfile(path) else None
        first = os.path.join(folder, keys.host_file(0))
        position = read_file(first) if os.path.isfile(first) else None
        equal = own is not None and own.get("cut", self._host_cut()) == self._host_cut()
        return (own, None) if equal else (None, position)

    def _restore_training(self, loaded: LoadedFiles, load_optimizer_states: bool, load_lr_scheduler_states: bool) -> None:
        if loaded.optimizer is not None:
            from_fp32 = self.zero_load_from_fp32_weights()  # type: ignore[attr-defined]  # from EngineSettings
            self._optimizer_files().load(loaded.optimizer, load_optimizer_states, from_fp32)
        scheduler = loaded.model.get(keys.LR_SCHEDULER)
        if load_lr_scheduler_states and self.lr_scheduler is not None and scheduler is not None:
            self.lr_scheduler.load_state_dict(scheduler)
            if not load_optimizer_states:
                self._apply_schedule()
        self.global_steps = loaded.model[keys.GLOBAL_STEPS]
        self.global_samples = loaded.model[keys.GLOBAL_SAMPLES]
        self.skipped_steps = loaded.model[keys.SKIPPED_STEPS]
        if load_optimizer_states:
            self._restore_host(loaded)

    def _apply_schedule(self) -> None:
        """Set the rates that the schedule is at; without the optimizer's groups they would be its first until the next step."""
        schedule = self.lr_scheduler
        # Our schedules read their last rate from the groups; torch's keep it.
        rates = schedule.get_lr() if type(schedule).__name__ in VALID_LR_SCHEDULES else schedule.get_last_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = rate

    def _restore_host(self, loaded: LoadedFiles) -> None:
        steps = self.gradient_accumulation_steps()  # type: ignore[attr-defined]  # from EngineSettings
        self.tracker.micro_steps = self.global_steps * steps if loaded.host is None else loaded.host["micro_steps"]  # type: ignore[attr-defined]  # from DeepSpeedEngine
        if loaded.host is not None:
            restore_host_state(loaded.host, self.training_dataloader)
        elif loaded.position is not None:
            restore_position(loaded.position, self.training_dataloader)
