"""Which ranks share what, for code outside an engine: upstream's getters over the map in force.

That map (a `deepspeed.comm.parallel_map`) is that of the engine made last and not yet destroyed;
without one it is the client's, who assigns ``groups.mpu`` or ``groups.mesh_device`` or calls
`initialize`; with neither it is that of plain data parallelism. What a client assigns is in force
at once, and stays when an engine goes.

Groups that nobody has made yet are made when they are first asked for, collectively over the world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from deepspeed import comm as dist
from deepspeed.comm import group_store
from deepspeed.comm.parallel_map import ExpertAxes, OptimizerInstances, ParallelMap

# An object with Megatron's getters, or None. Clients read and assign it.
mpu: Any = None

# A torch DeviceMesh with named axes, or None; used when there is no mpu. Clients read and assign
# it.
mesh_device: Any = None


@dataclass(eq=False)
class MapInForce:
    """A map that answers here until it is removed, or until one comes after it; `is_assigned`: a
    client has assigned what is behind it, and may assign something else.
    """

    parallel_map: ParallelMap
    is_assigned: bool = False

    def remove(self) -> None:
        """Let the map that was in force before it answer again; again and again is fine."""
        current()
        if self in _in_force:
            _in_force.remove(self)
            _show()


# In order of coming; the last one answers. The first stays.
_in_force: list[MapInForce] = [MapInForce(ParallelMap())]

# Megatron lets checkpoint tools pretend to be another rank: fields of `ParallelMap`.
_pretended: dict[str, int] = {}


def current() -> ParallelMap:
    """The map in force."""
    if not _in_force[-1].parallel_map.is_of(mpu, mesh_device):  # a client has assigned one
        if _in_force[-1].is_assigned:
            _in_force.pop()
        if not _in_force[-1].parallel_map.is_of(mpu, mesh_device):
            _in_force.append(MapInForce(_known(mpu, mesh_device), is_assigned=True))
    return _in_force[-1].parallel_map


def _known(mpu: object, mesh: object) -> ParallelMap:
    maps = (one.parallel_map for one in reversed(_in_force))
    return next((one for one in maps if one.is_of(mpu, mesh)), None) or ParallelMap(mpu, mesh)


def _show() -> None:
    global mpu, mesh_device
    last = _in_force[-1].parallel_map
    mpu, mesh_device = last.mpu, last.mesh


def put_in_force(parallel_map: ParallelMap) -> MapInForce:
    """Let this map answer from now on, until the returned handle is removed."""
    current()
    handle = MapInForce(parallel_map)
    _in_force.append(handle)
    _show()
    return handle


def map_of(mpu: object, mesh: object) -> ParallelMap:
    """The map of an engine that is given these: one in force or new; given neither, the map in
    force.

    Raises:
        ValueError: A mesh beside an mpu, or one without its axes; neither while a pipeline's map is
            in force, or that of a model whose layers the engine has cut.
    """
    here = current()
    if mpu is None and mesh is None:
        if here.pipe.size > 1:
            raise ValueError(
                "deepspeed.initialize() of a plain model while a pipeline's groups are in use "
                f"({here}): gradients would be averaged over the ranks of one stage only. Call "
                "destroy() on the pipeline's engine before, or give the groups to use as mpu=..., "
                f"or mesh_param=({dist.get_world_size()}, 1) to average over all ranks"
            )
        if getattr(here.mpu, "cuts_models", False):
            raise ValueError(
                "deepspeed.initialize() of a model that is not cut while ranks share the layers of "
                f"another (tensor_parallel.autotp_size; {here}): which of them see the same data? "
                "Give tensor_parallel.autotp_size for both, call destroy() on the other engine "
                f"before, or give mesh_param=({dist.get_world_size()}, 1) if all see different data"
            )
        return here
    ParallelMap(mpu, mesh).check()
    return _known(mpu, mesh)


def initialize(ep_size: int = 1, mpu: object = None) -> None:
    """Use ``mpu`` for all questions from now on, and make the expert groups of an ``ep_size`` above
    1 (collective over the world).

    Raises:
        ValueError: ``ep_size`` does not divide the ranks that can share experts.
    """
    globals()["mpu"] = mpu
    if ep_size != 1:
        _create_expert_and_data_parallel(ep_size)


def reset() -> None:
    """Forget the mpu, the mesh, all maps, the pretended ranks and all groups."""
    _in_force[:] = [MapInForce(ParallelMap())]
    _show()
    _pretended.clear()
    group_store.forget()


_clone_world_group = dist.get_world_group


Answer = TypeVar("Answer")


def _asks(question: Callable[[ParallelMap], Answer]) -> Callable[[], Answer]:
    """A getter of the map in force."""
    return lambda: question(current())


def _asks_experts(question: Callable[[ExpertAxes], Answer]) -> Callable[[str], Answer]:
    """A getter of the experts "ep_size_N" of the map in force; KeyError if they are not made."""
    return lambda group_name: question(current().experts(group_name))


def _asks_all_experts(question: Callable[[ExpertAxes], Answer]) -> Callable[[], dict[str, Answer]]:
    """A getter of all of them, by name."""
    return lambda: {name: question(axes) for name, axes in current().all_experts.items()}


# Groups, their sizes, this process's rank in them, and the global ranks of their members: what each
# is, `ParallelMap` says.

# -- data parallel ---------------------------------------------------------------------------------


_get_data_parallel_group = _asks(lambda here: here.data.group)
_get_data_parallel_group_ranks = _asks(lambda here: here.data.ranks)
_get_data_parallel_world_size = _asks(lambda here: here.data.size)
_get_data_parallel_rank = _asks(lambda here: here.data.rank)
_get_broadcast_src_rank = _asks(lambda here: here.replicas.first_rank)


def _get_optimizer_instances(count: int) -> OptimizerInstances:
    """The ranks that share dense parameters as `count` replicas of the sharded optimizer state.
    Collective over the world when first asked.

    Raises:
        ValueError: The group cannot be split evenly.
    """
    return current().optimizer_instances(count)


# -- sequence parallel -----------------------------------------------------------------------------


_get_sequence_parallel_world_size = _asks(lambda here: here.sequence.size)
_get_sequence_parallel_rank = _asks(lambda here: here.sequence.rank)
# KeyError where neither an mpu nor a mesh says which they are.
_get_sequence_parallel_group = _asks(lambda here: here.sequence.group)
_get_sequence_data_parallel_group = _asks(lambda here: here.replicas.group)
_get_sequence_data_parallel_world_size = _asks(lambda here: here.replicas.size)
_get_sequence_data_parallel_rank = _asks(lambda here: here.replicas.rank)


# -- expert parallel: who holds different experts, and who holds the same ones ---------------------


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """Make the groups "ep_size_N" of experts that are not tensor parallel, once. Collective over
    the world; ValueError if the ranks cannot be split so. By default neighbouring ranks hold
    different experts.
    """
    current().make_experts(expert_parallel_size_, use_data_before_expert_parallel_)


def _create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: object, use_data_before_expert_parallel_: bool = False
) -> None:
    """`_create_expert_and_data_parallel` for experts that are tensor parallel as ``mpu`` says;
    ``mpu`` is used from now on.
    """
    globals()["mpu"] = mpu
    current().make_experts(expert_parallel_size_, use_data_before_expert_parallel_, sharded=True)


_get_expert_parallel_group = _asks_experts(lambda axes: axes.expert.group)
_get_expert_parallel_group_dict = _asks_all_experts(lambda axes: axes.expert.group)
_get_expert_parallel_group_ranks = _asks_experts(lambda axes: axes.expert.ranks)
_get_expert_parallel_world_size = _asks_experts(lambda axes: axes.expert.size)
_get_expert_parallel_rank = _asks_experts(lambda axes: axes.expert.rank)
_get_expert_parallel_src_rank = _asks_experts(lambda axes: axes.expert.first_rank)
_get_expert_data_parallel_group = _asks_experts(lambda axes: axes.data.group)
_get_expert_data_parallel_group_dict = _asks_all_experts(lambda axes: axes.data.group)
_get_expert_data_parallel_group_ranks = _asks_experts(lambda axes: axes.data.ranks)
_get_expert_data_parallel_world_size = _asks_experts(lambda axes: axes.data.size)
_get_expert_data_parallel_rank = _asks_experts(lambda axes: axes.data.rank)
_get_expert_broadcast_src_rank = _asks_experts(lambda axes: axes.data.first_rank)


def _get_max_expert_size() -> int:
    """The largest expert-parallel size in use.

    Raises:
        KeyError: No expert groups are made.
    """
    sizes = [axes.expert.size for axes in current().all_experts.values()]
    if not sizes:
        raise KeyError(
            "no expert groups are made: the model has no MoE layer, or deepspeed.initialize has "
            "not run yet"
        )
    return max(sizes)


def _get_max_expert_size_name() -> str:
    """The name of the expert groups of the largest size."""
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> Any:
    """The expert group of the largest size."""
    return _get_expert_parallel_group(_get_max_expert_size_name())


# -- tensor and model parallel ---------------------------------------------------------------------


def _as_pretended() -> ParallelMap:
    """The map in force, with the tensor-parallel size and rank that were set here."""
    return replace(current(), **_pretended) if _pretended else current()


def _pretend(field: str, value: int | None) -> None:
    if value is None:
        _pretended.pop(field, None)
    else:
        _pretended[field] = value


get_tensor_model_parallel_group = _asks(lambda here: here.tensor.group)


def get_tensor_model_parallel_world_size() -> int:
    """The tensor-parallel size, or the pretended one."""
    return _as_pretended().tensor.size


def get_tensor_model_parallel_rank() -> int:
    """The tensor-parallel rank, or the pretended one."""
    return _as_pretended().tensor.rank


get_tensor_model_parallel_src_rank = _asks(lambda here: here.tensor.first_rank)


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Pretend a tensor-parallel size; None ends it."""
    _pretend("tensor_size", world_size)


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Pretend a tensor-parallel rank; None ends it."""
    _pretend("tensor_rank", rank)


_get_model_parallel_group = _asks(lambda here: here.model.group)


def _get_model_parallel_world_size() -> int:
    """The number of ranks that hold pieces of one model."""
    return _as_pretended().model.size


def _get_model_parallel_rank() -> int:
    """This process's rank among those that hold pieces of its model."""
    return _as_pretended().model.rank


# -- public names ----------------------------------------------------------------------------------

get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_group = _get_model_parallel_group
get_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = _get_model_parallel_rank
