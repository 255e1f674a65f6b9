"""`DeepSpeedCheckpoint`: upstream's view of a checkpoint folder, by pipeline stage, tensor-parallel
and data-parallel rank, for scripts that look files up. Of a pipeline's layers the first with
weights counts as embedding, one from the end as final norm, the others as transformer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.files import CheckpointError, lead_model_file, read_file
from deepspeed.checkpoint.resharding.cuts import ParallelDegrees


class DeepSpeedCheckpoint:
    """The files of a checkpoint.

    Args:
        dir: Folder of one tag.
        tp_degree: Tensor-parallel ranks wanted; None is as saved. Also
        pp_degree: Pipeline stages, and
        dp_degree: Data-parallel ranks.
        final_layer_norm_idx: Which of a pipeline's layers the final norm is.

    Attributes:
        tp_degree, pp_degree, dp_degree: As wanted.
        original_tp_degree, original_pp_degree, original_dp_degree: As saved.
        original_world_size: Ranks of the run that saved it.

    Raises:
        CheckpointError: The first model file is missing or damaged.
    """

    def __init__(
        self,
        dir: str,
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = -1,
    ) -> None:
        self.dir = dir
        self.final_layer_norm_idx = final_layer_norm_idx
        self._model: Mapping[str, Any] = read_file(lead_model_file(dir), mmap=True)
        degrees = ParallelDegrees.of_file(self._model)
        self.original_tp_degree, self.original_pp_degree = degrees.tensor, degrees.stages
        self.original_dp_degree = int(self._model.get(keys.DP_WORLD_SIZE, 1))
        self.original_world_size = (
            self.original_tp_degree * self.original_pp_degree * self.original_dp_degree
        )
        self.tp_degree = self.original_tp_degree if tp_degree is None else tp_degree
        self.pp_degree = self.original_pp_degree if pp_degree is None else pp_degree
        self.dp_degree = self.original_dp_degree if dp_degree is None else dp_degree

    def is_change_tp_degree(self) -> bool:
        """Whether another number of tensor-parallel ranks is wanted than was saved."""
        return self.tp_degree != self.original_tp_degree

    def is_change_pp_degree(self) -> bool:
        """The same of pipeline stages."""
        return self.pp_degree != self.original_pp_degree

    def is_change_dp_degree(self) -> bool:
        """The same of data-parallel ranks."""
        return self.dp_degree != self.original_dp_degree

    def get_iteration(self) -> int:
        """What the client saved as `iteration`; 0 if nothing."""
        return int(self._model.get("iteration", 0))

    def get_args(self) -> Any:
        """What the client saved as `args`; None if nothing."""
        return self._model.get("args")

    def get_checkpoint_info(self, info_key: str = "checkpoint_info") -> Any:
        """What the client saved as `info_key`; None if nothing."""
        return self._model.get(info_key)

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """Paths of the model files of a stage and tensor-parallel rank, as saved."""
        return [os.path.join(self.dir, file_names.model_file(self._part(tp_index, pp_index)))]

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> dict[str, Any]:
        """Content of that file."""
        content: dict[str, Any] = read_file(self.get_2d_parallel_files(tp_index, pp_index)[0])
        return content

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Paths of the optimizer files of a rank, as saved; empty if its state is not sharded."""
        part = self._part(tp_index, pp_index)
        names = [file_names.optimizer_file(dp_index, part, bf16) for bf16 in (False, True)]
        paths = [os.path.join(self.dir, name) for name in names]
        return [path for path in paths if os.path.isfile(path)]

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int, strip_tensor_paddings: bool = True
    ) -> dict[str, Any]:
        """Content of that file; files have no padding that `strip_tensor_paddings` would change."""
        files = self.get_zero_files(pp_index, tp_index, dp_index)
        if not files:
            raise CheckpointError(
                f"{self.dir} has no optimizer file of stage {pp_index}, ranks {tp_index} and "
                f"{dp_index}"
            )
        content: dict[str, Any] = read_file(files[0])
        return content

    # A pipeline's layers

    def _layers(self) -> list[int]:
        """Numbers of the layers that have files."""
        parsed = (file_names.parse_layer_file(name) for name in os.listdir(self.dir))
        layers = sorted({found.layer for found in parsed if found is not None})
        if not layers:
            raise CheckpointError(f"{self.dir} has no files of layers: no pipeline saved it")
        return layers

    def _layer_files(self, layer: int, tp_index: int) -> list[str]:
        self._part(tp_index, 0)
        return [
            os.path.join(self.dir, name)
            for name in sorted(os.listdir(self.dir))
            if (found := file_names.parse_layer_file(name)) is not None
            and (found.layer, found.tensor_parallel_rank) == (layer, tp_index)
        ]

    def _layer_state(self, layer: int, tp_index: int) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for path in self._layer_files(layer, tp_index):
            state |= read_file(path)
        return state

    def get_embedding_layer_id(self) -> str:
        """Beginning of the names of the embedding's files."""
        return file_names.layer_id(self._layers()[0])

    def get_final_norm_layer_id(self) -> str:
        """The same of the final norm."""
        return file_names.layer_id(self._layers()[self.final_layer_norm_idx])

    def get_embedding_files(self, tp_index: int) -> list[str]:
        """Paths of a tensor-parallel rank's part of the embedding."""
        return self._layer_files(self._layers()[0], tp_index)

    def get_embedding_state(self, tp_index: int) -> dict[str, Any]:
        """Their content."""
        return self._layer_state(self._layers()[0], tp_index)

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        """Paths of a tensor-parallel rank's part of the final norm."""
        return self._layer_files(self._layers()[self.final_layer_norm_idx], tp_index)

    def get_final_norm_state(self, tp_index: int) -> dict[str, Any]:
        """Their content."""
        return self._layer_state(self._layers()[self.final_layer_norm_idx], tp_index)

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """Beginnings of the names of a stage's transformer layers, which are dealt evenly."""
        layers = self._layers()[1 : self.final_layer_norm_idx]
        if not 0 <= pp_index < self.pp_degree:
            raise ValueError(f"pp_index: {pp_index} is not in 0 to {self.pp_degree - 1}")
        size, rest = divmod(len(layers), self.pp_degree)
        start = pp_index * size + min(pp_index, rest)
        chosen = layers[start : start + size + (pp_index < rest)]
        return [file_names.layer_id(layer) for layer in chosen]

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[dict[str, Any]]:
        """Content of a tensor-parallel rank's part of each of them."""
        wanted = self.get_pp_transformer_map(pp_index)
        return [
            self._layer_state(layer, tp_index)
            for layer in self._layers()
            if file_names.layer_id(layer) in wanted
        ]

    def validate_files(self) -> None:
        """Raise unless every model file is there."""
        parts = range(self.original_tp_degree * self.original_pp_degree)
        paths = [lead_model_file(self.dir, part) for part in parts]
        missing = [path for path in paths if not os.path.isfile(path)]
        if missing:
            raise CheckpointError(f"missing: {', '.join(missing)}")

    def _part(self, tp_index: int, pp_index: int) -> int:
        for name, index, count in (
            ("tp", tp_index, self.original_tp_degree),
            ("pp", pp_index, self.original_pp_degree),
        ):
            if not 0 <= index < count:
                raise ValueError(f"{name}_index: {index} is not in 0 to {count - 1}")
        return pp_index * self.original_tp_degree + tp_index
