"""`load_checkpoint`: every rank reads and checks everything; only when all ranks could, is anything
changed.

What is in the files is `model_files`', `optimizer_files`' and `host_state`'s; saving is
`checkpoint_saving`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.files import (
    CheckpointError,
    read_file,
    read_latest,
    recover_folder,
    together,
)
from deepspeed.checkpoint.manifest import MANIFEST, read_manifest
from deepspeed.checkpoint.parallel_degrees import ParallelDegrees
from deepspeed.checkpoint.resharding.rank_slices import RankSlices
from deepspeed.checkpoint.retention import newest_common_tag, published_tags
from deepspeed.checkpoint.verification import (
    FULL,
    OFF,
    check_coverage,
    check_folder,
    existing_tags,
    latest_tag,
    newest_published,
    raise_problems,
)
from deepspeed.runtime.checkpointing.host_state import restore_host_state, restore_position
from deepspeed.runtime.checkpointing.model_files import LayeredModule, ModelFiles, ReadWeights
from deepspeed.runtime.checkpointing.optimizer_resharding import ReshardedState
from deepspeed.runtime.checkpointing.parts import CheckpointParts
from deepspeed.runtime.checkpointing.storage_nodes import StorageNode
from deepspeed.runtime.checkpointing.weight_resharding import (
    read_sliced_weights,
    slices_of_this_rank,
)
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
from deepspeed.runtime.sharding.state import CheckpointMismatchError
from deepspeed.utils import groups
from deepspeed.utils.logging import logger


class LoadedFiles(NamedTuple):
    """What was read of a checkpoint on this rank; None where there is no such file.

    Attributes:
        model: The model file.
        weights: The model's weights.
        optimizer: State as this rank's optimizer would have saved it.
        host: State of the process in this one's place, if the run that saved it was divided over
            its ranks as this one is.
        position: State of any process, for the position in the data.
    """

    model: dict[str, Any]
    weights: ReadWeights
    optimizer: ReshardedState | None = None
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
            Path of the checkpoint and the client state; `(None, None)` if `load_dir` has no
            `latest` file and no tag was given.

        Raises:
            CheckpointError: On every rank if any could not read its files or they don't fit;
                nothing was changed then.
        """
        self._finish_saves()
        load_dir = os.path.abspath(load_dir)
        node = self._storage_node()
        named = str(tag) if tag is not None else self._latest_tag(load_dir, node)
        if named is None:
            logger.warning(
                f"no checkpoint loaded: {load_dir} has no file 'latest'; give a tag if there is one"
            )
            return None, None
        folder = os.path.join(load_dir, named)
        together(
            lambda: recover_folder(folder) if node.publishes else None,
            self.device,
            f"looking for {folder}",
        )
        if custom_load_fn is not None and ModelFiles(self.module).is_layered:
            raise ValueError(
                "custom_load_fn: a PipelineModule's weights are in a file per layer; load them "
                "with its load_state_dir()"
            )
        self._verify_newest(folder, node) if tag is None else self._verify(folder, node)
        strict = load_module_strict if custom_load_fn is None else None
        with self._reading():
            loaded: LoadedFiles = together(
                lambda: self._read(folder, load_module_only, strict, load_optimizer_states),
                self.device,
                f"loading {folder}",
            )
        ModelFiles(self.module).load(loaded.weights, load_module_strict, custom_load_fn)
        self._refresh_masters()
        if not load_module_only:
            self._restore_training(loaded, load_optimizer_states, load_lr_scheduler_states)
        self.loaded_checkpoint_tag = named
        client_keys = set(loaded.model) - (keys.MODEL_STATE_KEYS - {keys.DS_VERSION})
        return folder, {key: loaded.model[key] for key in loaded.model if key in client_keys}

    def _latest_tag(self, load_dir: str, node: StorageNode) -> str | None:
        """What to load when no tag is given: the same on all ranks."""
        universal = self.load_universal_checkpoint()  # type: ignore[attr-defined]  # from EngineSettings
        what = f"looking for the newest checkpoint in {load_dir}"
        known = together(lambda: self._known_tags(load_dir, node, universal), self.device, what)
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, known)
        return newest_common_tag([everywhere[publisher] for publisher in node.publishers])

    @staticmethod
    def _known_tags(
        load_dir: str, node: StorageNode, universal: bool
    ) -> tuple[str | None, list[str]]:
        if not node.publishes:
            return None, []
        if universal:
            tag = read_latest(load_dir, keys.LATEST_UNIVERSAL)
            return tag, [] if tag is None else [tag]
        named, newest = latest_tag(load_dir), newest_published(load_dir)
        if newest is not None and named != newest:
            logger.warning(
                f"{os.path.join(load_dir, keys.LATEST)} "
                f"{'is missing' if named is None else f'names {named!r}'}, but the newest "
                f"checkpoint that it was to name is {newest!r}: a save was killed before it wrote "
                f"the file, or the file was lost or changed since. Loading {named or newest!r}; "
                "give a tag for another"
            )
        return named or newest, published_tags(load_dir)

    def _verify_newest(self, folder: str, node: StorageNode) -> None:
        """`_verify`, and if it fails tell which older checkpoint could be loaded: no other is
        loaded unasked.
        """
        try:
            return self._verify(folder, node)
        except CheckpointError as error:
            load_dir, tag = os.path.split(folder)
            candidates: list[Any] = [
                [name for name in reversed(published_tags(load_dir)) if name != tag]
            ]
            dist.broadcast_object_list(candidates, src=0)
            for name in candidates[0]:
                if self._is_valid(os.path.join(load_dir, name), node):
                    raise CheckpointError(
                        f"{error}. The newest other checkpoint that is as it was written has "
                        f"tag={name!r}"
                    ) from error
            raise

    def _is_valid(self, folder: str, node: StorageNode) -> bool:
        try:
            self._verify(folder, node)
        except CheckpointError:
            return False
        return True

    def _verify(self, folder: str, node: StorageNode) -> None:
        """Hold the folder against its manifest, if it has one. All ranks call it, each reads a
        share of the files.

        Raises:
            CheckpointError: On every rank, naming what is wrong.
        """
        level = self._config.tree.checkpoint.verify  # type: ignore[attr-defined]  # from DeepSpeedEngine
        parts = together(
            lambda: _check_share(folder, node, level), self.device, f"checking {folder}"
        )
        if len(node.publishers) > 1:
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, parts)
            parts = {rank: part for found in everywhere for rank, part in found.items()}
        # Of one folder its first rank has them all; of folders of several nodes now every rank has.
        together(
            lambda: raise_problems(folder, check_coverage(parts.values())),
            self.device,
            f"checking {folder}",
        )

    def _read(
        self, folder: str, module_only: bool, strict: bool | None, load_optimizer_states: bool
    ) -> LoadedFiles:
        model = self._read_model_file(folder)
        slices = slices_of_this_rank(self.module, folder, model, self.load_universal_checkpoint())  # type: ignore[attr-defined]  # from EngineSettings
        files = ModelFiles(self.module)
        weights = (
            files.read(folder, model, strict)
            if slices is None
            else read_sliced_weights(files, slices, strict)
        )
        if module_only:
            return LoadedFiles(model, weights)
        host, position = self._read_host(folder)
        optimizer = self._read_optimizer(files, folder, model, slices, load_optimizer_states)
        return LoadedFiles(model, weights, optimizer, host, position)

    def _read_optimizer(
        self,
        files: ModelFiles,
        folder: str,
        model: dict[str, Any],
        slices: RankSlices | None,
        load_optimizer_states: bool,
    ) -> ReshardedState | None:
        try:
            return self._optimizer_files(files).read(folder, model, slices)
        except (CheckpointError, CheckpointMismatchError):
            if load_optimizer_states:
                raise
            return None  # masters are rounded up from the weights

    def _read_model_file(self, folder: str) -> dict[str, Any]:
        """This rank's, or with other pipeline stages that of the first: what they have in common is
        the same.
        """
        own, path = (
            ParallelDegrees.of_this_run(),
            os.path.join(folder, file_names.model_file(groups._get_model_parallel_rank())),
        )
        if os.path.isfile(os.path.join(folder, file_names.stage3_model_file(0, 0))):
            raise CheckpointError(
                f"{folder} was saved at ZeRO stage 3, which keeps weights in shards; stages 0, 1 "
                "and 2 can be loaded. Make its weights whole with zero_to_fp32 and load those into "
                "the model"
            )
        lead = os.path.join(folder, file_names.model_file(0))
        if os.path.isfile(path) and not os.path.isfile(lead):
            lead = path  # with node-local storage the first part may be on another node
        first: dict[str, Any] = read_file(lead, mmap=True)
        self._check_manifest_is_there(folder, first)
        model: dict[str, Any] = read_file(path) if ParallelDegrees.of_file(first) == own else first
        return model

    def _check_manifest_is_there(self, folder: str, model: dict[str, Any]) -> None:
        is_checked = self._config.tree.checkpoint.verify != OFF  # type: ignore[attr-defined]  # from DeepSpeedEngine
        if (
            is_checked
            and keys.MANIFEST_VERSION in model
            and not os.path.isfile(os.path.join(folder, MANIFEST))
        ):
            raise CheckpointError(
                f"{os.path.join(folder, MANIFEST)} is missing, so the folder cannot be checked. "
                "Restore it, load another tag "
                f"({', '.join(existing_tags(os.path.dirname(folder)))}), or load without checks by "
                "checkpoint.verify 'off'"
            )

    def _read_host(self, folder: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        path = os.path.join(folder, file_names.host_file(dist.get_rank()))
        own = read_file(path) if os.path.isfile(path) else None
        first = os.path.join(folder, file_names.host_file(0))
        position = read_file(first) if os.path.isfile(first) else None
        equal = own is not None and own.get("cut", self._host_degrees()) == self._host_degrees()
        return (own, None) if equal else (None, position)

    def _restore_training(
        self, loaded: LoadedFiles, load_optimizer_states: bool, load_lr_scheduler_states: bool
    ) -> None:
        if loaded.optimizer is not None:
            from_fp32 = self.zero_load_from_fp32_weights()  # type: ignore[attr-defined]  # from EngineSettings
            files = self._optimizer_files(ModelFiles(self.module))
            files.load(loaded.optimizer, load_optimizer_states, from_fp32)
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
        """Set the rates that the schedule is at; without the optimizer's groups they would be its
        first until the next step.
        """
        schedule = self.lr_scheduler
        # Our schedules read their last rate from the groups; torch's keep it.
        rates = (
            schedule.get_lr()
            if type(schedule).__name__ in VALID_LR_SCHEDULES
            else schedule.get_last_lr()
        )
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = rate

    def _restore_host(self, loaded: LoadedFiles) -> None:
        steps = self.gradient_accumulation_steps()  # type: ignore[attr-defined]  # from EngineSettings
        done = self.global_steps * steps if loaded.host is None else loaded.host["micro_steps"]
        self.tracker.micro_steps = done  # type: ignore[attr-defined]  # from DeepSpeedEngine
        if loaded.host is not None:
            restore_host_state(loaded.host, self.training_dataloader)
        elif loaded.position is not None:
            restore_position(loaded.position, self.training_dataloader)
        counts = (loaded.host or loaded.position or {}).get("num_forwards")
        if counts and isinstance(self.module, LayeredModule):
            same = len(counts) == len(self.module.num_forwards)
            self.module.num_forwards[:] = (
                counts if same else [counts[0]] * len(self.module.num_forwards)
            )


def _check_share(folder: str, node: StorageNode, level: str) -> Mapping[int, Mapping[str, Any]]:
    """Check what is this rank's share of a folder.

    Returns:
        What the ranks that wrote the folder describe, for the first of those that share it; nothing
        for others.

    Raises:
        CheckpointError: Something is wrong with it.
    """
    load_dir, tag = os.path.split(folder)
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"tag {tag!r} is not in {load_dir}; there are: "
            f"{', '.join(existing_tags(load_dir)) or 'none'}"
        )
    manifest = read_manifest(folder) if level != OFF else None
    if manifest is None:
        return {}
    share = node.share(node.ranks)
    raise_problems(folder, check_folder(folder, manifest, share, level == FULL))
    return manifest.parts if share[0] == 0 else {}
