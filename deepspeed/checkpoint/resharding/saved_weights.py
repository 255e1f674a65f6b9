"""Weights of a checkpoint by parameter name: in model files, in those of layers and in those of
experts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.files import read_file
from deepspeed.checkpoint.parallel_degrees import ParallelDegrees


class SavedWeights:
    """Weights in the files of the stages of one tensor-parallel rank, by name; experts are numbered
    over all ranks.

    Args:
        folder: The tag's folder.
        rank: The tensor-parallel rank.
        degrees: Of the run that saved it.

    Attributes:
        values: Name -> weight; files are mapped.
        buffers: Which of them are buffers.
        models: Contents of the model files.
    """

    def __init__(self, folder: str, rank: int, degrees: ParallelDegrees) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.buffers: set[str] = set()
        self.models: list[Mapping[str, Any]] = []
        for part in degrees.ranks_of_slice(rank):
            model = read_file(os.path.join(folder, file_names.model_file(part)), mmap=True)
            self.models.append(model)
            self.buffers.update(model.get(keys.BUFFER_NAMES) or ())
            self._add(model.get(keys.MODULE) or {})
        for name in sorted(os.listdir(folder)):
            layer = file_names.parse_layer_file(name)
            expert = file_names.parse_expert_file(name)
            if layer is not None and layer.tensor_parallel_rank == rank:
                self._add(read_file(os.path.join(folder, name), mmap=True), f"{layer.layer}.")
            elif expert is not None and expert.model_parallel_rank % degrees.tensor == rank:
                self._add(read_file(os.path.join(folder, name), mmap=True))

    def _add(self, state: Mapping[str, Any], prefix: str = "") -> None:
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                self.values.setdefault(prefix + name, value)
