"""A universal checkpoint as consolidated parameters: each whole, with a file per kind of state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.files import CheckpointError, lead_model_file, read_file
from deepspeed.checkpoint.resharding.cuts import ParallelDegrees
from deepspeed.checkpoint.resharding.saved_optimizer import LABELS, parameter_shapes, scaler_state
from deepspeed.checkpoint.resharding.saved_weights import SavedWeights


class UniversalCheckpoint:
    """`ConsolidatedParameters` of a universal checkpoint."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._zero = os.path.join(folder, keys.UNIVERSAL_FOLDER)
        if not os.path.isdir(self._zero):
            raise CheckpointError(
                f"{folder} is no universal checkpoint, it has no folder {keys.UNIVERSAL_FOLDER!r}: "
                f"make one by ds_to_universal --input_folder {folder} --output_folder "
                f"{folder}_universal"
            )
        common = read_file(os.path.join(self._zero, keys.UNIVERSAL_OPTIMIZER_FILE))
        self.options: Mapping[int, Mapping[str, Any]] = {
            index: {key: value for key, value in group.items() if key not in LABELS}
            for index, group in enumerate(common.get(keys.PARAM_GROUPS) or ())
        }
        self.scaler: Mapping[str, Any] = scaler_state(common)
        self._groups = {
            name: index
            for index, members in enumerate(common.get(keys.PARAM_NAMES) or ())
            for name in members
        }
        if not self._groups:
            self._note_groups_of_upstream()
        self._first = read_file(lead_model_file(folder), mmap=True)
        self._degrees = ParallelDegrees.of_file(self._first)
        self.tensor_size = self._degrees.tensor
        self._weights: SavedWeights | None = None

    def _note_groups_of_upstream(self) -> None:
        """Upstream's files say in the model files which parameters are in which group."""
        for name in sorted(os.listdir(self.folder)):
            if file_names.is_model_file(name):
                model = read_file(os.path.join(self.folder, name), mmap=True)
                for index, group in enumerate(parameter_shapes(model)):
                    self._groups.update((param, index) for param in group)

    def names(self) -> list[str]:
        return sorted(
            name for name in os.listdir(self._zero) if os.path.isdir(os.path.join(self._zero, name))
        )

    def slots(self, name: str) -> list[str]:
        return [slot for slot, content in self._contents(name) if isinstance(content, Mapping)]

    def shared(self, name: str) -> Mapping[str, Any]:
        return {slot: one for slot, one in self._contents(name) if not isinstance(one, Mapping)}

    def entry(self, name: str, slot: str) -> Mapping[str, Any]:
        content: Mapping[str, Any] = read_file(
            os.path.join(self._zero, name, file_names.state_file(slot)), mmap=True
        )
        return content

    def group(self, name: str) -> int | None:
        return self._groups.get(name)

    def weight(self, name: str) -> Any:
        if self._weights is None:
            self._weights = SavedWeights(self.folder, 0, self._degrees)
        return self._weights.get(name)

    def _contents(self, name: str) -> Iterator[tuple[str, Any]]:
        return parameter_state(os.path.join(self._zero, name))


def parameter_state(folder: str) -> Iterator[tuple[str, Any]]:
    """(kind of state, content of its file) of the files in a parameter's folder."""
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"{folder} does not exist: the universal checkpoint has no such parameter"
        )
    for slot in sorted(filter(None, map(file_names.parse_state_file, os.listdir(folder)))):
        yield slot, read_file(os.path.join(folder, file_names.state_file(slot)), mmap=True)
