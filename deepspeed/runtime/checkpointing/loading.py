"""One load: every rank reads and checks everything; only when all could is anything changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.files import (
    CheckpointError,
    has_weights_in_shards,
    lead_model_file,
    read_by,
    read_file,
)
from deepspeed.checkpoint.manifest import MANIFEST
from deepspeed.checkpoint.resharding.cuts import ParallelDegrees
from deepspeed.checkpoint.resharding.rank_slices import RankSlices
from deepspeed.checkpoint.verification import OFF, existing_tags
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
    DecoupledCheckpointEngine,
)
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpointing.background_save import finish_saves
from deepspeed.runtime.checkpointing.folders import FolderChoice, storage_node, together
from deepspeed.runtime.checkpointing.model_files import LayeredModule, ModelFiles, ReadWeights
from deepspeed.runtime.checkpointing.optimizer_files import OptimizerFiles
from deepspeed.runtime.checkpointing.optimizer_resharding import ReshardedState
from deepspeed.runtime.checkpointing.process_files import (
    REPEAT,
    host_degrees,
    read_window,
    restore_host_state,
    restore_position,
    restore_window,
    where_step_began,
)
from deepspeed.runtime.checkpointing.training_state import TrainingState
from deepspeed.runtime.checkpointing.weight_resharding import (
    ShardWeights,
    load_shard_weights,
    read_own_model_file,
    read_shard_weights,
    read_sliced_weights,
    shards_as_whole,
    slices_of_this_rank,
)
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.sharded_state import CheckpointMismatchError


class LoadOptions(NamedTuple):
    """What is restored; see `DeepSpeedEngine.load_checkpoint`."""

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Callable[..., Any] | None = None


class LoadedFiles(NamedTuple):
    """What was read of a checkpoint on this rank; None where there is no such file.

    Attributes:
        host: State of the process in this one's place, if the run was divided as this one is.
        position: State of any process, for the position in the data.
        window: Gradients of an accumulation window.
    """

    model: dict[str, Any]
    weights: ReadWeights | ShardWeights
    optimizer: ReshardedState | None = None
    host: dict[str, Any] | None = None
    position: dict[str, Any] | None = None
    window: dict[str, Any] | None = None


def load(
    state: TrainingState,
    engine: CheckpointEngine,
    load_dir: str,
    tag: str | None,
    options: LoadOptions,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load into one engine; see `DeepSpeedEngine.load_checkpoint`. All ranks call it."""
    # Other engines of this process may be writing what is read here.
    finish_saves(state.device)
    load_dir = os.path.abspath(load_dir)
    checkpoint = state._config.tree.checkpoint
    folders = FolderChoice(
        storage_node(checkpoint.use_node_local_storage),
        checkpoint.verify,
        checkpoint.load_universal,
        state.device,
    )
    named = str(tag) if tag is not None else folders.latest_tag(load_dir)
    if named is None:
        return None, None
    folder = os.path.join(load_dir, named)
    folders.recover(folder)
    if options.custom_load_fn is not None and ModelFiles(state.module).is_layered:
        raise ValueError(
            "custom_load_fn: a PipelineModule's weights are in a file per layer; load them "
            "with its load_state_dir()"
        )
    folders.verify_newest(folder) if tag is None else folders.verify(folder)
    own = _Load(state, folder, options)
    with _reading_by(engine):
        loaded: LoadedFiles = together(own.read, state.device, f"loading {folder}")
    if isinstance(loaded.weights, ShardWeights):
        assert state.parameter_offload is not None, "weights of stage 3 for a model without"
        load_shard_weights(
            state.parameter_offload, state._sequence, loaded.weights, own.loads_masters
        )
    else:
        ModelFiles(state.module).load(
            loaded.weights, options.load_module_strict, options.custom_load_fn
        )
        refresh_masters(state)
    if not options.load_module_only:
        own.restore_training(own.with_masters_of_all(loaded))
    state.loaded_checkpoint_tag = named
    client_keys = set(loaded.model) - (keys.MODEL_STATE_KEYS - {keys.DS_VERSION})
    return folder, {key: loaded.model[key] for key in loaded.model if key in client_keys}


@dataclass(frozen=True)
class _Load:
    """What this rank reads of one folder, and what it restores of that."""

    state: TrainingState
    folder: str
    options: LoadOptions

    def _read_sharded(self, offload: DeepSpeedZeRoOffload) -> LoadedFiles:
        state, folder, options = self.state, self.folder, self.options
        if options.custom_load_fn is not None:
            raise CheckpointError(
                "custom_load_fn is not supported at ZeRO stage 3, where no rank has whole weights: "
                "load into the model before deepspeed.initialize, or change parameters inside "
                "deepspeed.zero.GatheredParameters"
            )
        files = ModelFiles(state.module)
        tensor = state.parallel_map.tensor
        model = read_own_model_file(folder, offload.instances.inside, tensor.rank)
        self._check_manifest_is_there(model)
        universal = state._config.load_universal_checkpoint
        slices = slices_of_this_rank(state.module, tensor, folder, model, universal)
        optimizer = None
        if state._sequence is not None and not options.load_module_only:
            optimizer = self._read_optimizer(files, model, slices)
        wanted = set(state.module.parameters())
        if (
            optimizer is not None
            and optimizer.has_masters
            and options.load_optimizer_states
            and self.loads_masters
        ):
            wanted -= OptimizerFiles(state, files).trained
        weights = read_shard_weights(
            files, folder, model, slices, wanted, options.load_module_strict, tensor.rank
        )
        if options.load_module_only:
            return LoadedFiles(model, weights)
        return LoadedFiles(model, weights, optimizer, *self._read_host())

    @property
    def loads_masters(self) -> bool:
        return self.state._config.tree.zero_optimization.load_from_fp32_weights

    def read(self) -> LoadedFiles:
        state, folder, options = self.state, self.folder, self.options
        if state.parameter_offload is not None:
            return self._read_sharded(state.parameter_offload)
        model = self._read_model_file()
        module = state.module
        universal = state._config.load_universal_checkpoint
        tensor = state.parallel_map.tensor
        slices = slices_of_this_rank(module, tensor, folder, model, universal)
        files = ModelFiles(module)
        strict = options.load_module_strict if options.custom_load_fn is None else None
        whole = (
            shards_as_whole(module, tensor, folder)
            if slices is None and has_weights_in_shards(folder)
            else slices
        )
        weights = (
            files.read(folder, model, strict)
            if whole is None
            else read_sliced_weights(files, whole, strict)
        )
        if options.load_module_only:
            return LoadedFiles(model, weights)
        optimizer = self._read_optimizer(files, model, slices)
        return LoadedFiles(model, weights, optimizer, *self._read_host())

    def _read_optimizer(
        self, files: ModelFiles, model: dict[str, Any], slices: RankSlices | None
    ) -> ReshardedState | None:
        try:
            return OptimizerFiles(self.state, files).read(self.folder, model, slices)
        except (CheckpointError, CheckpointMismatchError):
            if self.options.load_optimizer_states:
                raise
            return None  # masters are rounded up from the weights

    def with_masters_of_all(self, loaded: LoadedFiles) -> LoadedFiles:
        """`loaded` without optimizer state if some rank found none: loading it takes all ranks."""
        if self.options.load_optimizer_states or dist.get_world_size() == 1:
            return loaded  # who found none has raised
        found = int(loaded.optimizer is not None)
        everywhere = torch.tensor([found], dtype=torch.int32, device=self.state.device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        return loaded if everywhere.item() else loaded._replace(optimizer=None)

    def _read_model_file(self) -> dict[str, Any]:
        """This rank's, or with other pipeline stages the first's, which has what is common."""
        folder, parallel_map = self.folder, self.state.parallel_map
        own = ParallelDegrees.of_this_run(parallel_map)
        path = os.path.join(folder, file_names.model_file(parallel_map.model.rank))
        lead = lead_model_file(folder)
        if os.path.isfile(path) and not os.path.isfile(lead):
            lead = path  # with node-local storage the first part may be on another node
        first: dict[str, Any] = read_file(lead, mmap=True)
        self._check_manifest_is_there(first)
        is_alike = ParallelDegrees.of_file(first) == own and not has_weights_in_shards(folder)
        model: dict[str, Any] = read_file(path) if is_alike else first
        return model

    def _check_manifest_is_there(self, model: dict[str, Any]) -> None:
        path = os.path.join(self.folder, MANIFEST)
        is_checked = self.state._config.tree.checkpoint.verify != OFF
        if is_checked and keys.MANIFEST_VERSION in model and not os.path.isfile(path):
            raise CheckpointError(
                f"{path} is missing, so the folder cannot be checked. Restore it, load another tag "
                f"({', '.join(existing_tags(os.path.dirname(self.folder)))}), or load without "
                "checks by checkpoint.verify 'off'"
            )

    def restore_training(self, loaded: LoadedFiles) -> None:
        state, options = self.state, self.options
        if loaded.optimizer is not None:
            files = OptimizerFiles(state, ModelFiles(state.module))
            files.load(loaded.optimizer, options.load_optimizer_states, self.loads_masters)
        scheduler = loaded.model.get(keys.LR_SCHEDULER)
        if (
            options.load_lr_scheduler_states
            and state.lr_scheduler is not None
            and scheduler is not None
        ):
            if loaded.optimizer is not None:
                scheduler = loaded.optimizer.schedule(scheduler)
            state.lr_scheduler.load_state_dict(scheduler)
            if not options.load_optimizer_states:
                self._apply_schedule()
        state.global_steps = loaded.model[keys.GLOBAL_STEPS]
        state.global_samples = loaded.model[keys.GLOBAL_SAMPLES]
        state.skipped_steps = loaded.model[keys.SKIPPED_STEPS]
        if options.load_optimizer_states:
            self._restore_host(loaded)

    def _read_host(
        self,
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None, dict[str, Any] | None]:
        degrees = host_degrees(self.state.parallel_map)
        path = os.path.join(self.folder, file_names.host_file(dist.get_rank()))
        own = read_file(path) if os.path.isfile(path) else None
        if own is not None and own.get("cut", degrees) == degrees:
            host, position = own, None
        else:
            first = os.path.join(self.folder, file_names.host_file(0))
            host, position = None, read_file(first) if os.path.isfile(first) else None
        window = None
        if self.options.load_optimizer_states:
            window = read_window(self.state, self.folder, host or position or {})
            if self.state._config.tree.checkpoint.open_window == REPEAT:
                host, position = (one and where_step_began(one) for one in (host, position))
        return host, position, window

    def _apply_schedule(self) -> None:
        """Set the schedule's present rates, which would else be its first until the next step."""
        schedule = self.state.lr_scheduler
        # Our schedules read their last rate from the groups; torch's keep it.
        rates = (
            schedule.get_lr()
            if type(schedule).__name__ in VALID_LR_SCHEDULES
            else schedule.get_last_lr()
        )
        sequence = self.state._sequence
        for group, rate in zip(sequence.param_groups if sequence else (), rates, strict=False):
            group["lr"] = rate

    def _restore_host(self, loaded: LoadedFiles) -> None:
        state = self.state
        steps = state._config.gradient_accumulation_steps
        done = state.global_steps * steps if loaded.host is None else loaded.host["micro_steps"]
        if loaded.host is not None and loaded.host.get("window") and loaded.window is None:
            done -= done % steps
        state.tracker.micro_steps = done
        restore_window(state, loaded.window)
        if loaded.host is not None:
            restore_host_state(loaded.host, state.training_dataloader)
        elif loaded.position is not None:
            restore_position(loaded.position, state.training_dataloader)
        counts = (loaded.host or loaded.position or {}).get("num_forwards")
        if counts and isinstance(state.module, LayeredModule):
            same = len(counts) == len(state.module.num_forwards)
            state.module.num_forwards[:] = (
                counts if same else [counts[0]] * len(state.module.num_forwards)
            )


def refresh_masters(state: TrainingState) -> None:
    """Masters, where there are any, follow the model's weights."""
    if state._sequence is not None:
        state._sequence.refresh_fp32_params()


def _reading_by(engine: CheckpointEngine) -> AbstractContextManager[None]:
    """Read files by the client's checkpoint engine, if it is one that reads otherwise than ours."""
    inner = engine.inner if isinstance(engine, DecoupledCheckpointEngine) else engine
    return nullcontext() if type(inner).load is TorchCheckpointEngine.load else read_by(inner.load)
