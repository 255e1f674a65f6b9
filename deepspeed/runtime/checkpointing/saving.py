"""`save_checkpoint`: what goes into which file, in the foreground or the background.

In which order folders are made, written and renamed is `save_job`'s; how ranks agree in the
background `background_save`'s. Names are in `checkpoint/constants`; weights are `model_files`',
optimizer state `optimizer_files`', a process's own state `host_state`'s. Loading is
`checkpoint_loading`'s.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names, manifest
from deepspeed.checkpoint.files import CheckpointError, together
from deepspeed.checkpoint.host_copy import HostCopy
from deepspeed.checkpoint.parallel_degrees import ParallelDegrees
from deepspeed.checkpoint.torch_files import check_loadable
from deepspeed.checkpoint.utils import separate
from deepspeed.git_version_info import version as __version__
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
    DecoupledCheckpointEngine,
)
from deepspeed.runtime.checkpointing.background_save import BackgroundSave
from deepspeed.runtime.checkpointing.description import describe, describe_whole
from deepspeed.runtime.checkpointing.host_state import host_state
from deepspeed.runtime.checkpointing.model_files import LayeredModule, ModelFiles
from deepspeed.runtime.checkpointing.optimizer_files import OptimizerFiles
from deepspeed.runtime.checkpointing.parts import CheckpointParts
from deepspeed.runtime.checkpointing.save_job import SaveJob
from deepspeed.runtime.checkpointing.storage_nodes import Put, StorageNode
from deepspeed.runtime.zero.zero_optimizer import ZeROOptimizer
from deepspeed.utils import groups
from deepspeed.utils.logging import logger


class SavingMixin(CheckpointParts):
    """`save_checkpoint` of `DeepSpeedEngine`."""

    _background_save: BackgroundSave | None = None

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
            save_dir: Folder of all checkpoints of a run, shared by all ranks, or by those of a node
                (`checkpoint.use_node_local_storage`).
            tag: Name of this one, the same on all ranks (see `checkpoint.tag_validation`); None is
                `global_step{N}`.
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
        tag = self._agreed_tag(
            str(tag) if tag is not None else file_names.default_tag(self.global_steps)
        )
        client_state = dict(client_state or {})
        taken = sorted(set(client_state) & (keys.MODEL_STATE_KEYS - {keys.DS_VERSION}))
        if taken:
            raise ValueError(
                f"client_state: {', '.join(taken)} are the engine's own keys; rename them"
            )
        check_loadable(client_state, "client_state")
        self._finish_saves()
        info = CheckpointCommitInfo(tag, os.path.abspath(save_dir), save_latest)
        job = self._save_job(info, describe_whole(self, tag, client_state, save_latest))
        engine = self.checkpoint_engine
        copy = engine.copy if isinstance(engine, DecoupledCheckpointEngine) else None

        def begin() -> tuple[dict[str, Any], Callable[[Put], None]]:
            job.prepare()
            model = ModelFiles(self.module)
            optimizer = self._optimizer_files(model)

            def fill(put: Put) -> None:
                self._put_files(
                    put, job.node, model, optimizer, client_state, exclude_frozen_parameters
                )

            description = describe(self, model, optimizer, exclude_frozen_parameters)
            return description, _separated(fill) if copy is None else _copied(fill, copy)

        try:
            # One agreement, that the folder is there and the copy is taken: training waits for it.
            description, fill = together(begin, self.device, f"saving {tag}")
            if copy is None:
                together(lambda: job.write(description, fill), self.device, f"saving {tag}")
        except CheckpointError:
            job.abandon()
            raise
        if copy is None:
            together(job.publish, self.device, f"saving {tag}")
        else:
            self._background_save = BackgroundSave(job, description, fill)
        return True

    def _save_job(self, info: CheckpointCommitInfo, head: dict[str, Any]) -> SaveJob:
        checkpoint = self._config.tree.checkpoint  # type: ignore[attr-defined]  # from DeepSpeedEngine
        writer = self.checkpoint_engine
        if isinstance(writer, DecoupledCheckpointEngine):
            writer = writer.inner
        return SaveJob(writer, info, self._storage_node(), checkpoint.keep_last, head)

    def _look_after_save(self) -> None:
        """After a step: raise if the save in the background has failed. All ranks call it,
        together.
        """
        save = self._background_save
        if save is not None and save.settle(self.device, wait=False):
            self._background_save = None

    def _close_checkpoints(self) -> None:
        """The engine ends: wait for this rank's part. Other ranks may not come here together, so
        nothing is agreed.
        """
        if self._background_save is not None:
            self._background_save.join()
            self._background_save = None
        if self._checkpoint_engine is not None:
            self._checkpoint_engine.cleanup()

    def _agreed_tag(self, tag: str) -> str:
        """The tag under which all ranks save. Files of one checkpoint under several tags could
        never be loaded.

        Raises:
            CheckpointError: Ranks gave different tags, and `checkpoint.tag_validation` is "Fail";
                "Warn" takes rank 0's.
            ValueError: It is no folder name.
        """
        if self.checkpoint_tag_validation_enabled() and not self._is_tag_of_all(tag):  # type: ignore[attr-defined]  # from EngineSettings
            tags: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(tags, tag)
            message = f"tag: ranks save under different tags {sorted(set(tags))}"
            if self.checkpoint_tag_validation_fail():  # type: ignore[attr-defined]  # from EngineSettings
                raise CheckpointError(
                    f"{message}; every rank must give the same (checkpoint.tag_validation is "
                    '"Fail")'
                )
            logger.warning(f"{message}; this one uses rank 0's, {tags[0]!r}")
            tag = tags[0]
        if not tag or os.path.basename(tag) != tag or tag in (".", ".."):
            raise ValueError(f"tag: {tag!r} is no name of a folder; it must not contain a path")
        return tag

    def _is_tag_of_all(self, tag: str) -> bool:
        """Whether all ranks have the same, by one collective of a number; which they are is asked
        when they differ.
        """
        if dist.get_world_size() == 1:
            return True
        number = int.from_bytes(hashlib.sha256(tag.encode()).digest()[:7], "big")
        bounds = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        highest, negative_of_lowest = bounds.tolist()
        return bool(highest == -negative_of_lowest)

    def _put_files(
        self,
        put: Put,
        node: StorageNode,
        files: ModelFiles,
        optimizer: OptimizerFiles,
        client_state: dict[str, Any],
        exclude_frozen_parameters: bool,
    ) -> None:
        weights = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        files.put(put, node, weights, exclude_frozen_parameters)
        # One of those that hold the same part of the model: with sequence parallelism more than the
        # data-parallel ranks.
        if node.is_first(dist.get_all_ranks_from_group(groups._get_sequence_data_parallel_group())):
            state = self._model_state(files.in_model_file(weights), exclude_frozen_parameters)
            state[keys.OPTIMIZER] = optimizer.in_model_file()
            if files.experts.layers:
                state[keys.NUM_EXPERTS] = files.experts.counts
            put(file_names.model_file(groups._get_model_parallel_rank()), {**state, **client_state})
        for name, content in optimizer.own_files(node).items():
            put(name, content)
        num_forwards = self.module.num_forwards if isinstance(self.module, LayeredModule) else ()
        micro_steps = self.tracker.micro_steps  # type: ignore[attr-defined]  # from DeepSpeedEngine
        host = host_state(self.training_dataloader, micro_steps, self._host_degrees(), num_forwards)
        put(file_names.host_file(dist.get_rank()), host)

    def _model_state(
        self, weights: dict[str, Any] | None, exclude_frozen_parameters: bool
    ) -> dict[str, Any]:
        sequence = self._sequence
        sharded = isinstance(sequence, ZeROOptimizer)
        degrees = ParallelDegrees.of_this_run()
        return {
            keys.MODULE: weights,
            keys.BUFFER_NAMES: [name for name, _ in self.module.named_buffers()],
            keys.OPTIMIZER: None,
            keys.PARAM_SHAPES: self._param_shapes() if sharded else None,
            **self._frozen_state(exclude_frozen_parameters),
            keys.SHARED_PARAMS: self._shared_params() if sharded else None,
            keys.LR_SCHEDULER: self.lr_scheduler.state_dict()
            if self.lr_scheduler is not None
            else None,
            keys.DATA_SAMPLER: None,
            keys.RANDOM_LTD: None,
            keys.SPARSE_TENSOR_MODULE_NAMES: set(),
            keys.SKIPPED_STEPS: self.skipped_steps,
            keys.GLOBAL_STEPS: self.global_steps,
            keys.GLOBAL_SAMPLES: self.global_samples,
            # Readers take it for the number of optimizer files: with optimizer instances those of
            # one instance.
            keys.DP_WORLD_SIZE: sequence.num_shards
            if sharded
            else groups._get_data_parallel_world_size(),
            keys.MP_WORLD_SIZE: degrees.parts,
            keys.CHECKPOINT_PARALLEL_DIMS: {
                keys.CHECKPOINT_PP_DEGREE: degrees.stages,
                keys.CHECKPOINT_TP_DEGREE: degrees.tensor,
            },
            keys.DS_CONFIG: self.config,  # type: ignore[attr-defined]  # from EngineSettings
            keys.DS_VERSION: __version__,
            keys.MANIFEST_VERSION: manifest.VERSION,
        }

    def _param_shapes(self) -> list[OrderedDict[str, torch.Size]]:
        """Shapes per group in flat order: offline tools degrees the concatenated shards by them."""
        names = self._sequence.param_names
        return [
            OrderedDict((names[param], param.shape) for param in group.params)
            for group in self._sequence.groups
        ]

    def _frozen_state(self, exclude: bool) -> dict[str, Any]:
        if not isinstance(self._sequence, ZeROOptimizer) or isinstance(
            self._sequence, BF16_Optimizer
        ):
            return {keys.FROZEN_PARAM_SHAPES: None, keys.FROZEN_PARAM_FRAGMENTS: None}
        frozen = [
            (n, p) for n, p in self.module.named_parameters() if not p.requires_grad and not exclude
        ]
        return {
            keys.FROZEN_PARAM_SHAPES: OrderedDict((name, param.shape) for name, param in frozen),
            keys.FROZEN_PARAM_FRAGMENTS: OrderedDict(
                (name, param.detach()) for name, param in frozen
            ),
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


def _separated(fill: Callable[[Put], None]) -> Callable[[Put], None]:
    """What gives the content that `fill` gives, each tensor with storage of its own."""
    return lambda put: fill(lambda name, content: put(name, separate(content)))


def _copied(fill: Callable[[Put], None], copy: HostCopy) -> Callable[[Put], None]:
    """What gives a copy of what `fill` gives now, each tensor with storage of its own."""
    copies: list[tuple[str, Any]] = []
    copy.reset()
    fill(lambda name, content: copies.append((name, copy(content))))

    def replay(put: Put) -> None:
        for name, content in copies:
            put(name, content)

    return replay
