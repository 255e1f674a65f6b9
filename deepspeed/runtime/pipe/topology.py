"""Where every rank stands: coordinates on named axes, and the process groups of lines through them.

`PipelineParallelGrid` makes the groups once per world and answers Megatron's questions: it is the
`mpu` behind the `ParallelMap` of a pipeline engine.
"""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed import comm as dist
from deepspeed.comm.group_store import shared_group
from deepspeed.comm.rank_lists import holding

PIPE_AXIS = "pipe"
DATA_AXIS = "data"
MODEL_AXIS = "model"


def _coord_type(axes: Sequence[str]) -> Any:
    return namedtuple("ProcessCoord", axes)


class ProcessTopology:
    """Ranks on a grid with named axes; the last axis varies fastest (row-major).

    Attributes:
        axes, dims: Names and sizes, slowest first.
        ProcessCoord: Named tuple of one position.
        mapping: ProcessCoord -> rank.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = list(axes)
        self.dims = [int(size) for size in dims]
        if len(self.axes) != len(self.dims) or len(set(self.axes)) != len(self.axes):
            raise ValueError(
                f"topology: axes {self.axes} need distinct names and one size each, got dims "
                f"{self.dims}"
            )
        if any(size < 1 for size in self.dims):
            raise ValueError(f"topology: sizes must be at least 1, got {self._sizes()}")
        self.ProcessCoord = _coord_type(self.axes)
        positions = itertools.product(*(range(size) for size in self.dims))
        self._coords: list[Any] = [self.ProcessCoord._make(position) for position in positions]
        self.mapping: dict[Any, int] = {coord: rank for rank, coord in enumerate(self._coords)}

    def _sizes(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.dims, strict=True))

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a position; a ValueError names an axis that is missing or unknown."""
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(
                f"get_rank: give exactly the axes {self.axes}, got {sorted(coord_kwargs)}; "
                "filter_match() takes fewer"
            )
        coord = self.ProcessCoord(**coord_kwargs)
        if coord not in self.mapping:
            raise ValueError(f"get_rank: {coord} lies outside {self._sizes()}")
        return self.mapping[coord]

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = (DATA_AXIS, PIPE_AXIS),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Spell the rank's coordinates as checkpoint file names do, `model_00`; "" without axes."""
        coord = self.get_coord(rank)
        kept = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in kept)

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 for one that does not exist."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the position of a rank, a named tuple; a ValueError if there is no such rank."""
        if not 0 <= rank < len(self._coords):
            raise ValueError(
                f"rank {rank} not found in topology {self._sizes()} of {len(self._coords)} ranks"
            )
        return self._coords[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lines along an axis: lists of ranks that differ in it only, if it exists."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        fixed = itertools.product(*(range(self.get_dim(name)) for name in others))
        return [self.filter_match(**dict(zip(others, position, strict=True))) for position in fixed]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks, ascending, whose coordinates have the given values."""
        unknown = sorted(set(filter_kwargs) - set(self.axes))
        if unknown:
            raise ValueError(f"filter_match: no axis {', '.join(unknown)}; axes are {self.axes}")
        # Only the positions that match are made: a grid has as many lines as a world has ranks, so
        # looking at all ranks for each line takes ten seconds on 4,096 of them.
        values = [
            range(size) if axis not in filter_kwargs else [filter_kwargs[axis]]
            for axis, size in zip(self.axes, self.dims, strict=True)
        ]
        positions = itertools.product(*values)
        return [self.mapping[position] for position in positions if position in self.mapping]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks, ascending, whose coordinate on `axis` is `idx`."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return len(self._coords)

    def describe(self, rank: int) -> str:
        """Say one rank's place in words: `rank 3: pipe 1 of 2, data 1 of 2`."""
        coord = self.get_coord(rank)
        places = (
            f"{axis} {getattr(coord, axis)} of {size}"
            for axis, size in zip(self.axes, self.dims, strict=True)
        )
        return f"rank {rank}: {', '.join(places)}"

    def __str__(self) -> str:
        return "\n".join(self.describe(rank) for rank in range(self.world_size()))


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline x data parallelism; neighbours in rank are data replicas, the largest traffic."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=[PIPE_AXIS, DATA_AXIS], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline x data x tensor ("model") parallelism; neighbours in rank share layers."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=[PIPE_AXIS, DATA_AXIS, MODEL_AXIS], dims=[num_pp, num_dp, num_mp])


def _default_topology(world_size: int) -> ProcessTopology:
    """Deal the prime factors of the world size to pipe and data in turns."""
    dims = [1, 1]
    rest, factor, turn = world_size, 2, 0
    while rest > 1:
        while rest % factor:
            factor += 1
        rest //= factor
        dims[turn % 2] *= factor
        turn += 1
    return PipeDataParallelTopology(*dims)


def _reads(attribute: str) -> Callable[[PipelineParallelGrid], Any]:
    """Make a getter of the grid's: upstream asks for its attributes by methods."""
    return lambda grid: getattr(grid, attribute)


class PipelineParallelGrid:
    """A topology's process groups, and Megatron's questions about them. Made collectively.

    "model" in Megatron's old sense is everything that shares one data coordinate (pipeline x
    tensor); the tensor axis alone is the "slice".

    Attributes:
        model_parallel_size: Of the tensor axis, as slice_parallel_size.
        ds_model_proc_group, ds_model_world_size, ds_model_rank: Ranks of this data coordinate.
        dp_groups, dp_group, dp_proc_group: Rank lists of all data groups, of this rank's, and its
            process group; pipe_groups, pp_*, and model_groups, slice_* likewise.
        p2p_groups: [rank, rank of the next stage] of every rank, in a ring.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        if (
            process_group is not None
            and dist.get_world_size(process_group) != dist.get_world_size()
        ):
            raise ValueError(
                "PipelineParallelGrid(process_group=...): the group has "
                f"{dist.get_world_size(process_group)} of the world's {dist.get_world_size()} "
                "ranks; a grid spans the whole world, pass None"
            )
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._topo = topology if topology is not None else _default_topology(self.world_size)
        self._check_topology()
        self.data_parallel_size = max(self._topo.get_dim(DATA_AXIS), 1)
        self.pipe_parallel_size = max(self._topo.get_dim(PIPE_AXIS), 1)
        self.slice_parallel_size = max(self._topo.get_dim(MODEL_AXIS), 1)
        self.model_parallel_size = self.slice_parallel_size
        coord = self._topo.get_coord(self.global_rank)
        self.stage_id = int(getattr(coord, PIPE_AXIS, 0))
        self.data_parallel_id = int(getattr(coord, DATA_AXIS, 0))
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self._make_groups()

    def _check_topology(self) -> None:
        known = {PIPE_AXIS, DATA_AXIS, MODEL_AXIS}
        if not set(self._topo.axes) <= known:
            raise ValueError(
                f"topology: axes {self._topo.axes} hold names other than "
                f"{', '.join(sorted(known))}; rename them"
            )
        if self._topo.world_size() != self.world_size:
            raise ValueError(
                f"topology: {self._topo._sizes()} are {self._topo.world_size()} ranks, but the "
                f"world has {self.world_size}; choose sizes whose product is {self.world_size}, or "
                f"start {self._topo.world_size()} processes"
            )

    def _make_groups(self) -> None:
        # new_group is collective: every rank goes through the same lists in the same order.
        self.dp_groups, self.dp_group = self._lines(DATA_AXIS)
        self.pipe_groups, self.pp_group = self._lines(PIPE_AXIS)
        self.model_groups, self.slice_group = self._lines(MODEL_AXIS)
        copies = [self._topo.filter_match(**at) for at in self._data_coordinates()]
        self.dp_proc_group = shared_group(self.dp_groups)
        self.pp_proc_group = shared_group(self.pipe_groups)
        self.slice_proc_group = shared_group(self.model_groups)
        self.ds_model_proc_group = shared_group(copies)
        self.ds_model_world_size = self.pipe_parallel_size * self.slice_parallel_size
        self.ds_model_rank = holding(self.global_rank, copies).index(self.global_rank)
        self.p2p_groups = self._neighbours()

    def _lines(self, axis: str) -> tuple[list[list[int]], list[int]]:
        """All lines along an axis, of one rank each for an absent axis, and this rank's."""
        lines = self._topo.get_axis_comm_lists(axis) or [[rank] for rank in range(self.world_size)]
        return lines, holding(self.global_rank, lines)

    def _data_coordinates(self) -> list[dict[str, int]]:
        if DATA_AXIS not in self._topo.axes:
            return [{}]
        return [{DATA_AXIS: index} for index in range(self.data_parallel_size)]

    def _neighbours(self) -> list[list[int]]:
        following = {
            rank: line[(at + 1) % len(line)]
            for line in self.pipe_groups
            for at, rank in enumerate(line)
        }
        return [[rank, following[rank]] for rank in range(self.world_size)]

    def describe(self, rank: int | None = None) -> str:
        """Say a rank's coordinates in words; by default those of all ranks, a line each."""
        return str(self._topo) if rank is None else self._topo.describe(rank)

    topology = _reads("_topo")
    get_stage_id = _reads("stage_id")
    get_data_parallel_id = _reads("data_parallel_id")

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the global rank at a stage; other coordinates are this rank's unless given."""
        coord = self._topo.get_coord(self.global_rank)._asdict()
        return self._topo.get_rank(**{**coord, PIPE_AXIS: stage_id, **kwargs})

    get_global_rank = _reads("global_rank")

    # -- the pipe axis
    get_pipe_parallel_rank = _reads("stage_id")
    get_pipe_parallel_world_size = _reads("pipe_parallel_size")
    get_pipe_parallel_group = _reads("pp_proc_group")
    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    # -- the data axis
    get_data_parallel_rank = _reads("data_parallel_id")
    get_data_parallel_world_size = _reads("data_parallel_size")
    get_data_parallel_group = _reads("dp_proc_group")
    get_data_parallel_group_ranks = _reads("dp_group")

    # -- everything with this data coordinate: pipeline x tensor
    get_model_parallel_rank = _reads("ds_model_rank")
    get_model_parallel_world_size = _reads("ds_model_world_size")
    get_model_parallel_group = _reads("ds_model_proc_group")

    # -- the tensor axis

    def get_slice_parallel_rank(self) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), MODEL_AXIS, 0))

    get_slice_parallel_world_size = _reads("slice_parallel_size")
    get_slice_parallel_group = _reads("slice_proc_group")
    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group
