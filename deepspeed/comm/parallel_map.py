"""Which ranks share what: one map with named axes, which an engine owns for its whole life. What
code outside an engine sees is the map in force, in `utils.groups` under upstream's names.

The answers come, first match, from an external `mpu` with Megatron's getters (the grid of a
pipeline is one), from a torch DeviceMesh with axes ``data_parallel`` and ``sequence_parallel``, or
are those of plain data parallelism: one data axis of all ranks, everything else of size 1.

A map knows where the answers come from and nothing else, so that it cannot change. Process groups
that nobody has made yet are made when they are first asked for, collectively over the world, and
kept in `group_store`; which ranks they hold is the arithmetic of `rank_lists`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup

from deepspeed.comm import comm as dist
from deepspeed.comm import group_store, rank_lists
from deepspeed.comm.rank_lists import Ranks
from deepspeed.utils.bwc import (
    bwc_pipeline_parallel_group,
    bwc_pipeline_parallel_rank,
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)

# The names of a mesh's axes.
DATA_AXIS = "data_parallel"
SEQUENCE_AXIS = "sequence_parallel"


@dataclass(frozen=True)
class Axis:
    """One axis through this rank: the ranks that differ from it in this coordinate only.
    `find_group` is collective over the world if the group is not made yet; `find_size` and
    `find_rank` do without it, where they are given.
    """

    name: str
    find_group: Callable[[], ProcessGroup]
    find_size: Callable[[], int] | None = None
    find_rank: Callable[[], int] | None = None

    @classmethod
    def of(cls, name: str, group: ProcessGroup) -> Axis:
        return cls(name, lambda: group)

    @property
    def group(self) -> ProcessGroup:
        return self.find_group()

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group) if self.find_size is None else int(self.find_size())

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.find_rank is None else int(self.find_rank())

    @property
    def ranks(self) -> list[int]:
        return dist.get_all_ranks_from_group(self.group)

    @property
    def first_rank(self) -> int:
        return dist.get_global_rank(self.group, 0)

    def __str__(self) -> str:
        """This rank's coordinate: `data 1 of 2`."""
        return f"{self.name} {self.rank} of {self.size}"


@dataclass(frozen=True)
class ExpertAxes:
    """This rank's two axes for experts that are spread over `ep_size` ranks: `expert`, of ranks
    that hold different experts and exchange tokens, and `data`, of those that hold the same, where
    gradients are reduced and optimizer state is sharded.

    Together they cover the ranks whose tokens an expert's gradient sums over: those over which
    dense gradients are reduced, times the tensor-parallel ranks where these hold different tokens
    of one batch (experts that are not `sharded`, tensor parallel). `data_first`: neighbours hold
    the same experts.
    """

    expert: Axis
    data: Axis
    data_first: bool
    sharded: bool


@dataclass(frozen=True)
class OptimizerInstances:
    """This rank's place in a group of D replicas that is split into `count` instances of D / count
    consecutive ranks (`inside`), each of which has the whole sharded state; `across` are the ranks
    that own the same shard, one of each instance. Without a split, `across` and `all_replicas` are
    None.
    """

    inside: ProcessGroup | None
    across: ProcessGroup | None = None
    index: int = 0
    count: int = 1
    all_replicas: ProcessGroup | None = None

    @property
    def everyone(self) -> ProcessGroup | None:
        """The ranks of all instances."""
        return self.inside if self.all_replicas is None else self.all_replicas


def make_mesh(data: int, sequence: int) -> Any:
    """All ranks as `data` rows of `sequence` ranks that share sequences; ValueError if they are not
    all ranks. Collective over the world when first asked.
    """
    world = dist.get_world_size()
    if data * sequence != world:
        raise ValueError(
            f"{data} data-parallel times {sequence} sequence-parallel ranks are {data * sequence}, "
            f"but there are {world} ranks: make mesh_param=(data parallel, sequence parallel), or "
            "the keys data_parallel_size and sequence_parallel_size, match"
        )
    shape, axes = (data, sequence), (DATA_AXIS, SEQUENCE_AXIS)
    key = ("mesh", data, sequence)
    return group_store.made_once(key, lambda: dist.initialize_mesh_device(shape, axes))


def _told_by_all(own: Ranks) -> list[Ranks]:
    """Every such group of the world, `own` being this rank's, in one order on all ranks."""
    world = dist.get_world_size()
    if len(own) == world:
        return [own]
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, own)
    return rank_lists.partition_of(everywhere)


@dataclass(frozen=True, eq=False)
class ParallelMap:
    """See module. Two maps are equal if they are one: experts are set up per map. `tensor_size` and
    `tensor_rank` are what a checkpoint tool pretends.
    """

    mpu: Any = None
    mesh: Any = None
    tensor_size: int | None = None
    tensor_rank: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelMap:
        """Itself: the copy of a model is on the same ranks."""
        return self

    def is_of(self, mpu: object, mesh: object) -> bool:
        return self.mpu is mpu and self.mesh is mesh

    def check(self) -> None:
        """Refuse, with ValueError, a mesh beside an mpu, or one without the two axes."""
        if self.mesh is None:
            return
        if self.mpu is not None:
            raise ValueError(
                "a sequence-parallel mesh beside an mpu: the mpu says which ranks share what; give "
                "one of them"
            )
        axes = self.mesh.mesh_dim_names
        missing = {DATA_AXIS, SEQUENCE_AXIS} - set(axes or ())
        if missing:
            raise ValueError(f"the mesh has axes {axes}; {sorted(missing)} missing")

    # -- what is behind the map

    def _has(self, getter: str) -> bool:
        return self.mpu is not None and hasattr(self.mpu, getter)

    def _getter(self, name: str) -> Callable[[], Any] | None:
        return getattr(self.mpu, name) if self._has(name) else None

    def _from_mpu(self, name: str) -> Any:
        getter = self._getter(name)
        if getter is None:
            mpu = type(self.mpu).__name__
            raise ValueError(f"the mpu {mpu!r} has no {name}(); add it, or pass no mpu")
        return getter()

    def _on_mesh(self, axis: str) -> Callable[[], ProcessGroup] | None:
        has_mesh = self.mpu is None and self.mesh is not None
        if has_mesh and axis in (self.mesh.mesh_dim_names or ()):
            return partial(self.mesh.get_group, mesh_dim=axis)
        return None

    # -- axes

    def _as_told(self, kind: str, axis: Axis) -> Axis:
        """The axis, of the size and rank that the mpu tells where it does."""
        size, rank = self._getter(f"get_{kind}_world_size"), self._getter(f"get_{kind}_rank")
        return replace(axis, find_size=size or axis.find_size, find_rank=rank or axis.find_rank)

    @property
    def pipe(self) -> Axis:
        return Axis(
            "pipe",
            lambda: _or_alone(bwc_pipeline_parallel_group(self.mpu)),
            partial(bwc_pipeline_parallel_world_size, self.mpu),
            partial(bwc_pipeline_parallel_rank, self.mpu),
        )

    @property
    def data(self) -> Axis:
        """The ranks that hold the same model (piece) and see different data."""
        return self._as_told("data_parallel", Axis("data", self._data_group))

    @property
    def sequence(self) -> Axis:
        """The ranks that share one sequence; its group raises KeyError if nothing says which."""
        on_mesh = self._on_mesh(SEQUENCE_AXIS)
        if on_mesh is not None:
            return Axis("sequence", on_mesh)
        alone = Axis("sequence", self._sequence_group, lambda: 1, lambda: 0)
        return self._as_told("sequence_parallel", alone)

    @property
    def replicas(self) -> Axis:
        """The ranks over which dense gradients are reduced: data times sequence."""
        return self._as_told("sequence_data_parallel", Axis("replica", self._replica_group))

    @property
    def tensor(self) -> Axis:
        """The ranks that hold slices of the same layers."""
        size, rank = self.tensor_size, self.tensor_rank
        return Axis(
            "tensor",
            lambda: _or_alone(bwc_tensor_model_parallel_group(self.mpu)),
            partial(bwc_tensor_model_parallel_world_size, self.mpu)
            if size is None
            else lambda: size,
            partial(bwc_tensor_model_parallel_rank, self.mpu) if rank is None else lambda: rank,
        )

    @property
    def model(self) -> Axis:
        """The ranks that hold pieces of one model: tensor times pipe."""
        tensor = self.tensor
        find_group = self._getter("get_model_parallel_group") or tensor.find_group
        pieces = Axis("model", find_group, tensor.find_size, tensor.find_rank)
        return self._as_told("model_parallel", pieces)

    def _data_group(self) -> ProcessGroup:
        if self._knows_sequences_only():
            own = tuple(self.sequence.ranks)
            return group_store.made_once(
                ("beside", own),
                lambda: group_store.own_group(rank_lists.beside_sequences(_told_by_all(own))),
            )
        if self.mpu is not None:
            group: ProcessGroup = self._from_mpu("get_data_parallel_group")
            return group
        return (self._on_mesh(DATA_AXIS) or dist.get_world_group)()

    def _sequence_group(self) -> ProcessGroup:
        getter = self._getter("get_sequence_parallel_group")
        if getter is None:
            raise KeyError(
                "No sequence parallel group found: pass deepspeed.initialize(mpu=...) with "
                f"get_sequence_parallel_group(), or mesh_param with an axis {SEQUENCE_AXIS!r}"
            )
        group: ProcessGroup = getter()
        return group

    def _knows_sequences_only(self) -> bool:
        """Whether the mpu has sequence groups and no data groups, as `UlyssesSPAttentionHF`'s."""
        if self._has("get_data_parallel_group"):
            return False
        return self._has("get_sequence_parallel_group") and self.model.size == 1

    def _replica_group(self) -> ProcessGroup:
        getter = "get_sequence_data_parallel_group"
        if self._has(getter) or (
            self.mpu is not None and self.sequence.size > 1 and self.model.size > 1
        ):
            group: ProcessGroup = self._from_mpu(getter)
            return group
        # Without model parallelism every rank is in exactly one (data, sequence) position.
        return self.data.group if self.sequence.size == 1 else dist.get_world_group()

    # -- replicas of the sharded optimizer state inside the replicas

    def optimizer_instances(self, count: int) -> OptimizerInstances:
        return split_into_instances(self.replicas.group, count)

    # -- experts

    @property
    def all_experts(self) -> dict[str, ExpertAxes]:
        made: dict[str, ExpertAxes] = group_store.made_once(("experts", self), dict)
        return made

    def experts(self, group_name: str) -> ExpertAxes:
        made = self.all_experts
        if group_name not in made:
            raise KeyError(
                f"no expert groups {group_name!r} (made: {sorted(made) or 'none'}): "
                "deepspeed.initialize makes them for the MoE layers of the model; without an "
                "engine call set_deepspeed_parallelism() of the layer on all ranks"
            )
        return made[group_name]

    def make_experts(self, ep_size: int, data_first: bool = False, sharded: bool = False) -> None:
        """Make the axes "ep_size_N", once. Collective over the world.

        Args:
            ep_size: Number of ranks over which one set of experts is spread.
            data_first: Neighbouring ranks hold the same experts; by default they hold different
                ones.
            sharded: The experts are tensor parallel.

        Raises:
            ValueError: The ranks cannot be split so, or were split otherwise under this name.
        """
        name, made = f"ep_size_{ep_size}", self.all_experts
        if name not in made:
            lists = rank_lists.expert_groups(self._expert_blocks(sharded), ep_size, data_first)
            made[name] = ExpertAxes(
                Axis.of("expert", group_store.shared_group(lists.rows)),
                Axis.of("data", group_store.shared_group(lists.columns)),
                data_first,
                sharded,
            )
        present = made[name]
        if (present.data_first, present.sharded) != (data_first, sharded):
            raise ValueError(
                f"expert groups {name!r} were made with "
                f"use_data_before_expert_parallel_={present.data_first} and tensor-parallel "
                f"experts={present.sharded}, now asked for with {data_first} and {sharded}: all "
                "layers of this ep_size need one setting"
            )

    def _expert_blocks(self, sharded: bool) -> list[Ranks]:
        """The sets of ranks that can share one set of experts: a partition of the world."""
        own = tuple(sorted(self.replicas.ranks))
        world = dist.get_world_size()
        if len(own) == world:
            return [own]
        everywhere: list[Any] = [None] * world
        dist.all_gather_object(everywhere, (own, tuple(self.tensor.ranks)))
        return rank_lists.expert_blocks(everywhere, sharded)

    # -- for people

    def __str__(self) -> str:
        """This rank's coordinates: `rank 3: pipe 1 of 2, data 1 of 2`, then those of experts."""
        if not dist.is_initialized():
            return "no process group yet"
        places = [str(axis) for axis in (self.pipe, self.sequence, self.tensor) if axis.size > 1]
        places.insert(1 if self.pipe.size > 1 else 0, self._data_place())
        experts = [f"{name}: {one.expert}, {one.data}" for name, one in self.all_experts.items()]
        return f"rank {dist.get_rank()}: {'; '.join([', '.join(places), *experts])}"

    def _data_place(self) -> str:
        """The coordinate on the data axis, if it is known without communicating."""
        if self._knows_sequences_only():
            is_known = group_store.is_made(("beside", tuple(self.sequence.ranks)))
        else:
            is_known = self.mpu is None or self._has("get_data_parallel_group")
        return str(self.data) if is_known else "data ?"


def _or_alone(group: ProcessGroup | None) -> ProcessGroup:
    return group_store.group_of_one() if group is None else group


def split_into_instances(whole: ProcessGroup | None, count: int) -> OptimizerInstances:
    """A group of ranks that share parameters as `count` instances; ValueError if that is not even.
    Collective over the world when first asked.
    """
    if count == 1:
        return OptimizerInstances(whole)
    own = tuple(sorted(dist.get_all_ranks_from_group(whole)))  # as new_group will number them
    if count < 1 or len(own) % count:
        raise ValueError(
            f"{len(own)} data-parallel ranks cannot be split into {count} optimizer instances "
            "of equal size"
        )
    key = ("instances", own, count)
    return group_store.made_once(key, lambda: _make_instances(whole, own, count))


def _make_instances(whole: ProcessGroup | None, own: Ranks, count: int) -> OptimizerInstances:
    lists = rank_lists.optimizer_instances(_told_by_all(own), count)
    return OptimizerInstances(
        group_store.own_group(lists.rows),
        group_store.own_group(lists.columns),
        own.index(dist.get_rank()) // (len(own) // count),
        count,
        whole,
    )
