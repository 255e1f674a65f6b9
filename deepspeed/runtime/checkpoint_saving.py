"""`save_checkpoint`: what goes into which file, and in which order all ranks write.

Every rank writes its files into a temporary folder; when all have, rank 0 renames it and updates `latest`. Names are in
`checkpoint/constants`, files in `checkpoint/files`; weights are `model_files`', optimizer state `optimizer_files`', a process's own
state `host_state`'s. Loading is `checkpoint_loading`'s.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.files import CheckpointError, check_loadable, replace_folder, together, write_file, write_latest
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.git_version_info import version as __version__
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.checkpoint_parts import CheckpointParts
from deepspeed.runtime.host_state import host_state
from deepspeed.runtime.model_files import Cut, ModelFiles
from deepspeed.runtime.zero.zero_optimizer import ZeROOptimizer
from deepspeed.utils import groups
from deepspeed.utils.logging import log_dist


class SavingMixin(CheckpointParts):
    """`save_checkpoint` of `DeepSpeedEngine`."""

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
