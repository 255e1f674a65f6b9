"""The optimizer's state in a checkpoint folder: which file holds it, and how a run that is divided
otherwise gets its own (`optimizer_resharding`). Nothing here communicates.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.experts import renumbered
from deepspeed.checkpoint.files import CheckpointError, read_file
from deepspeed.checkpoint.resharding.cuts import ParallelDegrees
from deepspeed.checkpoint.resharding.rank_slices import RankSlices
from deepspeed.checkpoint.resharding.saved_optimizer import SavedOptimizer, parameter_shapes
from deepspeed.git_version_info import version as __version__
from deepspeed.runtime.checkpointing.folders import StorageNode
from deepspeed.runtime.checkpointing.model_files import ModelFiles
from deepspeed.runtime.checkpointing.optimizer_resharding import (
    ReshardedState,
    reshard_optimizer_state,
)
from deepspeed.runtime.checkpointing.training_state import TrainingState, state_layout
from deepspeed.runtime.optimizers.state_layout import OwnShard
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.sharding.loading_in_place import check_apart
from deepspeed.utils.tensor_fragment import logical_shape

NAMELESS = "a parameter that is not the module's"


class OptimizerFiles:
    """Writes and reads the state of one engine's optimizer: in a file per data-parallel rank if it
    is sharded, whole in the model file, or with experts in a file per expert rank.

    [Note: collected first]
    Shards may be cut otherwise in memory than in files, so the state of one file comes from several
    ranks. All take part before any writes: one that fails to write would leave the others waiting.
    """

    def __init__(self, state: TrainingState, model: ModelFiles) -> None:
        tree = state._config.tree
        self.sequence = state._sequence
        self.layout = state_layout(state)
        self.experts = model.experts
        self.names = {param: name for name, param in model.module.named_parameters()}
        self._bf16 = tree.bf16.enabled
        self._data_before_experts = tree.use_data_before_expert_parallelism
        self._config = state.config
        self._map = state.parallel_map
        self._part = self._map.model.rank
        self._collected: dict[str, Any] | None = None

    @property
    def trained(self) -> set[nn.Parameter]:
        if self.sequence is None:
            return set()
        groups = self.sequence.numbered_params()
        return {param for params in groups for param in params} - set(self.sequence.context.frozen)

    # Writing

    def collect(self) -> None:
        """Make this rank's shard as its file has it, on all ranks; [Note: collected first]."""
        if self.layout.shard is not None and self.sequence is not None:
            self._collected = self.sequence.state_dict()

    @property
    def file(self) -> str | None:
        """Name of the file of its own that this rank's state is in; None: the model file."""
        if self.layout.shard is not None:
            return self._shard_file(self.layout.shard, self._bf16)
        return self._expert_file() if self.experts.are_spread else None

    @property
    def model_file(self) -> str:
        if self.layout.has_weights and self.layout.shard is not None:
            return file_names.stage3_model_file(self.layout.shard.rank, self._part)
        return file_names.model_file(self._part)

    def in_model_file(self) -> dict[str, Any] | None:
        return None if self.experts.are_spread else self._whole_state()

    def own_files(self, node: StorageNode) -> dict[str, Any]:
        """Name -> content of the files of their own that this rank writes."""
        shard = self.layout.shard
        if shard is None or self.sequence is None:
            return self._expert_files(node)
        if not self.writes(shard, node):
            return {}
        assert self._collected is not None, "own_files() before collect()"
        content = {
            keys.OPTIMIZER_STATE_DICT: self._collected,
            keys.DS_CONFIG: self._config,
            keys.DS_VERSION: __version__,
        }
        return {self._shard_file(shard, self._bf16): content}

    @staticmethod
    def writes(shard: OwnShard, node: StorageNode) -> bool:
        """Whether this rank writes its shard: of copies one does, as offline tools expect."""
        holders = shard.holders
        return holders is None or node.is_first(dist.get_all_ranks_from_group(holders))

    def _shard_file(self, shard: OwnShard, bf16: bool) -> str:
        return file_names.optimizer_file(shard.rank, self._part, bf16)

    def _expert_files(self, node: StorageNode) -> dict[str, Any]:
        if not self.experts.are_spread or self.sequence is None:
            return {}
        axes = self._map.experts(self.experts.largest_group)
        if axes.data.first_rank not in self._map.replicas.ranks:
            raise CheckpointError(
                f"stage 0 with experts (groups {self.experts.largest_group!r}) shared with ranks "
                "of other slices: the state of the slices here would be in no file; use "
                "zero_optimization.stage 1 or 2"
            )
        if not node.is_first(axes.data.ranks):
            return {}
        return {self._expert_file(): {keys.OPTIMIZER: self._whole_state()}}

    def _expert_file(self) -> str:
        axes = self._map.experts(self.experts.largest_group)
        return file_names.expert_optimizer_file(axes.expert.rank, self._part)

    def _whole_state(self) -> dict[str, Any] | None:
        """State of an optimizer that is not sharded; None if it is, or if there is none."""
        if self.layout.shard is not None or self.sequence is None:
            return None
        return {**self.sequence.state_dict(), **self._numbering()}

    def param_shapes(self) -> list[OrderedDict[str, torch.Size]]:
        """Name and shape of the parameters of each group, in the order of the state."""
        numbered = [] if self.sequence is None else self.sequence.numbered_params()
        return [
            OrderedDict(
                (self.names.get(param, f"unnamed.{group}.{index}"), logical_shape(param))
                for index, param in enumerate(params)
            )
            for group, params in enumerate(numbered)
        ]

    def _numbering(self) -> dict[str, Any]:
        """What the numbers of parameters in whole state mean, for runs that number otherwise."""
        numbering: dict[str, Any] = {keys.PARAM_SHAPES: self.param_shapes()}
        if self.experts.are_spread:
            numbering[keys.EXPERT_GROUP_SIZES] = self.experts.group_sizes
            numbering[keys.DATA_BEFORE_EXPERTS] = self._data_before_experts
        return numbering

    # Reading

    def read(
        self, folder: str, model: Mapping[str, Any], slices: RankSlices | None = None
    ) -> ReshardedState | None:
        """State as this rank would have saved it; None if checkpoint or run has no optimizer."""
        if self.sequence is None:
            return None
        state = self._read_own_state(self.sequence, folder, model) if slices is None else None
        if state is not None:
            return ReshardedState(state, has_masters=True)
        saved = slices or SavedOptimizer(folder, self._map.tensor.rank)
        if not saved.has_state:
            return None
        names = {param: renumbered(name, self.experts.first) for param, name in self.names.items()}
        return reshard_optimizer_state(
            self.sequence, saved, lambda param: names.get(param, NAMELESS)
        )

    def _read_own_state(
        self, sequence: StepSequence, folder: str, model: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """What this rank, or one in its place, wrote; None if that run was divided otherwise."""
        if ParallelDegrees.of_file(model) != ParallelDegrees.of_this_run(self._map):
            return None
        state = self._read_whole_state(folder, model)
        if self.layout.shard is not None:
            state = self._read_shard(self.layout.shard, folder, model) if state is None else None
        elif state is not None:
            own = self._numbering()
            state = state if all(state.get(key, own[key]) == own[key] for key in own) else None
        return state if state is not None and sequence.fits(state) else None

    def _read_shard(
        self, shard: OwnShard, folder: str, model: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        if model.get(keys.DP_WORLD_SIZE, shard.count) != shard.count:
            return None
        if self.layout.has_weights and not self._has_own_names(model):
            return None
        data_before_experts = bool(
            (model.get(keys.DS_CONFIG) or {}).get(keys.DATA_BEFORE_EXPERTS, False)
        )
        if self.experts.are_spread and data_before_experts != self._data_before_experts:
            return None
        path, in_other_dtype, of_experts = (
            os.path.join(folder, name)
            for name in (
                self._shard_file(shard, self._bf16),
                self._shard_file(shard, not self._bf16),
                file_names.expert_optimizer_file(0, self._part),
            )
        )
        is_otherwise = os.path.isfile(in_other_dtype) or os.path.isfile(of_experts)
        if not os.path.isfile(path) and is_otherwise:
            return None
        state: dict[str, Any] = read_file(path)[keys.OPTIMIZER_STATE_DICT]
        return state

    def _has_own_names(self, model: Mapping[str, Any]) -> bool:
        """Whether the parameters are this run's, in order, which shards of stage 3 do not say."""
        saved, own = (
            [pair for group in groups for pair in group.items()]
            for groups in (parameter_shapes(model), self.param_shapes())
        )
        return saved == own

    def _read_whole_state(self, folder: str, model: Mapping[str, Any]) -> dict[str, Any] | None:
        if not self.experts.are_spread:
            return model.get(keys.OPTIMIZER)
        path = os.path.join(folder, self._expert_file())
        return read_file(path)[keys.OPTIMIZER] if os.path.isfile(path) else None

    def load(
        self, loaded: ReshardedState, load_optimizer_states: bool, load_from_fp32_weights: bool
    ) -> None:
        """Give the optimizer what `read` returned."""
        if self.sequence is None:
            return
        # Clients' optimizers may not expect what stands beside their own state.
        numbering = self._numbering()
        self.sequence.load_state_dict(
            {key: value for key, value in loaded.state.items() if key not in numbering},
            load_optimizer_states=load_optimizer_states,
            load_from_fp32_weights=load_from_fp32_weights and loaded.has_masters,
        )
        check_apart(self.sequence)
