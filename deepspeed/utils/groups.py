"""Which ranks share what: data-, tensor-, model-, sequence- and expert-parallel groups.

The answers come, first match, from an external `mpu` with Megatron's getters
(`deepspeed.initialize(mpu=...)` stores it in ``groups.mpu``), from a torch DeviceMesh with axes
``data_parallel`` and ``sequence_parallel`` (``groups.mesh_device``), or are those of plain data
parallelism: one data group of all ranks, everything else of size 1.

Groups of our own are made once and kept; they are forgotten with the process group they were made
in. Making one is collective over the world, so the first question for a tensor- or model-parallel
group must be asked on all ranks.
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
    """Use ``mpu`` for all questions from now on, and make the expert groups of an ``ep_size`` above
    1 (collective over the world).

    Raises:
        ValueError: ``ep_size`` does not divide the ranks that can share experts.
    """
    globals()["mpu"] = mpu
    if ep_size != 1:
        _create_expert_and_data_parallel(ep_size)


def reset() -> None:
    """Forget the mpu, the mesh, the pretended ranks and all groups."""
    global \
        mpu, \
        mesh_device, \
        _cache_world, \
        _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE, \
        _MPU_TENSOR_MODEL_PARALLEL_RANK
    mpu = None
    mesh_device = None
    _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = None
    _MPU_TENSOR_MODEL_PARALLEL_RANK = None
    _cache.clear()
    _cache_world = None


def _make_mesh(data: int, sequence: int) -> Any:
    """All ranks as `data` rows of `sequence` ranks that share sequences. Collective over the world
    when first asked.

    Raises:
        ValueError: They are not all ranks.
    """
    world = dist.get_world_size()
    if data * sequence != world:
        raise ValueError(
            f"{data} data-parallel times {sequence} sequence-parallel ranks are {data * sequence}, "
            f"but there are {world} ranks: make mesh_param=(data parallel, sequence parallel), or "
            "the keys data_parallel_size and sequence_parallel_size, match"
        )
    axes = (DATA_AXIS, SEQUENCE_AXIS)
    return _made_once(
        ("mesh", data, sequence), lambda: dist.initialize_mesh_device((data, sequence), axes)
    )


def _use_mesh(mesh: Any) -> None:
    """Take the data- and sequence-parallel groups of ``mesh`` from now on.

    Raises:
        ValueError: There is an mpu already, which would be asked first, or the mesh has not both
            axes.
    """
    if mpu is not None:
        raise ValueError(
            "a sequence-parallel mesh beside an mpu: the mpu says which ranks share what; give one "
            "of them"
        )
    missing = {DATA_AXIS, SEQUENCE_AXIS} - set(mesh.mesh_dim_names or ())
    if missing:
        raise ValueError(f"the mesh has axes {mesh.mesh_dim_names}; {sorted(missing)} missing")
    globals()["mesh_device"] = mesh


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
    """Make a group of each list and return this rank's; every rank passes the same lists, in which
    each rank occurs once.

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


# -- data parallel ---------------------------------------------------------------------------------


def _get_data_parallel_group() -> Any:
    """The ranks that hold the same model (piece) and see different data."""
    if mpu is not None and not _knows_sequences_only():
        return _from_mpu("get_data_parallel_group")
    if mpu is not None:
        return _data_group_beside_sequences()
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


# -- optimizer instances: replicas of the sharded optimizer state inside the data-parallel group ---


@dataclass(frozen=True)
class OptimizerInstances:
    """This rank's place in a data-parallel group of D ranks that is split into `count` instances of
    D / count consecutive ranks.

    Attributes:
        inside: The ranks of this instance; each owns one shard.
        across: The ranks that own the same shard, one of each instance; None if there is one
            instance.
        index: Which instance this rank is in.
        count: How many there are.
    """

    inside: Any
    across: Any = None
    index: int = 0
    count: int = 1


def _get_optimizer_instances(count: int) -> OptimizerInstances:
    """The ranks that share dense parameters as `count` instances. Collective over the world when
    first asked.

    Raises:
        ValueError: The group cannot be split evenly.
    """
    whole = _get_sequence_data_parallel_group()
    if count == 1:
        return OptimizerInstances(whole)
    own = tuple(sorted(dist.get_all_ranks_from_group(whole)))  # as new_group will number them
    if count < 1 or len(own) % count:
        raise ValueError(
            f"{len(own)} data-parallel ranks cannot be split into {count} optimizer instances of "
            "equal size"
        )
    return _made_once(("instances", own, count), lambda: _make_instances(own, count))


def _make_instances(own: tuple[int, ...], count: int) -> OptimizerInstances:
    size = len(own) // count
    inside, across = [], []
    for ranks in _all_rank_tuples(own):
        inside += [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]
        across += [list(ranks[position::size]) for position in range(size)]
    return OptimizerInstances(
        _own_group(inside), _own_group(across), own.index(dist.get_rank()) // size, count
    )


def _all_rank_tuples(own: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every such group of the world, `own` being this rank's, in one order on all ranks."""
    world = dist.get_world_size()
    if len(own) == world:
        return [own]
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, own)
    return sorted({tuple(ranks) for ranks in everywhere})


# -- sequence parallel -----------------------------------------------------------------------------


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
        "No sequence parallel group found: pass deepspeed.initialize(mpu=...) with "
        f"get_sequence_parallel_group(), or mesh_param with an axis {SEQUENCE_AXIS!r}"
    )


def _knows_sequences_only() -> bool:
    """Whether the mpu has sequence groups and no data groups, as that of
    `UlyssesSPAttentionHF.register_with_transformers`.
    """
    known = _has("get_sequence_parallel_group") and not _has("get_data_parallel_group")
    return known and _get_model_parallel_world_size() == 1


def _data_group_beside_sequences() -> Any:
    """The ranks at this rank's place of their sequence groups. Collective over the world when first
    asked.
    """
    own = tuple(dist.get_all_ranks_from_group(_get_sequence_parallel_group()))
    return _made_once(("beside", own), lambda: _own_group(_data_ranks_beside(own)))


def _data_ranks_beside(own: tuple[int, ...]) -> list[list[int]]:
    sequences = _all_rank_tuples(own)
    sizes = {len(ranks) for ranks in sequences}
    if len(sizes) != 1:
        raise ValueError(
            f"the mpu's sequence-parallel groups have different sizes, {sorted(sizes)}; give them "
            "all the same size"
        )
    return [list(ranks) for ranks in zip(*sequences, strict=True)]


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


# -- expert parallel: who holds different experts, and who holds the same ones ---------------------


@dataclass(frozen=True)
class ExpertGroups:
    """This rank's two groups for experts that are spread over `ep_size` ranks.

    Together they cover the ranks whose tokens an expert's gradient sums over: exactly those over
    which dense gradients are reduced, times the tensor-parallel ranks where these hold different
    tokens of one batch (experts that are not themselves tensor parallel).

    Attributes:
        expert: Ranks that hold different experts and exchange tokens; `ep_size` of them.
        data: Ranks that hold the same experts; their gradients are reduced and their optimizer
            state is sharded here.
        data_first: Neighbouring ranks hold the same experts (else: different ones).
        sharded: The experts are tensor parallel.
    """

    expert: Any
    data: Any
    data_first: bool
    sharded: bool


def _all_expert_groups() -> dict[str, ExpertGroups]:
    """The expert groups made in the present world, by name."""
    return _made_once("expert groups", dict)


def _expert_groups(group_name: str) -> ExpertGroups:
    """The groups of this name.

    Raises:
        KeyError: They are not made yet.
    """
    made = _all_expert_groups()
    if group_name not in made:
        raise KeyError(
            f"no expert groups {group_name!r} (made: {sorted(made) or 'none'}): "
            "deepspeed.initialize makes them for the MoE layers of the model; without an engine "
            "call set_deepspeed_parallelism() of the layer on all ranks"
        )
    return made[group_name]


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """Make the groups "ep_size_N" of experts that are not tensor parallel, once. Collective over
    the world.

    Args:
        expert_parallel_size_: Number of ranks over which one set of experts is spread.
        use_data_before_expert_parallel_: Neighbouring ranks hold the same experts; by default they
            hold different ones.

    Raises:
        ValueError: The ranks cannot be split so, or were split otherwise under this name.
    """
    _create_expert_groups(expert_parallel_size_, use_data_before_expert_parallel_, sharded=False)


def _create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: Any, use_data_before_expert_parallel_: bool = False
) -> None:
    """`_create_expert_and_data_parallel` for experts that are tensor parallel as ``mpu`` says;
    ``mpu`` is used from now on.
    """
    globals()["mpu"] = mpu
    _create_expert_groups(expert_parallel_size_, use_data_before_expert_parallel_, sharded=True)


def _create_expert_groups(ep_size: int, data_first: bool, sharded: bool) -> None:
    name, made = f"ep_size_{ep_size}", _all_expert_groups()
    if name not in made:
        expert_lists, data_lists = _expert_rank_lists(_expert_blocks(sharded), ep_size, data_first)
        made[name] = ExpertGroups(
            _shared_group(expert_lists), _shared_group(data_lists), data_first, sharded
        )
    present = made[name]
    if (present.data_first, present.sharded) != (data_first, sharded):
        raise ValueError(
            f"expert groups {name!r} were made with "
            f"use_data_before_expert_parallel_={present.data_first} and tensor-parallel "
            f"experts={present.sharded}, now asked for with {data_first} and {sharded}: all layers "
            "of this ep_size need one setting"
        )


def _expert_blocks(sharded: bool) -> list[tuple[int, ...]]:
    """The sets of ranks that can share one set of experts, in one order on all ranks; they
    partition the world.
    """
    own = tuple(sorted(dist.get_all_ranks_from_group(_get_sequence_data_parallel_group())))
    world = dist.get_world_size()
    if len(own) == world:
        return [own]
    tensor = dist.get_all_ranks_from_group(get_tensor_model_parallel_group())
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, (own, tensor))
    if sharded:
        return sorted({ranks for ranks, _ in everywhere})
    # Tensor ranks see the same tokens and each sends its part of them, so their experts' gradients
    # are parts of one sum.
    return sorted(
        {
            tuple(sorted(rank for peer in peers for rank in everywhere[peer][0]))
            for _, peers in everywhere
        }
    )


def _expert_rank_lists(
    blocks: list[tuple[int, ...]], ep_size: int, data_first: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks of all expert groups and of all expert-data groups.

    Raises:
        ValueError: ``ep_size`` does not divide a block.
    """
    runs: list[list[int]] = []
    strides: list[list[int]] = []
    for block in blocks:
        if ep_size < 1 or len(block) % ep_size:
            raise ValueError(
                f"ep_size={ep_size} does not divide the {len(block)} ranks that can share experts; "
                "choose a divisor"
            )
        step = len(block) // ep_size if data_first else ep_size
        runs += [list(block[start : start + step]) for start in range(0, len(block), step)]
        strides += [list(block[start::step]) for start in range(step)]
    return (strides, runs) if data_first else (runs, strides)


def _shared_group(rank_lists: list[list[int]]) -> Any:
    """This rank's group of `_own_group`, made once per partition: a communicator is expensive."""
    if len(rank_lists) == 1:
        return dist.get_world_group()
    if len(rank_lists) == dist.get_world_size():
        return _group_of_one()
    return _made_once(("ranks", tuple(map(tuple, rank_lists))), lambda: _own_group(rank_lists))


def _get_expert_parallel_group(group_name: str) -> Any:
    """The ranks that hold the different experts of "ep_size_N"."""
    return _expert_groups(group_name).expert


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    """All expert groups of this rank, by name."""
    return {name: made.expert for name, made in _all_expert_groups().items()}


def _get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    """The global ranks of the expert group."""
    return dist.get_all_ranks_from_group(_get_expert_parallel_group(group_name))


def _get_expert_parallel_world_size(group_name: str) -> int:
    """The number of ranks that hold different experts."""
    return dist.get_world_size(_get_expert_parallel_group(group_name))


def _get_expert_parallel_rank(group_name: str) -> int:
    """This process's rank among those that hold different experts."""
    return dist.get_rank(_get_expert_parallel_group(group_name))


def _get_expert_parallel_src_rank(group_name: str) -> int:
    """The global rank of the first rank of the expert group."""
    return dist.get_global_rank(_get_expert_parallel_group(group_name), 0)


def _get_expert_data_parallel_group(group_name: str) -> Any:
    """The ranks that hold the same experts of "ep_size_N" as this one."""
    return _expert_groups(group_name).data


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """All expert-data groups of this rank, by name."""
    return {name: made.data for name, made in _all_expert_groups().items()}


def _get_expert_data_parallel_group_ranks(group_name: str) -> list[int]:
    """The global ranks of the expert-data group."""
    return dist.get_all_ranks_from_group(_get_expert_data_parallel_group(group_name))


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    """The number of ranks that hold the same experts."""
    return dist.get_world_size(_get_expert_data_parallel_group(group_name))


def _get_expert_data_parallel_rank(group_name: str) -> int:
    """This process's rank among those that hold the same experts."""
    return dist.get_rank(_get_expert_data_parallel_group(group_name))


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    """The global rank from which the expert-data group takes its first weights."""
    return dist.get_global_rank(_get_expert_data_parallel_group(group_name), 0)


def _get_max_expert_size() -> int:
    """The largest expert-parallel size in use.

    Raises:
        KeyError: No expert groups are made.
    """
    sizes = [dist.get_world_size(made.expert) for made in _all_expert_groups().values()]
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
    return (
        mpu.get_model_parallel_group()
        if _has("get_model_parallel_group")
        else get_tensor_model_parallel_group()
    )


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


# -- public names ----------------------------------------------------------------------------------

get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_group = _get_model_parallel_group
get_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = _get_model_parallel_rank
