"""Master weights: a step sequence around a torch optimizer that updates flat fp32 shards instead of
the model's parameters.

Every parameter group is laid out flat and cut into shards (`sharding/`); each rank keeps masters,
moments and gradients of its own. How gradients get there is the business of the optimizers that
derive from `MasterWeightOptimizer`; how they are read is in `readable_masters`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.host_optimizer import HostOptimizer
from deepspeed.ops.whole_parameters import WholeParameterOptimizer
from deepspeed.runtime.gradients.norm import joined, local_squared_norm, reduce_squared_norm
from deepspeed.runtime.module_hooks.parameter_arrivals import ParameterArrivals
from deepspeed.runtime.optimizers.owner_steps import OwnerSteps
from deepspeed.runtime.optimizers.readable_masters import ReadableMasters
from deepspeed.runtime.optimizers.state_layout import OwnTensor, ParamRun, StateLayout
from deepspeed.runtime.optimizers.step_outcome import GradientScaling
from deepspeed.runtime.sharding.dealt_parameters import DealtParameters
from deepspeed.runtime.sharding.fragments import FragmentTable, round_robin_order
from deepspeed.runtime.sharding.group import ShardedGroup, expert_group_of_all
from deepspeed.runtime.sharding.publisher import Publisher
from deepspeed.utils import memory_names
from deepspeed.utils.tensor_fragment import logical_shape

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.zero import DeepSpeedZeroOffloadOptimizerConfig

# Every shard holds a multiple of this many elements; part of the checkpoint layout.
SHARD_ALIGNMENT = 2
# The same of each part of a shard in memory, where that is laid out otherwise: parts of two-byte
# elements then start at multiples of 16 bytes, which device collectives copy fastest.
PART_ALIGNMENT = 8


class ParamLink(NamedTuple):
    """How `deepspeed.utils.safe_get_*` finds a parameter's shard; set as `param._hp_mapping`."""

    optimizer: MasterWeightOptimizer
    group: int
    param_index: int

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickled as None: a saved module does not take the optimizer and its process groups
        along.
        """
        return type(None), ()


def in_memory(file_table: FragmentTable, sections: Sequence[Sequence[int]] | None) -> FragmentTable:
    """The layout in memory of a group whose layout in files is `file_table`: the same if it is one
    section (None), so that nothing is exchanged when state is saved or loaded.
    """
    if sections is None or len(sections) < 2:
        return file_table
    return FragmentTable.build(file_table.numels, file_table.num_shards, PART_ALIGNMENT, sections)


def _positions(
    params: Sequence[nn.Parameter], registration: Mapping[nn.Parameter, int]
) -> list[int]:
    """Positions of parameters in the model; those that are not the module's come last."""
    return [registration.get(param, len(registration) + i) for i, param in enumerate(params)]


def _forget_unused_state(optimizer: torch.optim.Optimizer) -> None:
    """Drop the state by parameters that some optimizers make at once (torch's Adagrad): masters
    take the parameters' place.

    Raises:
        ValueError: Steps have been taken, and would be forgotten.
    """
    state = getattr(optimizer, "state", {})
    for own in state.values():
        if isinstance(own, dict) and _is_used(own):
            raise ValueError(
                f"optimizer: {type(optimizer).__name__} has taken steps already, or has loaded "
                f"state ({', '.join(sorted(own))}), without which masters of parameters would "
                "begin: give initialize() a new one, and load state by engine.load_checkpoint(); "
                "or use zero_optimization.stage 0 in fp32"
            )
    state.clear()


def _is_used(own: dict[str, Any]) -> bool:
    if "step" in own:
        return float(own["step"]) > 0
    return any(isinstance(value, torch.Tensor) and bool(value.any()) for value in own.values())


class MasterWeightOptimizer(ReadableMasters):
    """fp32 master weights in flat groups around a torch optimizer.

    Every group of `init_optimizer` keeps its dictionary (schedulers hold on to it); its `params`
    become the owned flat master shard, or one master per parameter if `per_param` is set
    (optimizers that need shapes).

    Args:
        init_optimizer: Optimizer over model parameters; frozen ones are left out.
        param_names: Name of each parameter, in model order.
        shard_group: Ranks that share one copy of the dense masters; None if every rank owns
            everything. Experts are then shared by the ranks that hold the same ones.
        master_dtype: Dtype of masters and optimizer state.
        grad_dtype: Dtype in which owned gradients are accumulated.
        offload: Offload settings of the optimizer state, if on.
        round_robin: Deal parameters to shards in turn.
        per_param: Give the optimizer one tensor per parameter.
        gather_beside: Gather updated parameters while the next forward of this model runs, whose
            modules then wait for their own; None: before anything else. Where the device has no
            streams, there is nothing to run beside.
        sequence: See `StepSequence`.

    Raises:
        ValueError: If a group holds parameters of several dtypes, or dense ones and experts; or if
            the optimizer has taken steps already.

    Attributes:
        num_shards: How many ranks share the dense masters.
        shard_rank: This rank's place among them.
    """

    # Attributes that say how far the gradients of a window are.
    _window_marks: tuple[str, ...] = ()

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        *,
        shard_group: dist.Group = None,
        master_dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        offload: DeepSpeedZeroOffloadOptimizerConfig | None = None,
        round_robin: bool = False,
        per_param: bool = False,
        allgather_bucket_size: int = 500_000_000,
        allgather_partitions: bool = True,
        gather_beside: nn.Module | None = None,
        **sequence: Any,
    ) -> None:
        super().__init__(init_optimizer, **sequence)
        _forget_unused_state(init_optimizer)
        self.param_names = dict(param_names)
        self.shard_group = shard_group
        self.num_shards = 1 if shard_group is None else dist.get_world_size(group=shard_group)
        self.shard_rank = 0 if shard_group is None else dist.get_rank(group=shard_group)
        self.allgather_bucket_size = allgather_bucket_size
        self.allgather_partitions = allgather_partitions
        self.offload = offload
        self.cpu_offload = offload is not None
        self._round_robin = round_robin
        self._grad_slices: dict[tuple[int, bool], list[slice]] = {}
        self._made_publishers: list[Publisher] = []
        self._arrivals: ParameterArrivals | None = None
        if gather_beside is not None and not get_accelerator().resolves_data_dependency():
            self._arrivals = ParameterArrivals(gather_beside)
        registration = {param: position for position, param in enumerate(self.param_names)}
        self.groups: list[ShardedGroup] = []
        self.registration: list[list[int]] = []
        trained = [
            [param for param in param_group["params"] if param.requires_grad]
            for param_group in init_optimizer.param_groups
        ]
        kept = self._kept_on_device(trained)

        def add_group(params: Sequence[nn.Parameter], offload: bool) -> ShardedGroup:
            group = self._build_group(params, registration, master_dtype, grad_dtype, offload)
            self.groups.append(group)
            self.registration.append(_positions(group.params, registration))
            return group

        for param_group, params, first in zip(
            init_optimizer.param_groups, trained, kept, strict=True
        ):
            group = add_group(params[first:], self.cpu_offload)
            self._hand_to_optimizer(param_group, group, per_param)
        if any(kept):
            for params, first in zip(trained, kept, strict=True):
                add_group(params[:first], offload=False)
        self._per_param = per_param
        if isinstance(init_optimizer, WholeParameterOptimizer) and not per_param:
            init_optimizer.use_shards(
                {
                    group.masters[0]: DealtParameters(group, self.device, self._names(number))
                    for number, group in enumerate(self.groups)
                }
            )
        self._link_params()
        memory_names.register(self)

    # Construction

    def _kept_on_device(self, params: Sequence[Sequence[nn.Parameter]]) -> list[int]:
        """With offload, how many of the first parameters of each group stay on the device all the
        same: they form groups of their own (`groups`), as many, behind those that the wrapped
        optimizer updates.
        """
        return [0] * len(params)

    def _param_group_of(self, index: int) -> int:
        """Which parameter group of the optimizer `groups[index]` is of."""
        return index % len(self.param_groups)

    def _build_group(
        self,
        params: Sequence[nn.Parameter],
        registration: Mapping[nn.Parameter, int],
        master_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        offload: bool,
    ) -> ShardedGroup:
        expert_group = expert_group_of_all(params)
        replicas = self._replicas(expert_group)
        # Experts are on fewer ranks than dense parameters, so their state has fewer and larger
        # shards.
        shard_group = (
            self.shard_group if expert_group is None or self.shard_group is None else replicas
        )
        num_shards = 1 if shard_group is None else dist.get_world_size(group=shard_group)
        if self._round_robin:
            params = [params[i] for i in round_robin_order(len(params), num_shards)]
        dtypes = sorted({str(param.dtype) for param in params})
        if len(dtypes) > 1:
            raise ValueError(
                f"one optimizer group holds parameters of several dtypes ({', '.join(dtypes)}): "
                "cast the model to one dtype, or enable bf16/fp16 in the configuration so that the "
                "engine does"
            )
        alignment = SHARD_ALIGNMENT if shard_group is not None else 1
        file_table, table = self._tables(
            params, _positions(params, registration), num_shards, alignment
        )
        model_device = params[0].device if params else self.device
        pin = self.offload is not None and self.offload.pin_memory
        return self._group_of(
            params,
            table=table,
            shard=0 if shard_group is None else dist.get_rank(group=shard_group),
            file_table=file_table,
            master_dtype=master_dtype,
            grad_dtype=grad_dtype,
            device=torch.device("cpu") if offload else model_device,
            model_device=model_device,
            pin=pin,
            offload=offload,
            process_group=shard_group,
            replicas=replicas,
        )

    def _tables(
        self,
        params: Sequence[nn.Parameter],
        positions: Sequence[int],
        num_shards: int,
        alignment: int,
    ) -> tuple[FragmentTable, FragmentTable]:
        """Who owns which elements of a group's parameters, in files and in memory."""
        file_table = FragmentTable.build([param.numel() for param in params], num_shards, alignment)
        return file_table, in_memory(file_table, self._sections(params, positions, num_shards))

    def _sections(
        self, params: Sequence[nn.Parameter], positions: Sequence[int], num_shards: int
    ) -> Sequence[Sequence[int]] | None:
        """The sections in which a group lies in memory, as indices of `params`; None: as in files.

        Args:
            params: Of the group.
            positions: Their positions in the model.
            num_shards: How many ranks share it.
        """
        return None

    def _group_of(self, params: Sequence[nn.Parameter], **layout: Any) -> ShardedGroup:
        """The buffers of a group; `layout` as `ShardedGroup` takes it."""
        return ShardedGroup(params, **layout)

    @staticmethod
    def _hand_to_optimizer(
        param_group: dict[str, Any], group: ShardedGroup, per_param: bool
    ) -> None:
        if per_param:
            group.masters = [nn.Parameter(view) for view in group.param_views(group.master)]
        param_group["params"] = group.masters

    def _names(self, group_index: int) -> list[str]:
        """Of the parameters of a group."""
        return [
            self.param_names.get(param, f"unnamed.{group_index}.{index}")
            for index, param in enumerate(self.groups[group_index].params)
        ]

    def _link_params(self) -> None:
        for group_index, group in enumerate(self.groups):
            for index, param in enumerate(group.params):
                param._hp_mapping = ParamLink(self, group_index, index)  # type: ignore[attr-defined]  # the link is dynamic

    def _local_sum(self, param: torch.Tensor) -> torch.Tensor | None:
        """Where this rank's sum for `param` lies."""
        if self.accumulator is None:
            return param.grad
        link = param._hp_mapping  # type: ignore[attr-defined]  # set by MasterWeightOptimizer
        return self.accumulator.views[link.group][link.param_index]

    def local_gradient(self, param: torch.Tensor) -> torch.Tensor:
        """See base class."""
        accumulated = self._local_sum(param) if hasattr(param, "_hp_mapping") else None
        return super().local_gradient(param) if accumulated is None else accumulated

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """The owned master shard of each group."""
        return [group.master for group in self.groups]

    # Norm

    def _norm_grads(self, group_index: int, counted: bool = True) -> list[torch.Tensor]:
        """The owned gradients of a group that count in the norm on this rank, or those that another
        rank counts.
        """
        group = self.groups[group_index]
        if self._counts_in_norm is None:
            return [group.grad] if counted else []
        key = (group_index, counted)
        if key not in self._grad_slices:
            owned = group.table.of_shard(group.shard_rank)
            chosen = (
                fragment
                for fragment in owned
                if self._counts_in_norm(group.params[fragment.param]) is counted
            )
            ranges = joined(
                (fragment.shard_start, fragment.shard_start + fragment.numel) for fragment in chosen
            )
            self._grad_slices[key] = [slice(start, end) for start, end in ranges]
        return [group.grad[part] for part in self._grad_slices[key]]

    def _squared_norm(self, group_index: int, device: torch.device) -> torch.Tensor:
        """Sum of squares of a group's owned gradients that count here, fp32, shape `[1]`, on
        `device`; no communication.
        """
        return local_squared_norm(
            self._norm_grads(group_index), device, self._norm_grads(group_index, counted=False)
        )

    def scaled_global_norm(self) -> torch.Tensor:
        """See base class: local squared sums of all groups, then one reduction of them all."""
        squares = torch.zeros(self.num_norm_groups, dtype=torch.float32, device=self.device)
        for index in range(len(self.groups)):
            own = self._squared_norm(index, self.device).squeeze()
            squares[self._param_group_of(index)] += own
        return self._norm_of(reduce_squared_norm(squares, self.norm_group))

    # Update

    def _device_decides(self, norm: torch.Tensor) -> bool:
        """See base class: never where the optimizer is on the host, which waits for gradients
        anyway.
        """
        on_host = self.cpu_offload or isinstance(self.optimizer, HostOptimizer)
        return not on_host and super()._device_decides(norm)

    @torch.no_grad()
    def _update(self, scaling: GradientScaling) -> None:
        self._settle_parameters()
        if isinstance(self.optimizer, HostOptimizer) and not self._per_param:
            masters = (group.masters[0] for group in self.groups)
            factor = float(scaling.factor)
            with self.optimizer.fused(factor, dict(zip(masters, self._publishers(), strict=True))):
                self.optimizer.step()
            self._publish(delivered=True)
            return
        groups = self.groups[: len(self.param_groups)]
        grads = [group.grad_for_step() for group in groups]
        for group, grad in zip(groups, grads, strict=True):
            views = group.param_views(grad) if self._per_param else [grad]
            for master, view in zip(group.masters, views, strict=True):
                master.grad = view
        scaling.step(self.optimizer, grads)
        for group in groups:
            for master in group.masters:
                master.grad = None
        self._publish(delivered=False)

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Model-precision parameters <- masters, on every rank."""
        self._settle_parameters()
        self._publish(delivered=False)

    def _publish(self, delivered: bool) -> None:
        """Give every rank all shards; `delivered`: all pieces have been sent already."""
        publishers = self._publishers()
        for publisher in publishers if not delivered else ():
            publisher.publish()
        for publisher in publishers:
            publisher.finish()
        if self._arrivals is not None:
            self._arrivals.hand_over()

    def _settle_parameters(self) -> None:
        """Let the current stream wait for all parameters, which are about to be written, or read
        without their hearing of it.
        """
        if self._arrivals is not None:
            self._arrivals.settle()

    def _publishers(self) -> list[Publisher]:
        """Of each group; made late, when the groups have their final buffers."""
        if len(self._made_publishers) != len(self.groups):
            by_broadcast = not self.allgather_partitions
            self._made_publishers = [
                Publisher(group, self.allgather_bucket_size, by_broadcast, self._arrivals)
                for group in self.groups
            ]
        return self._made_publishers

    # State

    @property
    def state_layout(self) -> StateLayout:
        """See base class."""
        return StateLayout(has_masters=True)

    def numbered_params(self) -> list[list[nn.Parameter]]:
        """See base class."""
        return [group.params for group in self.groups]

    def own_tensors(self) -> Iterator[OwnTensor]:
        """See base class: the owned shard of each group, or every parameter's master."""
        for index, group in enumerate(self.groups):
            if self._per_param:
                for master, param in zip(group.masters, group.params, strict=True):
                    yield OwnTensor.of_param(master, index, param)
                continue
            runs = [
                ParamRun(group.params[part.param], part.param_start, part.shard_start, part.numel)
                for part in group.file_table.of_shard(group.shard_rank)
            ]
            filed_as = (group.file_table.shard_numel,)
            by_owners = isinstance(self.optimizer, OwnerSteps)
            yield OwnTensor(
                group.masters[0],
                self._param_group_of(index),
                runs,
                filed_as=filed_as,
                has_state=not by_owners,
            )
        if isinstance(self.optimizer, OwnerSteps):
            for tensor, index, param_index, name in self.optimizer.owned():
                own = OwnTensor.of_param(tensor, index, self.groups[index].params[param_index])
                shape = tuple(logical_shape(own.runs[0].param))
                yield own._replace(filed_as=shape, beside=name)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """See base class: in upstream's layout."""

    @abstractmethod
    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = True,
    ) -> None:
        """See base class."""

    @abstractmethod
    def fits(self, saved: Mapping[str, Any]) -> bool:
        """See base class."""

    @abstractmethod
    def rebuilt_state(
        self, base: dict[str, Any], masters: Sequence[torch.Tensor], scaler: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See base class."""

    @property
    def has_gradients(self) -> bool:
        """See base class; reductions may still be on their way."""
        return self.tracker.window.is_plain is not None or super().has_gradients

    @property
    @abstractmethod
    def _owns_sums(self) -> bool:
        """Whether the sums of this window are in what this rank owns of each group."""

    def gradient_layout(self) -> str:
        """See base class."""
        sums = [] if self.accumulator is None else [flat.dtype for flat in self.accumulator.flats]
        groups = [(group.table, group.shard_rank, group.grad_dtype) for group in self.groups]
        return f"{groups} {sums}"

    def window_state(self) -> dict[str, Any]:
        """See base class."""
        return {
            **super().window_state(),
            "marks": {name: getattr(self, name) for name in self._window_marks},
            "sums": [] if self.accumulator is None else self.accumulator.flats,
            "owned": [group.grad for group in self.groups] if self._owns_sums else [],
        }

    @torch.no_grad()
    def load_window_state(self, saved: Mapping[str, Any]) -> None:
        """See base class."""
        super().load_window_state(saved)
        for name, value in saved["marks"].items():
            setattr(self, name, value)
        sums = [] if self.accumulator is None else self.accumulator.flats
        for flat, value in zip(sums, saved["sums"], strict=True):
            flat.copy_(value)
        for group, grad in zip(self.groups if saved["owned"] else [], saved["owned"], strict=True):
            group.grad.copy_(grad)

    def refresh_fp32_params(self) -> None:
        """See base class."""
        self._settle_parameters()
        for group in self.groups:
            group.refresh_master()

    def destroy(self) -> None:
        """See base class; parameters keep their values in storage of their own."""
        if self._arrivals is not None:
            self._arrivals.destroy()
        for group in self.groups:
            for param in group.params:
                if hasattr(param, "_hp_mapping"):
                    del param._hp_mapping
            group.release()
        self.groups = []
        self._made_publishers = []
