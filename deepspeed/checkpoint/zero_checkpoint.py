"""Upstream's view of the optimizer's files of a checkpoint: which of them a rank has, by its place
among pipeline stages, tensor-parallel and data-parallel ranks.

Parameters by name are `resharding`'s; files for other numbers of ranks the command
`ds_to_universal` makes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.deepspeed_checkpoint import DeepSpeedCheckpoint


class model_3d_desc:  # noqa: N801  # upstream's name
    """Numbers of ranks of each kind.

    Args:
        pp_degree: Pipeline stages.
        tp_degree: Tensor-parallel ranks.
        dp_degree: Data-parallel ranks.
    """

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1) -> None:
        self.pp_degree, self.tp_degree, self.dp_degree = pp_degree, tp_degree, dp_degree

    def _changes(self, target: model_3d_desc) -> list[tuple[str, int, int]]:
        return [
            ("PP", self.pp_degree, target.pp_degree),
            ("TP", self.tp_degree, target.tp_degree),
            ("DP", self.dp_degree, target.dp_degree),
        ]

    def get_desc(self) -> str:
        """As text."""
        return f"PP,TP,DP = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        """All ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Whether there is such a rank, and why not."""
        errors = [
            f"{name} indexing error: index {index} >= degree {degree}"
            for name, index, degree in (
                ("PP", pp_index, self.pp_degree),
                ("TP", tp_index, self.tp_degree),
                ("DP", dp_index, self.dp_degree),
            )
            if index >= degree
        ]
        return not errors, errors

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Whether files of these ranks can be dealt to as many or fewer, and why not."""
        errors = [
            f"Expansion reshape not supported - {name}: {own} ---> {wanted}"
            for name, own, wanted in self._changes(target_3d_desc)
            if wanted > own
        ]
        return not errors, errors


def get_model_3d_descriptor(dir: str) -> model_3d_desc:
    """The ranks of the run that saved a checkpoint's folder.

    Raises:
        CheckpointError: The first model file is missing or damaged.
    """
    found = DeepSpeedCheckpoint(dir)
    # Ranks that have an optimizer's file; without ZeRO none has.
    shards = {
        parsed.rank
        for name in os.listdir(dir)
        if (parsed := file_names.parse_optimizer_file(name)) is not None
    }
    data = max(shards) + 1 if shards else found.original_dp_degree
    return model_3d_desc(found.original_pp_degree, found.original_tp_degree, data)


class ZeROCheckpoint:
    """The optimizer's files of a folder.

    Args:
        dir: Folder of one tag.
        source_3d: Ranks of the run that saved it; None: the folder says.
    """

    def __init__(self, dir: str, source_3d: model_3d_desc | None = None) -> None:
        self.dir = dir
        self.src_3d = source_3d if source_3d is not None else get_model_3d_descriptor(dir)
        self._checkpoint = DeepSpeedCheckpoint(dir)

    def get_src_world_size(self) -> int:
        """All ranks of the run that saved it."""
        return self.src_3d.world_size()

    def get_src_tp_degree(self) -> int:
        """Its tensor-parallel ranks."""
        return self.src_3d.tp_degree

    def get_src_pp_degree(self) -> int:
        """Its pipeline stages."""
        return self.src_3d.pp_degree

    def get_src_dp_degree(self) -> int:
        """Its data-parallel ranks."""
        return self.src_3d.dp_degree

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Paths of a rank's files; empty if its state is not sharded.

        Raises:
            ValueError: There was no such rank.
        """
        is_there, errors = self.src_3d.is_valid(pp_index, tp_index, dp_index)
        if not is_there:
            raise ValueError(f"{self.dir}: {'; '.join(errors)}")
        return self._checkpoint.get_zero_files(pp_index, tp_index, dp_index)

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Sequence[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> dict[str, Any]:
        """Content of a rank's file, without `keys_to_ignore`.

        Raises:
            CheckpointError: There is no such file.
        """
        state = self._checkpoint.get_zero_checkpoint_state(
            pp_index, tp_index, dp_index, strip_tensor_paddings
        )
        return {key: value for key, value in state.items() if key not in keys_to_ignore}
