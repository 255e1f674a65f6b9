"""How a run that saved a checkpoint divided its model, and what lies where in shards of ZeRO stage
3: every rank has an equal part of each parameter, the last ones end in padding; experts are cut
over the ranks that hold the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.files import CheckpointError

if TYPE_CHECKING:
    from deepspeed.comm.parallel_map import ParallelMap
from bisect import bisect_right
from collections.abc import Sequence

import torch

from deepspeed.checkpoint.experts import PackedExperts, expert_prefix, experts_per_rank, renumbered


def data_ranks(model: Mapping[str, Any], where: str) -> int:
    """Over how many ranks the run that wrote a model file of stage 3 has sharded its parameters."""
    if keys.DP_WORLD_SIZE not in model:
        raise CheckpointError(
            f"{where}: a model file has no {keys.DP_WORLD_SIZE!r}, over how many ranks parameters "
            "are sharded; it was not saved by engine.save_checkpoint, or was written anew since. "
            "Load the checkpoint as it was saved, or a universal one"
        )
    return int(model[keys.DP_WORLD_SIZE])


class ParallelDegrees(NamedTuple):
    """Pipeline stages, tensor-parallel ranks, and all model-parallel ranks."""

    stages: int
    tensor: int
    parts: int

    @classmethod
    def of_this_run(cls, parallel_map: ParallelMap) -> ParallelDegrees:
        tensor, parts = parallel_map.tensor.size, parallel_map.model.size
        return cls(max(1, parts // tensor), tensor, parts)

    @classmethod
    def of_file(cls, model: Mapping[str, Any]) -> ParallelDegrees:
        """Degrees of the run that wrote a model file; if it says none, layers mean a pipeline."""
        parts = int(model.get(keys.MP_WORLD_SIZE, 1))
        degrees = model.get(keys.CHECKPOINT_PARALLEL_DIMS) or {}
        in_layers = keys.MODULE in model and model[keys.MODULE] is None
        tensor = int(degrees.get(keys.CHECKPOINT_TP_DEGREE, 1 if in_layers else parts))
        return cls(int(degrees.get(keys.CHECKPOINT_PP_DEGREE, parts // tensor)), tensor, parts)

    def ranks_of_slice(self, tensor_rank: int) -> range:
        """Model-parallel ranks with the stages of a tensor-parallel rank, first stage first."""
        return range(tensor_rank, self.parts, self.tensor)


def zero3_partitioned_param_info(unpartitioned_numel: int, world_size: int) -> tuple[int, int]:
    """Elements of a parameter per ZeRO-3 rank, and how many of all of them are padding."""
    partitioned = -(-unpartitioned_numel // world_size)
    return partitioned, partitioned * world_size - unpartitioned_numel


class Run(NamedTuple):
    """A parameter's elements from `start`, lying at `at` of a tensor that the optimizer updated.

    `filed_as`: its name in the file, where experts have the numbers that they have on their rank.
    """

    name: str
    start: int
    at: int
    numel: int
    filed_as: str


class GroupCut(NamedTuple):
    """How the parameters of one group are cut over `ranks`, of which the rank is number `place`.

    `firsts`: where the rank's experts begin in a parameter with a row for each of all; `names`: the
    names of parameters in the file.
    """

    shapes: Mapping[str, torch.Size]
    ranks: int
    place: int
    firsts: Mapping[str, int]
    names: Sequence[str]


def cuts_of(
    groups: Sequence[Mapping[str, torch.Size]],
    counts: int | Sequence[int],
    rank: int,
    ranks: int,
    data_first: bool,
    packed: PackedExperts,
) -> list[GroupCut] | None:
    """How each group is cut; None if that does not fit the number of files."""
    if isinstance(counts, int):
        if counts != ranks:
            return None
        return [GroupCut(own, counts, rank, {}, list(own)) for own in groups]
    if len(counts) != len(groups) or any(ranks % count for count in counts):
        return None
    per_rank = experts_per_rank(name for shapes in groups for name in shapes)
    cuts = []
    for shapes, count in zip(groups, counts, strict=True):
        share, place = share_and_place(rank, ranks, ranks // count, data_first)
        offsets = {prefix: held * share for prefix, held in per_rank.items()}
        named = {renumbered(name, offsets): shape for name, shape in shapes.items()}
        firsts = {
            name: packed.first_element(name, shape, rank, ranks, data_first)
            for name, shape in shapes.items()
        }
        cuts.append(GroupCut(named, count, place, firsts, list(shapes)))
    return cuts


def share_and_place(rank: int, ranks: int, shares: int, data_first: bool) -> tuple[int, int]:
    """Which share of a layer's experts a rank holds, and which of the ranks with it this is."""
    if data_first:
        return divmod(rank, ranks // shares)
    place, share = divmod(rank, shares)
    return share, place


class HeldExperts:
    """Which of the experts stand in the files of one rank of stage 3, by the names there."""

    def __init__(self, model: Mapping[str, Any], rank: int, folder: str) -> None:
        self.packed = PackedExperts(model)
        self._rank, self._ranks = rank, data_ranks(model, folder)
        self._sizes = model.get(keys.EXPERT_GROUP_SIZES) or {}
        self._held = experts_per_rank(model[keys.MODULE])
        self._data_first = comes_data_first(model)

    def share_and_place(self, name: str) -> tuple[int, int]:
        prefix = expert_prefix(name)
        shares = self.packed.num_ranks(name) if prefix is None else self._sizes.get(prefix, 1)
        return share_and_place(self._rank, self._ranks, shares, self._data_first)

    def of_all(self, name: str) -> str:
        """The name with its expert numbered over all ranks."""
        prefix = expert_prefix(name)
        if prefix is None:
            return name
        return renumbered(name, {prefix: self._held[prefix] * self.share_and_place(name)[0]})


def comes_data_first(model: Mapping[str, Any]) -> bool:
    """Whether ranks with the same experts are neighbours in the run that saved a model file."""
    return bool((model.get(keys.DS_CONFIG) or {}).get(keys.DATA_BEFORE_EXPERTS, False))


def cut_runs(cuts: Sequence[GroupCut], starts: Sequence[int]) -> tuple[list[list[Run]], int]:
    """What lies in each of a rank's buffers, which begin at `starts`, and where all ends."""
    runs: list[list[Run]] = [[] for _ in starts[1:]]
    at = 0
    for shapes, ranks, place, firsts, names in cuts:
        for (name, shape), filed_as in zip(shapes.items(), names, strict=True):
            cut, _ = zero3_partitioned_param_info(shape.numel(), ranks)
            first = firsts.get(name, 0) + place * cut
            done, own = 0, max(0, min(cut, shape.numel() - place * cut))
            while done < own and at + done < starts[-1]:
                index = bisect_right(starts, at + done) - 1
                numel = min(own - done, starts[index + 1] - at - done)
                in_buffer = at + done - starts[index]
                runs[index].append(Run(name, first + done, in_buffer, numel, filed_as))
                done += numel
            at += cut
    return runs, at
