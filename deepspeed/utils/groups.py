"""Which ranks share what: data-, tensor-, model- and sequence-parallel groups.

The answers come, first match, from an external `mpu` with Megatron's getters (`deepspeed.initialize(mpu=...)` stores it in
``groups.mpu``), from a torch DeviceMesh with axes ``data_parallel`` and ``sequence_parallel`` (``groups.mesh_device``), or are
those of plain data parallelism: one data group of all ranks, everything else of size 1.

Groups of our own are made once and kept; they are forgotten with the process group they were made in. Making one is
collective over the world, so the first question for a tensor- or model-parallel group must be asked on all ranks.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from deepspeed import comm as dist
from deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)

# An object with Megatron's getters, or None.
mpu: Any = None

# A torch DeviceMesh with named axes, or None; used when there is no mpu.
mesh_device: Any = None

DATA_AXIS = "data_parallel"
SEQUENCE_AXIS = "sequence_parallel"

_cache: dict[Hashable, Any] = {}
# The world group in which the cached groups were made: groups do not outlive it.
_cache_world: Any = None

# Megatron lets checkpoint tools pretend to be another rank; None means the truth.
_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE: int | None = None
_MPU_TENSOR_MODEL_PARALLEL_RANK: int | None = None


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Use ``mpu`` for all questions from now on.

    Raises:
        NotImplementedError: ``ep_size`` is above 1.
    """
    if ep_size != 1:
        raise NotImplementedError(
            f"ep_size={ep_size}: expert parallelism comes with deepspeed.moe in a later release; use ep_size=1"
        )
    globals()["mpu"] = mpu


def reset() -> None:
    """Forget the mpu, the mesh, the pretended ranks and all groups."""
    global mpu, mesh_device, _cache_world, _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE, _MPU_TENSOR_MODEL_PARALLEL_RANK
    mpu = None
    mesh_device = None
    _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = None
    _MPU_TENSOR_MODEL_PARALLEL_RANK = None
    _cache.clear()
    _cache_world = None


def _from_mpu(name: str) -> Any:
    getter = getattr(mpu, name, None)
    if getter is None:
        raise ValueError(f"the mpu {type(mpu).__name__!r} has no {name}(); add it, or pass no mpu")
    return getter()


def _has(name: str) -> bool:
    return mpu is not None and hasattr(mpu, name)


def _mesh_has(axis: str) -> bool:
    return mpu is None and mesh_device is not None and axis in (mesh_device.mesh_dim_names or ())


def _made_once(key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` made under this key in the present world."""
    global _cache_world
    world = dist.get_world_group()
    if _cache_world is not world:
        _cache.clear()
        _cache_world = world
    if key not in _cache:
        _cache[key] = make()
    return _cache[key]


def _own_group(rank_lists: list[list[int]]) -> Any:
    """Make a group of each list and return this rank's; every rank passes the same lists, in which each rank occurs once.

    new_group is collective over the world: every rank makes every group, in the same order.
    """
    made = [dist.new_group(ranks) for ranks in rank_lists]
    own = dist.get_rank()
    return next(group for group, ranks in zip(made, rank_lists, strict=True) if own in ranks)


def _group_of_one() -> Any:
    """The group of this rank alone."""
    return _made_once("self", lambda: _own_group([[rank] for rank in range(dist.get_world_size())]))


def _clone_world_group() -> Any:
    """The group of all ranks."""
    return dist.get_world_group()


# -- data parallel ----------------------------------------------------------------------------------------------------


def _get_data_parallel_group() -> Any:
    """The ranks that hold the same model (piece) and see different data."""
    if mpu is not None:
        return _from_mpu("get_data_parallel_group")
    if _mesh_has(DATA_AXIS):
        return mesh_device.get_group(mesh_dim=DATA_AXIS)
    return dist.get_world_group()


def _get_data_parallel_group_ranks() -> list[int]:
    """The global ranks of the data-parallel group."""
    return dist.get_all_ranks_from_group(_get_data_parallel_group())


def _get_data_parallel_world_size() -> int:
    """The number of ranks in the data-parallel group."""
    if _has("get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    return dist.get_world_size(_get_data_parallel_group())


def _get_data_parallel_rank() -> int:
    """This process's rank in the data-parallel group."""
    if _has("get_data_parallel_rank"):
        return int(mpu.get_data_parallel_rank())
    return dist.get_rank(_get_data_parallel_group())


def _get_broadcast_src_rank() -> int:
    """The global rank from which the data-parallel group takes its first weights."""
    return dist.get_global_rank(_get_sequence_data_parallel_group(), 0)


# -- optimizer instances: replicas of the sharded optimizer state inside the data-parallel group ---------------------


@dataclass(frozen=True)
class OptimizerInstances:
    """This rank's place in a data-parallel group of D ranks that is split into `count` instances of D / count consecutive ranks.

    Attributes:
        inside: The ranks of this instance; each owns one shard.
        across: The ranks that own the same shard, one of each instance; None if there is one instance.
        index: Which instance this rank is in.
        count: How many there are.
    """

    inside: Any
    across: Any = None
    index: int = 0
    count: int = 1


def _get_optimizer_instances(count: int) -> OptimizerInstances:
    """The data-parallel group as `count` instances. Collective over the world when first asked.

    Raises:
        ValueError: The group cannot be split evenly.
    """
    whole = _get_data_parallel_group()
    if count == 1:
        return OptimizerInstances(whole)
    own = tuple(sorted(dist.get_all_ranks_from_group(whole)))  # as new_group will number them
    if count < 1 or len(own) % count:
        raise ValueError(f"{len(own)} data-parallel ranks cannot be split into {count} optimizer instances of equal size")
    return _made_once(("instances", own, count), lambda: _make_instances(own, count))


def _make_instances(own: tuple[int, ...], count: int) -> OptimizerInstances:
    size = len(own) // count
    inside, across = [], []
    for ranks in _all_data_parallel_ranks(own):
        inside += [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]
        across += [list(ranks[position::size]) for position in range(size)]
    return OptimizerInstances(_own_group(inside), _own_group(across), own.index(dist.get_rank()) // size, count)


def _all_data_parallel_ranks(own: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every data-parallel group of the world, in one order on all ranks: with model parallelism there are several."""
    world = dist.get_world_size()
    if len(own) == world:
        return [own]
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, own)
    return sorted({tuple(ranks) for ranks in everywhere})


# -- sequence parallel ------------------------------------------------------------------------------------------------


def _get_sequence_parallel_world_size() -> int:
    """The number of ranks that share one sequence."""
    if _has("get_sequence_parallel_world_size"):
        return int(mpu.get_sequence_parallel_world_size())
    if _mesh_has(SEQUENCE_AXIS):
        return int(mesh_device.size(mesh_device.mesh_dim_names.index(SEQUENCE_AXIS)))
    return 1


def _get_sequence_parallel_rank() -> int:
    """This process's rank among those that share its sequence."""
    if _has("get_sequence_parallel_rank"):
        return int(mpu.get_sequence_parallel_rank())
    if _mesh_has(SEQUENCE_AXIS):
        return int(mesh_device.get_local_rank(mesh_dim=SEQUENCE_AXIS))
    return 0


def _get_sequence_parallel_group() -> Any:
    """The ranks that share one sequence.

    Raises:
        KeyError: neither an mpu nor a mesh says which they are.
    """
    if _has("get_sequence_parallel_group"):
        return mpu.get_sequence_parallel_group()
    if _mesh_has(SEQUENCE_AXIS):
        return mesh_device.get_group(mesh_dim=SEQUENCE_AXIS)
    raise KeyError(
        "No sequence parallel group found: pass deepspeed.initialize(mpu=...) with get_sequence_parallel_group(), "
        f"or mesh_param with an axis {SEQUENCE_AXIS!r}"
    )


def _get_sequence_data_parallel_group() -> Any:
    """The ranks over which dense gradients are reduced: data parallel times sequence parallel."""
    if _has("get_sequence_data_parallel_group"):
        return mpu.get_sequence_data_parallel_group()
    if _get_sequence_parallel_world_size() == 1:
        return _get_data_parallel_group()
    if mpu is not None and _get_model_parallel_world_size() > 1:
        return _from_mpu("get_sequence_data_parallel_group")
    # Without model parallelism every rank is in exactly one (data, sequence) position.
    return dist.get_world_group()


def _get_sequence_data_parallel_world_size() -> int:
    """The number of ranks over which dense gradients are reduced."""
    if _has("get_sequence_data_parallel_world_size"):
        return int(mpu.get_sequence_data_parallel_world_size())
    return dist.get_world_size(_get_sequence_data_parallel_group())


def _get_sequence_data_parallel_rank() -> int:
    """This process's rank among those over which dense gradients are reduced."""
    if _has("get_sequence_data_parallel_rank"):
        return int(mpu.get_sequence_data_parallel_rank())
    return dist.get_rank(_get_sequence_data_parallel_group())


# -- tensor and model parallel ----------------------------------------------------------------------------------------


def get_tensor_model_parallel_group() -> Any:
    """The ranks that hold pieces of the same layers."""
    group = bwc_tensor_model_parallel_group(mpu)
    return _group_of_one() if group is None else group


def get_tensor_model_parallel_world_size() -> int:
    """The tensor-parallel size, or the pretended one."""
    if _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    return bwc_tensor_model_parallel_world_size(mpu)


def get_tensor_model_parallel_rank() -> int:
    """The tensor-parallel rank, or the pretended one."""
    if _MPU_TENSOR_MODEL_PARALLEL_RANK is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_RANK
    return bwc_tensor_model_parallel_rank(mpu)


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first rank in the tensor-parallel group."""
    return dist.get_global_rank(get_tensor_model_parallel_group(), 0)


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Pretend a tensor-parallel size; None ends it."""
    global _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = world_size


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Pretend a tensor-parallel rank; None ends it."""
    global _MPU_TENSOR_MODEL_PARALLEL_RANK
    _MPU_TENSOR_MODEL_PARALLEL_RANK = rank


def _get_model_parallel_group() -> Any:
    """The ranks that hold pieces of one model: tensor times pipeline parallel."""
    return mpu.get_model_parallel_group() if _has("get_model_parallel_group") else get_tensor_model_parallel_group()


def _get_model_parallel_world_size() -> int:
    """The number of ranks that hold pieces of one model."""
    if _has("get_model_parallel_world_size"):
        return int(mpu.get_model_parallel_world_size())
    return get_tensor_model_parallel_world_size()


def _get_model_parallel_rank() -> int:
    """This process's rank among those that hold pieces of its model."""
    if _has("get_model_parallel_rank"):
        return int(mpu.get_model_parallel_rank())
    return get_tensor_model_parallel_rank()


# -- public names -----------------------------------------------------------------------------------------------------

get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_group = _get_model_parallel_group
get_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = _get_model_parallel_rank
