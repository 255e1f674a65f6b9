"""What a parameter is at stage 3: a shard on every rank, and whole only while somebody needs it.

`cut_parameters` turns parameters into that, in place. While one is sharded its shape is `(0,)`, and
computing with it raises by name. `gather_unit`, `parameter_offload` (training) and
`gathered_parameters` (scripts) make them whole.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.parallel_map import OptimizerInstances
from deepspeed.comm.shard_ops import scatter_from_first
from deepspeed.runtime.module_hooks.parameter_reads import flat_values, plain_copy
from deepspeed.runtime.sharding.cut_rows import RowFiller
from deepspeed.runtime.sharding.fragments import Fragment, ParameterCutTable
from deepspeed.runtime.zero.parameters.guarded_writes import WholeValue, in_place_methods
from deepspeed.runtime.zero.parameters.shards import (
    ON_DEVICE,
    OwnShard,
    ShardedValue,
    ShardMemory,
    tell_saved,
)

_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # a descriptor of C's
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ids = itertools.count()
_placeholders: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

# What may be asked of a sharded parameter: what it is and where, and to travel as it is.
_ALLOWED = frozenset(
    {"__get__", "__set__", "__delete__", "__hash__", "__repr__", "__len__", "__reduce_ex__"}
    | {"numel", "nelement", "size", "dim", "ndimension", "element_size", "stride", "type"}
    | {"is_floating_point", "is_complex", "is_contiguous", "get_device", "data_ptr", "is_shared"}
    | {"storage", "untyped_storage", "_typed_storage", "requires_grad_", "retain_grad"}
    | {"register_hook", "register_post_accumulate_grad_hook", "has_names", "is_same_size"}
    | {"detach", "to", "cpu", "cuda", "half", "float", "double", "bfloat16", "clone", "contiguous"}
    | {"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "empty_like", "__dlpack__"}
    | {"full_like"}  # the state that torch.optim.Adagrad makes at once
)


class ZeroParamStatus(Enum):
    """Where a parameter is."""

    AVAILABLE = 1  # whole on this rank; entered when its gather is complete
    NOT_AVAILABLE = 2  # a shard on each rank; entered by cutting it, or when nobody needs it whole
    INFLIGHT = 3  # its gather has begun


class ZeroParamType(Enum):
    """Kinds that upstream tells apart; here there is one."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ReadsByHand(NamedTuple):
    """What makes parameters whole for scripts, and ends that."""

    hold: Callable[[Iterable[nn.Parameter]], None]
    let_go: Callable[[Iterable[nn.Parameter], bool], None]


_installed: list[ReadsByHand] = []  # whoever cuts parameters has imported it
# The groups that parameters were cut for since the process group was made, and what tells that.
_groups: dict[dist.Group, None] = {}
_world: list[Any] = []


def _note_group(group: dist.Group) -> None:
    world = dist.get_world_group()
    if not _world or _world[0] is not world:
        _world[:] = [world]
        _groups.clear()
    _groups[group] = None


def only_group() -> dist.Group:
    """The ranks that have every parameter ever cut, if there is one such group; the same on all of
    them: it depends on collectives alone.
    """
    is_current = _world and dist.is_initialized() and _world[0] is dist.get_world_group()
    return next(iter(_groups)) if is_current and len(_groups) == 1 else None


def install_reads(reads: ReadsByHand) -> None:
    """Let `all_gather()` and `partition()` be done by `reads`, which knows of collectives."""
    _installed[:] = [reads]


class ShardRecord:
    """What is known of one parameter of stage 3.

    Args:
        shape: Logical shape.
        shard: This rank's cut, 1-D, padding included; it may be on the host (`offload_param`).
        instances: Ranks that share it, and those that have other copies of it.
        made_in: The dtype that it was made in.
        device: Where it is while it is whole.

    Attributes:
        id: The same on all ranks, which cut parameters in the same order.
        unit: With whom it is gathered in training; None before an engine has it.
        readers: How many `all_gather()` and `GatheredParameters` have it whole in their memory.
        num_lent: How many scripts read what a unit has gathered.
        on_edit: Called when a script has changed the shard.
        is_running: Tells whether a forward or backward of the model runs.
        on_read: Called when a module's attribute is read while it is sharded.
        on_copy: Called with it and a deep copy that was made of it.
        is_read_by_iteration: Whether going over a module's parameters reads them.
        seen: What tells later whether it was written to since it became whole.
    """

    def __init__(
        self,
        shape: torch.Size,
        shard: torch.Tensor,
        instances: OptimizerInstances,
        made_in: torch.dtype,
        device: torch.device,
    ) -> None:
        self.id = next(_ids)
        self.shape = shape
        self.numel = shape.numel()
        self.shard = shard
        self.instances = instances
        self.made_in = made_in
        self.device = device
        self.name: str | None = None
        self.status = ZeroParamStatus.NOT_AVAILABLE
        self.unit: Any = None
        self.readers = 0
        self.persists = False
        self.num_lent = 0
        self.on_edit: Callable[[nn.Parameter], None] | None = None
        self.is_running: Callable[[], bool] = lambda: False
        self.on_read: Callable[[nn.Parameter], None] | None = None
        self.on_copy: Callable[[nn.Parameter, nn.Parameter], None] = lambda param, copied: None
        self.is_read_by_iteration = False
        self.active_modules: set[Any] = set()
        self.seen: tuple[int, int] = (0, 0)

    @property
    def label(self) -> str:
        return self.name or f"parameter {self.id} of shape {tuple(self.shape)}"

    @property
    def group(self) -> dist.Group:
        return self.instances.inside

    @property
    def table(self) -> ParameterCutTable:
        return ParameterCutTable.cut((self.numel,), dist.get_world_size(group=self.group))

    @property
    def own(self) -> Fragment:
        return self.table.fragment(0, dist.get_rank(group=self.group))

    @property
    def is_held(self) -> bool:
        """Whether a script has the parameter whole, in a block or by `all_gather()`."""
        return bool(self.readers or self.num_lent)

    @property
    def loses_writes(self) -> bool:
        """Whether what is written to the parameter now is lost. Modules may write to what they
        compute with while they run; whoever lets it go then looks for that.
        """
        is_whole = self.status is ZeroParamStatus.AVAILABLE
        return is_whole and self.unit is not None and not (self.is_held or self.is_running())

    def own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """Slice what this rank owns of a whole parameter, 1-D without padding."""
        own = self.own
        return whole.reshape(-1)[own.param_start : own.param_start + own.numel]

    def before_write(self) -> None:
        """Let nothing copy the shard any more, which the host is about to write to."""
        if self.unit is not None:
            self.unit.before_write()

    def write(self, whole: torch.Tensor) -> None:
        self.before_write()
        own = self.own_part(whole)
        self.shard[: own.numel()].copy_(own)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None: a saved parameter is an ordinary one."""
        return type(None), ()


class ZeroParameter(nn.Parameter):
    """A parameter of stage 3; this class while it is whole. `cut_parameters` makes it."""

    _zero3: ShardRecord

    ds_id = property(attrgetter("_zero3.id"))
    ds_shape = property(attrgetter("_zero3.shape"))
    ds_numel = property(attrgetter("_zero3.numel"))
    ds_status = property(attrgetter("_zero3.status"))
    ds_persist = property(attrgetter("_zero3.persists"), doc="Whether it stays whole between steps")
    ds_process_group = property(attrgetter("_zero3.group"))
    # Kept for clients that clear it; nothing here reads it.
    ds_active_sub_modules = property(attrgetter("_zero3.active_modules"))

    @property
    def data(self) -> torch.Tensor:
        """Its elements; where what is written to them would be lost, writing raises."""
        value: torch.Tensor = _GET_DATA(self)
        record = vars(self).get("_zero3")
        if record is None or not record.loses_writes:
            return value
        return WholeValue.of(value, functools.partial(_unkept, record))

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        record = vars(self).get("_zero3")
        if record is not None and record.loses_writes:
            _refuse_other_values(self, values)
        _SET_DATA(self, values)

    def _use_count(self) -> int:
        """Raise for `torch.utils.swap_tensors`, which asks this before it swaps."""
        raise RuntimeError(
            f"torch.utils.swap_tensors: {self._zero3.label} is a parameter of ZeRO stage 3, whose "
            "units would go on with the other tensor: write values inside `with "
            "deepspeed.zero.GatheredParameters(param, modifier_rank=...)` instead, and leave "
            "torch.__future__.set_swap_module_params_on_conversion off"
        )

    @property
    def ds_tensor(self) -> torch.Tensor:
        """This rank's shard, 1-D and padded. Setting its `.data` writes to it and to the master."""
        return OwnShard.of(self._zero3.shard, self._set_shard)

    @torch.no_grad()
    def _set_shard(self, values: torch.Tensor) -> None:
        """Write values here; the padding stays zero. The next outermost forward gathers it."""
        record = self._zero3
        told = f"{record.label}.ds_tensor.data = ...:"
        if values.shape != record.shard.shape:
            raise ValueError(
                f"{told} it has {tuple(values.shape)} elements, the shard "
                f"{tuple(record.shard.shape)}; to move state off the device use "
                "engine.offload_states()"
            )
        if record.status is not ZeroParamStatus.NOT_AVAILABLE:
            raise RuntimeError(
                f"{told} the parameter is whole, and would keep its old value: change it inside "
                "`with deepspeed.zero.GatheredParameters(param, modifier_rank=0)`, or make it "
                "sharded first (engine.empty_partition_cache() after a forward)"
            )
        if record.unit is not None:
            if record.unit.resources.are_away:
                raise RuntimeError(f"{told} it is off the device: call reload_states() first")
            # Copies inside a node stay for now: whether there are any is the same on all ranks.
            record.unit.resources.before_write()
        numel = record.own.numel
        record.shard[:numel].copy_(values[:numel])
        if record.on_edit is not None:
            record.on_edit(self)

    @property
    def ds_param_type(self) -> ZeroParamType:
        return ZeroParamType.PARTITIONED

    def partition_numel(self) -> int:
        """Elements of a shard, padding included."""
        return self._zero3.table.cuts[0]

    def all_gather(
        self,
        param_list: Sequence[nn.Parameter] | None = None,
        async_op: bool = False,
        hierarchy: int = 0,
    ) -> None:
        """Make it (or those of `param_list`) whole until `partition()`. All ranks call it."""
        _installed[0].hold([self] if param_list is None else param_list)

    def partition(
        self,
        param_list: Sequence[nn.Parameter] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
    ) -> None:
        """End `all_gather()`; with `has_been_updated` each rank keeps its part of what is whole."""
        chosen = [self] if param_list is None else param_list
        _installed[0].let_go(chosen, has_been_updated)

    def ds_summary(self, slice_shape: bool = False, use_debug_name: bool = False) -> dict[str, Any]:
        """What reports show."""
        record = self._zero3
        return {
            "id": record.label if use_debug_name else record.id,
            "status": record.status.name,
            "numel": self.numel(),
            "ds_numel": record.numel,
            "shape": tuple(self.shape),
            "ds_shape": tuple(record.shape),
            "requires_grad": self.requires_grad,
            "persist": record.persists,
            "ds_tensor.shape": tuple(record.shard.shape),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy a whole one as an ordinary parameter, a sharded one as a shard; refuse one that is
        sharded and an engine's, whose hooks a module's copy would share.
        """
        if id(self) in memo:
            return plain_copy(self, memo)
        if self._zero3.status is ZeroParamStatus.AVAILABLE:
            copied = plain_copy(self, memo)
        elif self._zero3.unit is not None:
            raise RuntimeError(refusal(self._zero3, "deepcopy"))
        else:
            copied = memo[id(self)] = _sharded_copy(self)
        self._zero3.on_copy(self, copied)
        return copied


def refusal(record: ShardRecord, what: str) -> str:
    """Say what who computes with a sharded parameter is told."""
    return (
        f"{what}: {record.label} is sharded (ZeRO stage 3), so its elements are not here. Read or "
        "change it inside `with deepspeed.zero.GatheredParameters(param, modifier_rank=...)`; a "
        "module that uses another module's parameter reads it as an attribute inside its forward"
    )


def _unkept(record: ShardRecord, what: str) -> str:
    """Say what who writes to a whole parameter outside of any block is told."""
    return (
        f"{what}: {record.label} shows its elements for reading (ZeRO stage 3); they are gathered "
        "anew, and what is written to them would be lost. Change it inside `with "
        "deepspeed.zero.GatheredParameters(param, modifier_rank=...)`"
    )


def _refuse_conversion(record: ShardRecord, dtype: torch.dtype) -> None:
    raise RuntimeError(
        f"{record.label} cannot become {dtype}: an engine trains it in {record.shard.dtype} (ZeRO "
        "stage 3). Convert the model before deepspeed.initialize, or name the precision in the "
        "configuration (bf16, fp16)"
    )


def _refuse_other_values(param: nn.Parameter, values: torch.Tensor) -> None:
    """Refuse `param.data = values` for a whole parameter that would not keep them. A module on its
    way to another device, and back, has the same ones in other memory.
    """
    record, own = record_of(param), whole_value(param)
    if values.dtype != own.dtype:
        _refuse_conversion(record, values.dtype)
    if values.device == own.device and not torch.equal(values, own):
        raise RuntimeError(_unkept(record, ".data = ..."))


def _converted(record: ShardRecord, dtype: torch.dtype) -> bool:
    """Let the shard take a new dtype. `nn.Module.to` and its kin ask before they replace a
    parameter's data by converted data; True: the parameter stays the object that it is.
    """
    if record.shard.dtype != dtype:
        if record.unit is not None:
            _refuse_conversion(record, dtype)
        record.shard, record.made_in = record.shard.to(dtype), dtype
    return True


def _guard(name: str) -> Callable[..., object]:
    """Make a method of parameters that writes where that is kept, and raises elsewhere."""
    write = getattr(torch.Tensor, name)
    # torch's own functions have advice of their own in place of a RuntimeError of `set_`.
    error = TypeError if name == "set_" else RuntimeError

    @functools.wraps(write)
    def method(self: ZeroParameter, *args: object, **kwargs: object) -> object:
        record = vars(self).get("_zero3")
        if record is not None and record.loses_writes:
            raise error(_unkept(record, name))
        if name == "set_" and isinstance(self, ShardedParameter):
            # torch does not ask `__torch_function__` for this one.
            raise error(refusal(self._zero3, name))
        return write(self, *args, **kwargs)

    return method


for _name in in_place_methods():
    setattr(ZeroParameter, _name, _guard(_name))


class ShardedParameter(ZeroParameter):
    """A parameter of stage 3 while it is sharded: it says what it is, but cannot be used."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Raise, by name, for all that would compute with the placeholder, or write to it."""
        name = getattr(func, "__name__", str(func))
        if name == "_has_compatible_shallow_copy_type" and isinstance(args[0], ShardedParameter):
            return _converted(args[0]._zero3, args[1].dtype)
        if name == "__set__" and func == _SET_DATA:
            if args[1].numel():
                name = ".data = ..."
            # The device is the engine's choice: a module on its way to another leaves shards.
            args = (args[0], placeholder(args[1].dtype, args[0]._zero3.device))
        if name not in _ALLOWED:
            # torch.nn.init passes by keyword.
            given = flat_values((*args, *(kwargs or {}).values()))
            found = (arg for arg in given if isinstance(arg, ShardedParameter))
            sharded = next(found, None)
            if sharded is not None and sharded._zero3.numel:
                raise RuntimeError(refusal(sharded._zero3, name))
        with torch._C.DisableTorchFunctionSubclass():
            result: Any = func(*args, **(kwargs or {}))
        if (name == "detach" or func == _GET_DATA) and args[0]._zero3.numel:
            result = result.as_subclass(ShardedValue)
            result._refuse = functools.partial(refusal, args[0]._zero3)
        return result

    def __reduce_ex__(self, protocol: object) -> Any:
        if self._zero3.numel:
            tell_saved()
        return super().__reduce_ex__(protocol)

    def ds_was_read(self) -> None:
        if self._zero3.on_read is not None:
            self._zero3.on_read(self)

    def ds_was_listed(self) -> None:
        """Be read too where a constructor goes over parameters."""
        if self._zero3.is_read_by_iteration:
            self.ds_was_read()


def is_zero_param(parameter: object) -> bool:
    """Whether it is a parameter of stage 3."""
    return isinstance(parameter, ZeroParameter) and hasattr(parameter, "_zero3")


def record_of(param: torch.Tensor) -> ShardRecord:
    """Return what is known of a parameter; callers have asked `is_zero_param`, or cut it."""
    record: ShardRecord = param._zero3  # type: ignore[attr-defined]  # set by cut_parameters
    return record


def placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make what a sharded parameter shows: no elements."""
    key = (dtype, device)
    if key not in _placeholders:
        with torch.inference_mode(False):
            _placeholders[key] = torch.empty(0, dtype=dtype, device=device)
    return _placeholders[key]


def whole_value(param: nn.Parameter) -> torch.Tensor:
    """Return the elements of a whole parameter, for who writes to shards too, or only reads."""
    value: torch.Tensor = _GET_DATA(param)
    return value


def show(param: nn.Parameter, whole: torch.Tensor) -> None:
    """Let a parameter be whole, with its elements in `whole`."""
    param.__class__ = ZeroParameter
    _SET_DATA(param, whole)
    record_of(param).status = ZeroParamStatus.AVAILABLE
    note_value(param)


def note_value(param: nn.Parameter) -> None:
    """Remember what a whole parameter shows: its shards say so, or it is let go on purpose."""
    record_of(param).seen = (param._version, param.data_ptr())


def was_written(param: nn.Parameter) -> bool:
    """Whether a whole parameter was written (not by `.data`), or moved, since `note_value`."""
    return record_of(param).seen != (param._version, param.data_ptr())


def hide(param: nn.Parameter) -> None:
    """Let a parameter be sharded: nobody on this rank needs it whole."""
    record = record_of(param)
    param.__class__ = ZeroParameter
    _SET_DATA(param, placeholder(record.shard.dtype, record.device))
    record.status = ZeroParamStatus.NOT_AVAILABLE
    param.__class__ = ShardedParameter


def _sharded_copy(param: ZeroParameter) -> nn.Parameter:
    of = param._zero3
    # A tensor of its own: what is made of one tensor counts changes together.
    empty = torch.empty(0, dtype=of.shard.dtype, device=of.device)
    copied = nn.Parameter(empty, param.requires_grad)
    record = ShardRecord(of.shape, of.shard.clone(), of.instances, of.made_in, of.device)
    record.on_read, record.is_read_by_iteration = of.on_read, of.is_read_by_iteration
    record.on_copy = of.on_copy
    copied._zero3 = record  # type: ignore[attr-defined]  # the record is dynamic
    hide(copied)
    return copied


def become_plain(param: nn.Parameter, whole: torch.Tensor) -> None:
    """Undo `cut_parameters`: make it an ordinary parameter with these elements."""
    param.__class__ = ZeroParameter
    _SET_DATA(param, whole)
    del param._zero3  # type: ignore[attr-defined]  # set by cut_parameters
    param.__class__ = nn.Parameter


@torch.no_grad()
def cut_parameters(
    params: Iterable[nn.Parameter],
    instances: OptimizerInstances,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    memory: ShardMemory = ON_DEVICE,
) -> None:
    """Cut whole parameters, in place, of which the values are those of the first rank, and which
    are rounded to `dtype`, if any; those that are cut already are left alone. All ranks of all
    instances call it. `device`: where they are when they are whole, if not where they are now.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for param in dict.fromkeys(params):
        if is_zero_param(param):
            continue
        if param.device.type == "meta":
            raise ValueError(
                f"ZeRO stage 3: a parameter of shape {tuple(param.shape)} is on the meta device "
                "and has no value to be cut; make the model without it (deepspeed.zero.Init keeps "
                "only shards), or give it memory there, by to_empty"
            )
        wanted = dtype if dtype is not None and param.is_floating_point() else param.dtype
        kinds.setdefault((wanted, device or param.device), []).append(param)
    for (wanted, where), same in kinds.items():
        _cut(same, instances, wanted, where, memory)


def _cut(
    params: list[nn.Parameter],
    instances: OptimizerInstances,
    dtype: torch.dtype,
    device: torch.device,
    memory: ShardMemory,
) -> None:
    group, across = instances.inside, instances.across
    world, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
    _note_group(instances.everyone)
    table = ParameterCutTable.cut(tuple(param.numel() for param in params), world)
    rows = torch.empty(table.padded_numel, dtype=dtype, device=device)
    if rank == 0:
        RowFiller(table, rows).fill([param.data for param in params])
    shard = torch.empty(table.shard_numel, dtype=dtype, device=device)
    scatter_from_first(rows, shard, group)
    if across is not None and shard.numel():
        # Each instance has had the values of its own first rank.
        dist.broadcast(shard, src=dist.get_global_rank(across, 0), group=across)
    shard = memory.place(shard, device)
    for index, param in enumerate(params):
        start = table.cut_starts[index]
        own = shard[start : start + table.cuts[index]]
        param._zero3 = ShardRecord(param.shape, own, instances, param.dtype, device)  # type: ignore[attr-defined]  # the record is dynamic
        hide(param)
