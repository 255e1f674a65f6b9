"""Upstream's view of the optimizer's files of a checkpoint: which of them a rank has, by its place
among pipeline stages, tensor-parallel and data-parallel ranks.

Parameters by name are `resharding`'s; for other numbers of ranks there is `ds_to_universal`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any

from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.deepspeed_checkpoint import DeepSpeedCheckpoint
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.utils.logging import logger


class meg_2d_parallel_map:  # noqa: N801  # upstream's name
    """Numbers of old ranks by their new pipeline stage and tensor-parallel rank."""

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree, self.tp_degree = pp_degree, tp_degree
        self._ranks: dict[tuple[int, int], list[int]] = {}

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[int]:
        """Return those of one place; None: of all places."""
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        ranks = range(self.tp_degree) if tp_index is None else [tp_index]
        places = [(stage, rank) for stage in stages for rank in ranks]
        for place in places:
            if place not in self._ranks:
                raise ValueError(
                    f"stage and rank {place} are not among {self.pp_degree} stages of "
                    f"{self.tp_degree} ranks"
                )
        return [number for place in places for number in self._ranks[place]]


class model_3d_desc:  # noqa: N801  # upstream's name
    """Numbers of ranks of each kind."""

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1) -> None:
        self.pp_degree, self.tp_degree, self.dp_degree = pp_degree, tp_degree, dp_degree

    def _changes(self, target: model_3d_desc) -> list[tuple[str, int, int]]:
        return [
            ("PP", self.pp_degree, target.pp_degree),
            ("TP", self.tp_degree, target.tp_degree),
            ("DP", self.dp_degree, target.dp_degree),
        ]

    def get_desc(self) -> str:
        """Return it as text."""
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

    def reshape(
        self, target_3d_desc: model_3d_desc, verbose: bool = False
    ) -> list[meg_2d_parallel_map]:
        """Deal the ranks to as many or fewer: neighbours go to one."""
        errors = self.can_reshape(target_3d_desc)[1] or [
            f"{name}: {own} ---> {wanted} is uneven"
            for name, own, wanted in self._changes(target_3d_desc)
            if own % wanted
        ]
        if errors:
            raise ValueError("; ".join(errors))
        new = target_3d_desc
        stages, ranks = self.pp_degree // new.pp_degree, self.tp_degree // new.tp_degree
        found = [meg_2d_parallel_map(new.pp_degree, new.tp_degree) for _ in range(new.dp_degree)]
        for stage, rank in product(range(new.pp_degree), range(new.tp_degree)):
            numbers = [
                (data * self.pp_degree + stage * stages + p) * self.tp_degree + rank * ranks + t
                for p in range(stages)
                for t in range(ranks)
                for data in range(self.dp_degree)
            ]
            share = len(numbers) // new.dp_degree
            for data, dealt in enumerate(found):
                dealt._ranks[stage, rank] = numbers[data * share : (data + 1) * share]
        if verbose:
            for data, dealt in enumerate(found):
                logger.info(f"data-parallel rank {data}: {dealt._ranks}")
        return found


def get_model_3d_descriptor(dir: str) -> model_3d_desc:
    """The ranks of the run that saved a checkpoint's folder."""
    found = DeepSpeedCheckpoint(dir)
    found.validate_files()
    # Ranks that have an optimizer's file; without ZeRO none has.
    names = os.listdir(dir)
    shards = [file for name in names if (file := file_names.parse_optimizer_file(name)) is not None]
    pp, tp = found.original_pp_degree, found.original_tp_degree
    desc = model_3d_desc(pp, tp, found.original_dp_degree)
    if shards:
        desc.dp_degree = max(shard.rank for shard in shards) + 1
        expected = set(product(range(desc.dp_degree), range(pp * tp)))
        there = {(shard.rank, shard.model_parallel_rank) for shard in shards}
        if there != expected:
            raise CheckpointError(
                f"{dir}: by the model file there were {desc.get_desc()}, but the optimizer's files "
                f"of data-parallel and model-parallel ranks {sorted(there ^ expected)} are missing "
                "or another run's; copy the folder again, and `ds_checkpoint verify` it"
            )
    return desc


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
        """Paths of a rank's files; empty if its state is not sharded."""
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
        """Content of a rank's file, without `keys_to_ignore`."""
        state = self._checkpoint.get_zero_checkpoint_state(
            pp_index, tp_index, dp_index, strip_tensor_paddings
        )
        return {key: value for key, value in state.items() if key not in keys_to_ignore}
