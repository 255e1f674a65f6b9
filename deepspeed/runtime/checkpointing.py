"""Saving and loading of an engine: what goes into which file, and in which order all ranks do it.

Saving: every rank writes its files into a temporary folder; when all have, rank 0 renames it and updates `latest`. Loading: every
rank reads and checks everything; only when all ranks could, is anything changed. Names are in `checkpoint/constants`, files in
`checkpoint/files`; weights are `model_files`', optimizer state `optimizer_files`', a process's own state `host_state`'s.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.files import (
    CheckpointError,
    check_loadable,
    read_file,
    read_latest,
    recover_folder,
    replace_folder,
    together,
    write_file,
    write_latest,
)
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.git_version_info import version as __version__
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.host_state import host_state, restore_host_state, restore_position
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
from deepspeed.runtime.master_weights import MasterWeightOptimizer
from deepspeed.runtime.model_files import Cut, ModelFiles, ReadWeights
from deepspeed.runtime.optimizer_files import OptimizerFiles
from deepspeed.runtime.recut import RecutState
from deepspeed.runtime.sharding.state import CheckpointMismatchError
from deepspeed.runtime.zero.zero_optimizer import ZeROOptimizer
from deepspeed.utils import groups
from deepspeed.utils.logging import log_dist, logger


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


class CheckpointMixin:
    """`save_checkpoint`, `load_checkpoint` and the state of `DeepSpeedEngine`."""

    module: nn.Module
    optimizer: Any
    lr_scheduler: Any
    training_dataloader: Any
    device: torch.device
    global_steps: int
    global_samples: int
    skipped_steps: int
    loaded_checkpoint_tag: str | None
    _sequence: Any

    # Module state

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's state dict, in the model's dtype."""
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters():
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

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
        state = checkpoint[keys.MODULE]
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
        else:
            self.module.load_state_dict(state, strict=strict)
        self._refresh_masters()

    def _refresh_masters(self) -> None:
        if isinstance(self._sequence, MasterWeightOptimizer):
            self._sequence.refresh_fp32_params()

    # Saving

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything needed to go on, under `save_dir/tag`. All ranks must call it.

        Args:
            save_dir: Folder of all checkpoints of a run, shared by all ranks.
            tag: Name of this one; None is `global_step{N}`.
            client_state: Returned by `load_checkpoint`.
            save_latest: Let the `latest` file name it.
            exclude_frozen_parameters: Leave frozen parameters out of the weights.

        Returns:
            True.

        Raises:
            CheckpointError: On every rank if any could not write; an earlier checkpoint of that tag is untouched.
            ValueError: For a tag that is no folder name, or client keys that are the engine's own.
        """
        tag = str(tag) if tag is not None else f"global_step{self.global_steps}"
        self._check_tag(tag)
        client_state = dict(client_state or {})
        taken = sorted(set(client_state) & (keys.MODEL_STATE_KEYS - {keys.DS_VERSION}))
        if taken:
            raise ValueError(f"client_state: {', '.join(taken)} are the engine's own keys; rename them")
        check_loadable(client_state, "client_state")
        save_dir = os.path.abspath(save_dir)
        temporary = os.path.join(save_dir, f".{tag}.saving")
        together(lambda: self._make_folder(temporary), self.device, f"making {temporary}")
        try:
            together(lambda: self._write_files(temporary, client_state, exclude_frozen_parameters), self.device, f"saving {tag}")
        except CheckpointError:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # a full disk is why most saves fail
            raise
        together(lambda: self._publish(save_dir, temporary, tag, save_latest), self.device, f"saving {tag}")
        log_dist(f"saved checkpoint {os.path.join(save_dir, tag)}", ranks=[0])
        return True

    def _check_tag(self, tag: str) -> None:
        if not tag or os.path.basename(tag) != tag or tag in (".", ".."):
            raise ValueError(f"tag: {tag!r} is no name of a folder; it must not contain a path")
        if not self.checkpoint_tag_validation_enabled() or dist.get_world_size() == 1:  # type: ignore[attr-defined]  # from EngineSettings
            return
        tags: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tags, tag)
        if len(set(tags)) > 1:
            message = f"tag: ranks save under different tags {sorted(set(tags))}; every rank must give the same"
            # Files of one checkpoint in different folders can never be loaded, so a warning (upstream's default) would hide a loss.
            raise CheckpointError(message)

    @staticmethod
    def _make_folder(temporary: str) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            os.makedirs(temporary)

    def _write_files(self, folder: str, client_state: dict[str, Any], exclude_frozen_parameters: bool) -> None:
        mp_rank = groups._get_model_parallel_rank()
        files, optimizer = ModelFiles(self.module), self._optimizer_files()
        weights = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        files.write(folder, weights, exclude_frozen_parameters)
        # The first of those that hold the same part of the model: with sequence parallelism more than the data-parallel ranks.
        if groups._get_sequence_data_parallel_rank() == 0:
            state = self._model_state(files.in_model_file(weights), exclude_frozen_parameters)
            state[keys.OPTIMIZER] = optimizer.in_model_file()
            if files.experts.layers:
                state[keys.NUM_EXPERTS] = files.experts.counts
            write_file(os.path.join(folder, keys.model_file(mp_rank)), {**state, **client_state})
        for name, content in optimizer.own_files().items():
            write_file(os.path.join(folder, name), content)
        host = host_state(self.training_dataloader, self.tracker.micro_steps, self._host_cut())  # type: ignore[attr-defined]  # from DeepSpeedEngine
        write_file(os.path.join(folder, keys.host_file(dist.get_rank())), host)

    def _optimizer_files(self) -> OptimizerFiles:
        tree = self._config.tree  # type: ignore[attr-defined]  # from DeepSpeedEngine
        return OptimizerFiles(
            self._sequence,
            self.optimizer,
            self.module,
            tree.bf16.enabled,
            tree.use_data_before_expert_parallelism,
            self.config,  # type: ignore[attr-defined]  # from EngineSettings
        )

    def _host_cut(self) -> dict[str, int]:
        """Where a process must be in an equal run for its random states to be its own again."""
        return {
            "world": dist.get_world_size(),
            "replicas": groups._get_sequence_data_parallel_world_size(),
            **Cut.of_this_run()._asdict(),
        }

    @staticmethod
    def _publish(save_dir: str, temporary: str, tag: str, save_latest: bool) -> None:
        if dist.get_rank() == 0:
            replace_folder(temporary, os.path.join(save_dir, tag))
            if save_latest:
                write_latest(save_dir, tag)

    def _model_state(self, weights: dict[str, Any] | None, exclude_frozen_parameters: bool) -> dict[str, Any]:
        sequence = self._sequence
        sharded = isinstance(sequence, ZeROOptimizer)
        cut = Cut.of_this_run()
        return {
            keys.MODULE: clone_tensors_for_torch_save(weights),
            keys.BUFFER_NAMES: [name for name, _ in self.module.named_buffers()],
            keys.OPTIMIZER: None,
            keys.PARAM_SHAPES: self._param_shapes() if sharded else None,
            **self._frozen_state(exclude_frozen_parameters),
            keys.SHARED_PARAMS: self._shared_params() if sharded else None,
            keys.LR_SCHEDULER: self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
            keys.DATA_SAMPLER: None,
            keys.RANDOM_LTD: None,
            keys.SPARSE_TENSOR_MODULE_NAMES: set(),
            keys.SKIPPED_STEPS: self.skipped_steps,
            keys.GLOBAL_STEPS: self.global_steps,
            keys.GLOBAL_SAMPLES: self.global_samples,
            # Readers take it for the number of optimizer files: with optimizer instances those of one instance.
            keys.DP_WORLD_SIZE: sequence.num_shards if sharded else groups._get_data_parallel_world_size(),
            keys.MP_WORLD_SIZE: cut.parts,
            keys.CHECKPOINT_PARALLEL_DIMS: {keys.CHECKPOINT_PP_DEGREE: cut.stages, keys.CHECKPOINT_TP_DEGREE: cut.tensor},
            keys.DS_CONFIG: self.config,  # type: ignore[attr-defined]  # from EngineSettings
            keys.DS_VERSION: __version__,
        }

    def _param_shapes(self) -> list[OrderedDict[str, torch.Size]]:
        """Shapes per group in flat order: offline tools cut the concatenated shards by them."""
        names = self._sequence.param_names
        return [OrderedDict((names[param], param.shape) for param in group.params) for group in self._sequence.groups]

    def _frozen_state(self, exclude: bool) -> dict[str, Any]:
        if not isinstance(self._sequence, ZeROOptimizer) or isinstance(self._sequence, BF16_Optimizer):
            return {keys.FROZEN_PARAM_SHAPES: None, keys.FROZEN_PARAM_FRAGMENTS: None}
        frozen = [(n, p) for n, p in self.module.named_parameters() if not p.requires_grad and not exclude]
        return {
            keys.FROZEN_PARAM_SHAPES: OrderedDict((name, param.shape) for name, param in frozen),
            keys.FROZEN_PARAM_FRAGMENTS: OrderedDict((name, param.detach().clone().cpu()) for name, param in frozen),
        }

    def _shared_params(self) -> dict[str, str]:
        """Name -> first name, for parameters that occur under several names."""
        first: dict[int, str] = {}
        shared = {}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            if id(param) in first:
                shared[name] = first[id(param)]
            else:
                first[id(param)] = name
        return shared

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the weights alone, in the model's dtype, as one file. All ranks must call it."""

        def save() -> None:
            if dist.get_rank() == 0:
                os.makedirs(save_dir, exist_ok=True)
                state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
                temporary = os.path.join(save_dir, f".{save_filename}.saving")
                write_file(temporary, clone_tensors_for_torch_save(state))
                os.replace(temporary, os.path.join(save_dir, save_filename))

        together(save, self.device, f"saving {save_filename}")
        return True

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """Upstream's older name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    # Loading

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

    # What clients gather weights with; below stage 3 every rank has them whole.

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole state dict on rank 0 (host memory), None elsewhere."""
        if dist.get_rank() != 0:
            return None
        return clone_tensors_for_torch_save(self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters))
