"""`zero.Init`: models whose parameters are cut as they are made.

The parameters that a module made are cut when its constructor returns. The constructor itself works
on whole parameters, and so does one that reads those of the modules that it made: what it reads is
gathered, and cut again when it returns. So the same code draws the same random numbers and gives
the same weights as without it, those of rank 0; parameters are rounded to `dtype` when they are
cut, for the same reason. Experts of `deepspeed.moe` are cut for the ranks that hold the same ones,
with the weights that the first of these has drawn; see `own_draws`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import DATA_BEFORE_EXPERTS
from deepspeed.comm.initialization import ensure_distributed
from deepspeed.comm.parallel_map import OptimizerInstances, split_into_instances
from deepspeed.ops.aio.handle import AsyncIOHandle
from deepspeed.ops.state_files import StateFiles
from deepspeed.runtime.config_models.sizes import instances_at_stage_3
from deepspeed.runtime.config_models.source import load_config
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.module_hooks.parameter_reads import watch_reads
from deepspeed.runtime.sharding.group import expert_group_of
from deepspeed.runtime.zero.gathering.gathered_parameters import (
    hold_whole,
    let_go,
    ordinary_copies,
    publish,
)
from deepspeed.runtime.zero.parameters.agreement import agree_on_parameters, described
from deepspeed.runtime.zero.parameters.own_draws import KEPT_NUMEL, OwnDraws, fingerprint
from deepspeed.runtime.zero.parameters.shards import ShardMemory
from deepspeed.runtime.zero.parameters.zero_parameter import (
    cut_parameters,
    is_zero_param,
    record_of,
)
from deepspeed.utils import groups

_DIFFERENT = "zero.Init: ranks make different parameters"
_STAGE_3 = ("3", "3.0", "auto", "None")
_Arguments = ParamSpec("_Arguments")


class _Construction:
    """The constructors that run, and what they have read.

    Attributes:
        running: Modules whose constructors run, innermost last.
        read: What each of them, or a function that `Module.apply` calls, has had gathered.
        contexts: The `Init`s that are entered, innermost last.
        draws: What this rank has drawn otherwise than the first.
        copies: Deep copies of cut parameters, to be cut: whether what was drawn for them is lost.
    """

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.read: list[list[nn.Parameter]] = []
        self.contexts: list[Init] = []
        self.draws = OwnDraws()
        self.copies: dict[nn.Parameter, bool] = {}

    def on_read(self, param: nn.Parameter) -> None:
        """Make a parameter whole that has been cut, and is read as an attribute."""
        if self.read:
            hold_whole([param])
            # Constructors fill what they know: numbers drawn in half precision are others.
            drawn = self.draws.of(param)
            param.data = (param.data if drawn is None else drawn.to(param.device)).to(
                record_of(param).made_in
            )
            self.read[-1].append(param)

    def keep_drawn(self, params: Iterable[nn.Parameter]) -> None:
        """Keep values that are others than the first rank's, of whole parameters."""
        for param in params if self.contexts and dist.get_rank() > 0 else ():
            if expert_group_of(param) is None:
                self.draws.keep(param, param.data)

    def on_copy(self, param: nn.Parameter, copied: nn.Parameter) -> None:
        """Follow a deep copy: a shard too, or whole, and who runs now is to have it cut."""
        if is_zero_param(copied):
            self.draws.follow(param, copied)
        elif self.running:
            self.copies[copied] = self.draws.has_lost(param)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let what is read inside be whole until the end, and changes to it count."""
        self.read.append([])
        try:
            yield
        finally:
            read = self.read.pop()
            if read:
                for param in read:
                    self.draws.forget(param)
                publish(read, keep=self.keep_drawn)
                let_go(read)

    def construct(self, module: nn.Module, init: Callable[[], None]) -> None:
        self.running.append(module)
        try:
            with self.reading():
                init()
        finally:
            self.running.pop()
        if self.contexts and self.copies:
            for below in module.modules():
                if any(param in self.copies for param in dict.values(below._parameters)):
                    self.contexts[-1].cut_own(below)
        if self.contexts:
            self.contexts[-1].cut_own(module)


_construction = _Construction()


def _with_end(
    init: Callable[Concatenate[nn.Module, _Arguments], None],
) -> Callable[Concatenate[nn.Module, _Arguments], None]:
    @functools.wraps(init)
    def constructor(self: nn.Module, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        if _construction.running and _construction.running[-1] is self:
            init(self, *args, **kwargs)  # of a base class, called by that of the class
        else:
            _construction.construct(self, lambda: init(self, *args, **kwargs))

    return constructor


def _apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """Stand for `Module.apply`: what `fn` reads of one module is cut again before the next."""
    for child in self.children():
        child.apply(fn)
    with _construction.reading():
        fn(self)
    return self


def _to_empty(
    self: nn.Module, *, device: torch.device | str | int, recurse: bool = True
) -> nn.Module:
    """Stand for `Module.to_empty`: what a constructor left on the meta device has memory now, and
    is cut. It is zero: all ranks have to have the same.
    """
    _patches.to_empty(self, device=device, recurse=recurse)
    for below in self.modules():
        for param in dict.values(below._parameters):
            if param is not None and not is_zero_param(param) and not is_lazy(param):
                param.data.zero_()
        _construction.contexts[-1].cut_own(below)
    return self


class _Patches:
    """Constructors of all module classes, defined meanwhile too, `Module.apply` and `to_empty`."""

    def __init__(self) -> None:
        self._inits: list[tuple[type[nn.Module], Any]] = []
        self._apply: Any = None
        self.to_empty: Any = None

    def put(self) -> None:
        for cls in _subclasses(nn.Module):
            self._patch(cls)

        def on_subclass(cls: type[nn.Module], **kwargs: object) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)
            self._patch(cls)

        nn.Module.__init_subclass__ = classmethod(on_subclass)  # type: ignore[assignment, method-assign]  # it is a class method by nature
        self._apply, nn.Module.apply = nn.Module.apply, _apply  # type: ignore[assignment, method-assign]  # until `remove`
        self.to_empty, nn.Module.to_empty = nn.Module.to_empty, _to_empty  # type: ignore[assignment, method-assign]  # until `remove`
        ordinary_copies.begin()

    def _patch(self, cls: type[nn.Module]) -> None:
        init = cls.__dict__.get("__init__")
        if init is not None:
            self._inits.append((cls, init))
            cls.__init__ = _with_end(init)  # type: ignore[assignment, method-assign]  # until `remove`

    def remove(self) -> None:
        ordinary_copies.end()
        for cls, init in self._inits:
            cls.__init__ = init  # type: ignore[method-assign]  # what it was
        self._inits = []
        del nn.Module.__init_subclass__
        nn.Module.apply = self._apply  # type: ignore[method-assign]  # what it was
        nn.Module.to_empty = self.to_empty  # type: ignore[method-assign]  # what it was


_patches = _Patches()


def _subclasses(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    seen = {cls}
    waiting = [cls]
    while waiting:
        current = waiting.pop()
        yield current
        new = [below for below in current.__subclasses__() if below not in seen]
        seen.update(new)
        waiting.extend(new)


def shutdown_init_context() -> None:
    """Inside `Init`, make modules as usual until `restore_init_context`; nothing outside of it."""
    if _construction.contexts:
        _patches.remove()


def restore_init_context() -> None:
    """End `shutdown_init_context`."""
    if _construction.contexts:
        _patches.put()


class Init:
    """Inside the `with` block, modules keep only this rank's shards of their parameters; see
    module.

    All ranks make the same modules in it, or all raise RuntimeError, naming the first parameter
    that differs. Blocks may be nested, and the process group is initialized if nobody did.

    Args:
        module: A module that stands already, and is cut at once.
        data_parallel_group: Ranks that hold the parameters; None: all, or those of `mpu`.
        remote_device: "cpu" keeps shards on the host, "nvme" in files of the folder that the
            configuration's `offload_param.nvme_path` names; "none": on the accelerator; None: where
            `offload_param` says. The engine's configuration decides where they stay.
        pin_memory: Shards on the host are page-locked; the configuration's `pin_memory` counts too.
        config_dict_or_path, config: Configuration, of which only the stage, the precision,
            `offload_param`, `use_data_before_expert_parallelism`, and `mics_shard_size` or
            `num_optimizer_instances` are read; "auto" counts as not given. Below stage 3 the block
            does nothing, as with `enabled=False`.
        dtype: What floating-point parameters are rounded to; None: the configuration's, or none.
        zero_param_parallel_group, zero_quantized_weights, zero_quantized_nontrainable_weights,
            param_swapper: Not supported; DeepSpeedConfigError names them.
        sequence_data_parallel_group: Ranks that share parameters where sequences are split too.
        mem_efficient_linear, tensor_overrides: No effect: saved gathered weights take no memory,
            and only parameters are changed, when they are cut.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.Group = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: object = None,
        config: object = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: dist.Group = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: dist.Group = None,
        param_swapper: object = None,
        tensor_overrides: object = None,
    ) -> None:
        source = config_dict_or_path if config_dict_or_path is not None else config
        given = _mapping(source) if enabled else {}
        # One that names no stage counts.
        self.enabled = enabled and str(_zero_block(given).get("stage", 3)) in _STAGE_3
        if not self.enabled:
            return
        refused = {
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "param_swapper": param_swapper,
        }
        for name, value in refused.items():
            if value is not None and value is not False:
                raise DeepSpeedConfigError(
                    f"zero.Init({name}={value!r}) is not supported; leave it out"
                )
        if remote_device not in (None, "none", "cpu", "nvme"):
            raise DeepSpeedConfigError(
                f"zero.Init(remote_device={remote_device!r}) is not supported; use "
                '"cpu", "nvme" or None'
            )
        ensure_distributed(None)
        group = sequence_data_parallel_group or data_parallel_group
        if group is None and mpu is not None:
            group = mpu.get_data_parallel_group()
        self.instances = _instances(group if group is not None else dist.get_world_group(), given)
        self._data_before_experts = _is_on(given.get(DATA_BEFORE_EXPERTS))
        if dtype is None and source is not None:
            dtype = _configured_dtype(given)
        self.dtype = dtype
        self.device = torch.device(get_accelerator().current_device_name())
        self.memory = _shard_memory(remote_device, pin_memory, given)
        if module is not None:
            for below in module.modules():
                self.cut_own(below)

    def __enter__(self) -> Init:
        if self.enabled:
            if not _construction.contexts:
                _patches.put()
            _construction.contexts.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            _construction.contexts.pop()
            if not _construction.contexts:
                _construction.draws.clear()
                _construction.copies.clear()
                _patches.remove()

    @property
    def group(self) -> dist.Group:
        return self.instances.inside

    @property
    def num_partitions(self) -> int:
        return dist.get_world_size(group=self.group)

    def get_dp_process_group(self) -> dist.Group:
        return self.group

    def get_partition_dp_group(self, param: nn.Parameter) -> dist.Group:
        return self.group

    def get_partition_rank(self) -> int:
        return dist.get_rank(group=self.group)

    def cut_own(self, module: nn.Module) -> None:
        own = {
            param: name
            for name, param in dict.items(module._parameters)
            if param is not None and not is_zero_param(param) and not is_lazy(param)
            if param.device.type != "meta"
        }
        if own:
            kind = type(module).__name__
            shared_by = {param: self._sharers(param) for param in own}
            named = [
                (f"{name} of {kind}", described(param) + self._lost_of(param))
                for param, name in own.items()
            ]
            everyone, what = self.instances.everyone, f"zero.Init of {kind}"
            drawn = None if self.num_partitions == 1 else fingerprint(own)
            if not agree_on_parameters(named, everyone, what, _DIFFERENT, drawn):
                _construction.keep_drawn(own)
            for instances in dict.fromkeys(shared_by.values()):
                same = [param for param in own if shared_by[param] == instances]
                cut_parameters(same, instances, self.dtype, self.device, self.memory)
            for param in own:
                record = record_of(param)
                record.on_read, record.on_copy = _construction.on_read, _construction.on_copy
                record.is_read_by_iteration = True
                _construction.copies.pop(param, None)
        if any(is_zero_param(param) for param in dict.values(module._parameters)):
            watch_reads(module)

    @staticmethod
    def _lost_of(param: nn.Parameter) -> str:
        """Tell other ranks of an expert whose own weights are not here any more."""
        if expert_group_of(param) is None or not _construction.copies.get(param, False):
            return ""
        return (
            f", which this rank has drawn otherwise, before {KEPT_NUMEL} further elements: make "
            "the module that experts are copies of right before the layer, or with one seed,"
        )

    def _sharers(self, param: nn.Parameter) -> OptimizerInstances:
        """Find who shares a parameter: an expert those that hold the same ones, whose groups are
        made if they are not there. Collective over the world then.
        """
        name = expert_group_of(param)
        if name is None:
            return self.instances
        if self.instances.count > 1:
            raise DeepSpeedConfigError(
                "zero.Init with mics_shard_size or num_optimizer_instances "
                f"({self.instances.count} instances) and experts (group {name!r}) is not "
                "supported; leave it out"
            )
        here, size = groups.current(), name.removeprefix("ep_size_")
        own = dist.get_all_ranks_from_group(self.group)
        if sorted(here.replicas.ranks) != sorted(own) or not size.isdigit():
            raise DeepSpeedConfigError(
                f"zero.Init cuts for ranks {own}, but experts (group {name!r}) are shared among "
                f"{here.replicas.ranks} ({here}): give zero.Init no group, or the groups to use by "
                "deepspeed.utils.groups.initialize(mpu=...) before"
            )
        if name not in here.all_experts:
            here.make_experts(int(size), self._data_before_experts)
        return OptimizerInstances(here.experts(name).data.group)


def _instances(group: dist.Group, config: Mapping[str, Any]) -> OptimizerInstances:
    """Divide `group` as the configuration says. Collective over the world when first asked."""
    count = _number(config, "num_optimizer_instances", 1)
    size = _number(config, "mics_shard_size", -1)
    ranks = dist.get_world_size(group=group)
    return split_into_instances(group, instances_at_stage_3(count, size, ranks))


def configured_shard_size(source: object) -> int:
    """Read `mics_shard_size` of a configuration whose rest may be "auto"; 0 or less: none."""
    return _number(_mapping(source), "mics_shard_size", -1)


def _number(config: Mapping[str, Any], key: str, otherwise: int) -> int:
    """Read a number of `zero_optimization`; `otherwise` for "auto" and what is not there."""
    # startup: configuration models load pydantic.
    from deepspeed.runtime.config_models.base import plain_number

    number = plain_number(_zero_block(config).get(key))
    return int(number) if isinstance(number, (int, float)) else otherwise


def _zero_block(config: Mapping[str, Any]) -> Mapping[str, Any]:
    block = config.get("zero_optimization")
    return block if isinstance(block, Mapping) else {}


def _shard_memory(
    remote_device: str | None, pin_memory: bool, config: Mapping[str, Any]
) -> ShardMemory:
    block = _zero_block(config).get("offload_param")
    offload = block if isinstance(block, Mapping) else {}
    device = remote_device or offload.get("device")
    folder, files = offload.get("nvme_path"), None
    if device == "nvme":
        if folder is None:
            raise DeepSpeedConfigError(
                'zero.Init: parameters on "nvme" need zero_optimization.offload_param.nvme_path, a '
                "folder on the disk: add it to config_dict_or_path"
            )
        files = StateFiles(str(folder), AsyncIOHandle)
    is_pinned = pin_memory or _is_on(offload.get("pin_memory", bool(block)))
    return ShardMemory(device in ("cpu", "nvme"), is_pinned, files)


def _is_on(value: object) -> bool:
    """Whether a value means true; "auto" and what is not there do not."""
    # startup: configuration models load pydantic.
    from deepspeed.runtime.config_models.base import read_boolean

    try:
        return bool(read_boolean(value))
    except ValueError:
        return False


def _mapping(source: object) -> Mapping[str, Any]:
    if source is None:
        return {}
    return source if isinstance(source, Mapping) else load_config(source)


def _configured_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Find the precision that a configuration, of which the rest may be "auto", trains in."""

    def is_enabled(*names: str) -> bool:
        blocks = (config.get(name) for name in names)
        return any(isinstance(block, Mapping) and _is_on(block.get("enabled")) for block in blocks)

    if is_enabled("bf16", "bfloat16"):
        return torch.bfloat16
    return torch.float16 if is_enabled("fp16") else torch.float32
