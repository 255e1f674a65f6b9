"""Every parameter of a checkpoint as a whole, whatever ranks, stages and tensor-parallel slices it
was saved by; elements are read when one parameter is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.files import CheckpointError, lead_model_file, read_file
from deepspeed.checkpoint.resharding.cuts import ParallelDegrees
from deepspeed.checkpoint.resharding.saved_weights import SavedRank
from deepspeed.checkpoint.resharding.tensor_parallel import SlicePatterns


class ConsolidatedParameters(Protocol):
    """Whole parameters by name."""

    folder: str
    tensor_size: int
    options: Mapping[int, Mapping[str, Any]]
    scaler: Mapping[str, Any]

    def names(self) -> list[str]: ...

    def slots(self, name: str) -> list[str]:
        """Kinds of per-element state: `fp32`, and the optimizer's if it is trained."""

    def entry(self, name: str, slot: str) -> Mapping[str, Any]:
        """The whole tensor and how it is sliced, as in a file of a universal checkpoint."""

    def shared(self, name: str) -> Mapping[str, Any]: ...

    def group(self, name: str) -> int | None:
        """Number of its parameter group; None if it is in none, or that is not known."""

    def weight(self, name: str) -> Any:
        """What files of weights have by that name, of the first tensor-parallel rank, or None."""


class ConsolidatedCheckpoint:
    """`ConsolidatedParameters` of an ordinary checkpoint.

    Args:
        folder: The tag's folder.
        info: How parameters are sliced; None for what the checkpoint says.
        tensor_rank: Whose slices alone are read, and given as if they were whole; None: all.
    """

    def __init__(
        self, folder: str, info: Mapping[str, Any] | None = None, tensor_rank: int | None = None
    ) -> None:
        self.folder = folder
        self.model: Mapping[str, Any] = read_file(lead_model_file(folder), mmap=True)
        self.options: Mapping[int, Mapping[str, Any]] = {}
        self.scaler: Mapping[str, Any] = {}
        info = self.model.get(keys.UNIVERSAL_CHECKPOINT_INFO) if info is None else info
        slices = ParallelDegrees.of_file(self.model).tensor
        read = range(slices) if tensor_rank is None else [tensor_rank]
        self.tensor_size = len(read)
        if info is None and len(read) > 1:
            raise CheckpointError(
                f"{folder} was saved by {slices} tensor-parallel ranks, and "
                f"{keys.UNIVERSAL_CHECKPOINT_INFO} is not in it: only the client knows how the "
                "parameters are sliced. Give it to save_checkpoint(client_state={...})"
            )
        self.patterns = SlicePatterns((info or {}) if tensor_rank is None else {})
        self._ranks = [SavedRank(folder, rank) for rank in read]
        for rank in self._ranks:
            self.options = {**rank.saved.options, **self.options}
            self.scaler = self.scaler or rank.saved.scaler
        self._check_names_agree()

    def _check_names_agree(self) -> None:
        first = self._ranks[0]
        for number, rank in enumerate(self._ranks):
            differing = sorted(first.fragments.keys() ^ rank.fragments.keys())
            if differing:
                raise CheckpointError(
                    f"{self.folder}: tensor-parallel ranks 0 and {number} do not both have "
                    f"{differing[0]}"
                )

    def names(self) -> list[str]:
        return [*self._ranks[0].fragments, *self._ranks[0].frozen]

    def slots(self, name: str) -> list[str]:
        return self._ranks[0].slots(name)

    def shared(self, name: str) -> Mapping[str, Any]:
        fragments = [fragment for rank in self._ranks for fragment in rank.fragments.get(name, ())]
        for fragment in fragments:
            for key, value in fragment.shared.items():
                if not bool(torch.as_tensor(value == fragments[0].shared[key]).all()):
                    raise CheckpointError(
                        f"{self.folder}: fragments of {name} have state {key!r} {value} and "
                        f"{fragments[0].shared[key]}"
                    )
        alone = {key: value for rank in self._ranks for key, value in rank.alone(name).items()}
        return {**fragments[0].shared, **alone} if fragments else {}

    def group(self, name: str) -> int | None:
        return self._ranks[0].groups.get(name)

    def weight(self, name: str) -> Any:
        return self._ranks[0].weights.get(name)

    def weights_of_ranks(self) -> Iterator[tuple[int, Mapping[str, Any], dict[str, Any]]]:
        """Number, first model file and `SavedWeights` of each tensor-parallel rank."""
        for number, rank in enumerate(self._ranks):
            weights = rank.weights
            yield number, weights.models[0], {**weights.values, **weights.extra}

    def optimizer_content(self) -> Mapping[str, Any]:
        of_shards = [file_names.optimizer_file(0, 0, bf16) for bf16 in (False, True)]
        for path in (os.path.join(self.folder, name) for name in of_shards):
            if os.path.isfile(path):
                content: Mapping[str, Any] = read_file(path, mmap=True)[keys.OPTIMIZER_STATE_DICT]
                return content
        of_experts = os.path.join(self.folder, file_names.expert_optimizer_file(0, 0))
        whole = read_file(of_experts, mmap=True) if os.path.isfile(of_experts) else self.model
        return whole.get(keys.OPTIMIZER) or {}

    def slices(self, name: str, slot: str) -> list[torch.Tensor]:
        """What each tensor-parallel rank has of a parameter, in the parameter's shape."""
        return [rank.tensor(name, slot) for rank in self._ranks]

    def entry(self, name: str, slot: str) -> Mapping[str, Any]:
        return self.patterns.merged(name, self.slices(name, slot))
