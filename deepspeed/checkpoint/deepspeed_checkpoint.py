"""`DeepSpeedCheckpoint`: upstream's view of a checkpoint folder, by pipeline stage, tensor-parallel
and data-parallel rank.

For scripts that look files up. Upstream's methods that know the layers of one model (embedding,
transformer and final norm of Megatron's) are not here. Parameters by name are `resharding`'s, a
universal checkpoint `ds_to_universal`'s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.files import CheckpointError, lead_model_file, read_file
from deepspeed.checkpoint.parallel_degrees import ParallelDegrees


class DeepSpeedCheckpoint:
    """The files of a checkpoint.

    Args:
        dir: Folder of one tag.
        tp_degree: Tensor-parallel ranks wanted; None is as saved. Also
        pp_degree: Pipeline stages, and
        dp_degree: Data-parallel ranks.

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
    ) -> None:
        self.dir = dir
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
        paths = [
            os.path.join(self.dir, file_names.optimizer_file(dp_index, part, bf16))
            for bf16 in (False, True)
        ]
        return [path for path in paths if os.path.isfile(path)]

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int
    ) -> dict[str, Any]:
        """Content of that file.

        Raises:
            CheckpointError: There is none.
        """
        files = self.get_zero_files(pp_index, tp_index, dp_index)
        if not files:
            raise CheckpointError(
                f"{self.dir} has no optimizer file of stage {pp_index}, ranks {tp_index} and "
                f"{dp_index}"
            )
        content: dict[str, Any] = read_file(files[0])
        return content

    def validate_files(self) -> None:
        """Raise unless every model file is there.

        Raises:
            CheckpointError: Naming those that are not.
        """
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
