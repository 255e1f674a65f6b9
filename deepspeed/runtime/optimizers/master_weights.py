"""Master weights: what a step updates where the model's parameters are not it. Every group is laid
out flat and cut into shards; each rank keeps masters, moments and gradients of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.failures import raise_disk_error
from deepspeed.ops.early_update import SpeculativeUpdate
from deepspeed.ops.host_optimizer import HostOptimizer
from deepspeed.ops.squares import IN_ORDER, ExactSquares
from deepspeed.ops.state_files import mend
from deepspeed.ops.whole_parameters import WholeParameterOptimizer
from deepspeed.runtime.gradients.norm import joined, local_squared_norm, reduce_squared_norm
from deepspeed.runtime.gradients.reduction import GradientContext
from deepspeed.runtime.gradients.scope import GradientPiece
from deepspeed.runtime.module_hooks.parameter_arrivals import ParameterArrivals
from deepspeed.runtime.optimizers.group_layout import GroupLayout
from deepspeed.runtime.optimizers.owner_steps import OwnerSteps
from deepspeed.runtime.optimizers.partial_steps import PartialSteps
from deepspeed.runtime.optimizers.settings import ShardSettings, StepSettings
from deepspeed.runtime.optimizers.state_layout import OwnTensor, ParamRun
from deepspeed.runtime.optimizers.step_outcome import GradientScaling
from deepspeed.runtime.optimizers.step_sequence import StepSequence, forwarded
from deepspeed.runtime.sharding.dealt_parameters import DealtParameters
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.sharding.low_precision import LowPrecisionStep
from deepspeed.runtime.sharding.model_writes import ModelWrites
from deepspeed.runtime.sharding.publisher import Publisher
from deepspeed.utils.tensor_fragment import logical_shape


class Place(NamedTuple):
    """Where a parameter lies: the number of its group, and its own in it."""

    group: int
    param_index: int


class ParamLink(NamedTuple):
    """How `deepspeed.utils.safe_get_*` finds a parameter's shard; set as `param._hp_mapping`."""

    optimizer: StepSequence
    group: int
    param_index: int

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None: a saved module takes no optimizer and process groups along."""
        return type(None), ()


def _forget_unused_state(optimizer: torch.optim.Optimizer) -> None:
    """Drop the state by parameters that some optimizers make at once (torch's Adagrad): masters
    take their place. Refuse if steps have been taken, which would be forgotten.
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


def _is_used(own: Mapping[str, object]) -> bool:
    if "step" in own:
        return float(own["step"]) > 0  # type: ignore[arg-type]  # a number or a tensor
    return any(isinstance(value, torch.Tensor) and bool(value.any()) for value in own.values())


def _reader(group: ShardedGroup, start: int, numel: int) -> Callable[[], torch.Tensor]:
    """Read the owned gradient when called: its buffer is made late and may be replaced."""
    return lambda: group.grad[start : start + numel]


class CountedGradients:
    """The owned gradients that count in the norm on this rank; `counts` says so of a parameter,
    None: all do.
    """

    def __init__(self, counts: Callable[[nn.Parameter], bool] | None) -> None:
        self._counts = counts
        self._slices: dict[tuple[ShardedGroup, bool], list[slice]] = {}

    def of(self, group: ShardedGroup, counted: bool = True) -> list[torch.Tensor]:
        """Return the owned gradients of a group that count here, or those counted elsewhere."""
        if self._counts is None:
            return [group.grad] if counted else []
        key = (group, counted)
        if key not in self._slices:
            owned = group.table.of_shard(group.shard_rank)
            counts = self._counts
            chosen = (one for one in owned if counts(group.params[one.param]) is counted)
            ranges = joined((one.shard_start, one.shard_start + one.numel) for one in chosen)
            self._slices[key] = [slice(start, end) for start, end in ranges]
        return [group.grad[part] for part in self._slices[key]]


class Publishing:
    """Rounds the masters of all groups and gathers them; stage 3 goes on from `copied` pieces."""

    def __init__(self, groups: Sequence[ShardedGroup], settings: ShardSettings) -> None:
        self._groups = groups
        self._settings = settings
        self._made: list[Publisher] = []
        self.copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrivals: ParameterArrivals | None = None
        model = settings.gather_beside
        if model is not None and not get_accelerator().resolves_data_dependency():
            self._arrivals = ParameterArrivals(model)

    def publishers(self) -> list[Publisher]:
        """The publisher of each group; made late, when the groups have their final buffers."""
        if not self._made:
            self._made = [self._publisher(group) for group in self._groups]
        return self._made

    def _publisher(self, group: ShardedGroup) -> Publisher:
        by_broadcast = not self._settings.allgather_partitions
        return Publisher(group, self._settings.allgather_bucket_size, by_broadcast, self._arrivals)

    def publish(self, delivered: bool = False) -> None:
        """Give every rank all shards; `delivered`: all pieces have been sent already."""
        publishers = self.publishers()
        for publisher in publishers if not delivered else ():
            publisher.publish()
        for publisher in publishers:
            publisher.finish()
        if self._arrivals is not None:
            self._arrivals.hand_over()

    def await_parameters(self) -> None:
        """Let the current stream wait for all parameters, to be written, or read unheard of."""
        if self._arrivals is not None:
            self._arrivals.settle()

    def destroy(self) -> None:
        if self._arrivals is not None:
            self._arrivals.destroy()
        self._made = []


class MasterWeights:
    """Masters in flat groups, fp32 mostly, and the torch optimizer that updates them.

    Every group of `init_optimizer` keeps its dictionary (schedulers hold on to it); its `params`
    become the owned flat master shard, or one master per parameter if `per_param` is set
    (optimizers that need shapes).

    Attributes:
        groups: Flat groups of parameters, and what this rank owns of each.
        places: Where each trained parameter lies.
        num_shards: How many ranks share the dense masters.
        group_squares: Reduced squared norms of the last step, `[num_norm_groups]`, of the gradient
            as accumulated.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        context: GradientContext,
        steps: StepSettings,
        layout: GroupLayout,
        per_param: bool = False,
    ) -> None:
        _forget_unused_state(init_optimizer)
        self.optimizer = init_optimizer
        self.context = context
        self.settings = layout.settings
        self.norm_group = steps.norm_group
        self.num_norm_groups = steps.num_norm_groups or len(init_optimizer.param_groups)
        self._counted = CountedGradients(steps.counts_in_norm)
        self._squares = ExactSquares() if steps.exact_norm else IN_ORDER
        shard_group = layout.shard_group
        self.num_shards = 1 if shard_group is None else dist.get_world_size(group=shard_group)
        self.shard_rank = 0 if shard_group is None else dist.get_rank(group=shard_group)
        self.group_squares: torch.Tensor | None = None
        self.per_param = per_param
        self.groups: list[ShardedGroup] = []
        disk_error = None
        try:
            self.groups = layout.groups(init_optimizer, per_param)
        except OSError as error:
            disk_error = error
        self._raise_disk_error(disk_error)
        self.publishing = Publishing(self.groups, self.settings)
        how = self.settings.low_precision
        self._low_precision: LowPrecisionStep | None = None
        # Optimizers on the host round to the nearest in their own pass.
        on_host = isinstance(init_optimizer, HostOptimizer)
        if how is not None and (how.at_random or not on_host):
            named = [self.names(number) for number in range(len(self.groups))]
            self._low_precision = LowPrecisionStep(init_optimizer, self.groups, named, how)
        if isinstance(init_optimizer, HostOptimizer):
            init_optimizer.state_files = self.settings.files
            if how is not None:
                init_optimizer.fp32_optimizer_states = how.state_dtype == torch.float32
        self.early: SpeculativeUpdate | None = None
        offload = self.settings.offload
        if isinstance(init_optimizer, HostOptimizer) and offload and offload.speculative_update:
            own = self.groups[: len(init_optimizer.param_groups)]
            filled = [
                joined((one.shard_start, one.shard_start + one.numel) for one in parts)
                for parts in (group.table.of_shard(group.shard_rank) for group in own)
            ]
            masters = [group.master for group in own]
            self.early = SpeculativeUpdate(init_optimizer, masters, filled)
        self.places = {
            param: Place(number, index)
            for number, group in enumerate(self.groups)
            for index, param in enumerate(group.params)
        }
        if isinstance(init_optimizer, WholeParameterOptimizer) and not per_param:
            init_optimizer.use_shards(
                {
                    group.masters[0]: DealtParameters(group, self.device, self.names(number))
                    for number, group in enumerate(self.groups)
                },
                self._squares,
            )
        own = self.groups[: len(init_optimizer.param_groups)]
        named = [self.names(number) for number in range(len(self.groups))]
        self.partial = PartialSteps(own, named[: len(own)], init_optimizer, per_param)
        # A device's host would wait for elements, or learn a step late, when they are lost.
        samples = get_accelerator().is_synchronized_device()
        self.writes = ModelWrites(self.groups, named, self.lend, samples)

    def link(self, sequence: StepSequence) -> None:
        for param, place in self.places.items():
            param._hp_mapping = ParamLink(sequence, *place)  # type: ignore[attr-defined]  # the link is dynamic
        if self.early is not None:
            self.early.predict = sequence.unclipped_factor

    def names(self, group_index: int) -> list[str]:
        return [
            self.context.param_names.get(param, f"unnamed.{group_index}.{index}")
            for index, param in enumerate(self.groups[group_index].params)
        ]

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.context.device

    @property
    def cpu_offload(self) -> bool:
        return self.settings.offload is not None

    state: Any = forwarded("optimizer")

    # Under upstream's names

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """Trainable parameters of each group, in the order of files."""
        return [group.params for group in self.groups]

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """The owned master shard of each group."""
        return [group.master for group in self.groups]

    @property
    def partition_count(self) -> list[int]:
        """Number of shards of each group."""
        return [group.num_shards for group in self.groups]

    @property
    def group_paddings(self) -> list[int]:
        """The padding at the end of this rank's shard of each group in files."""
        return [group.file_table.shard_padding(group.shard_rank) for group in self.groups]

    # Norm

    def _param_group_of(self, index: int) -> int:
        """Return which parameter group `groups[index]` is of: parts that stay on the device with
        offload are groups behind those of all others.
        """
        return index % len(self.optimizer.param_groups)

    def _squared_norm(self, group_index: int, device: torch.device) -> torch.Tensor:
        """Sum the squares of a group's gradients that count here: a row of sums, on `device`."""
        group = self.groups[group_index]
        own, others = (self._counted.of(group, counted) for counted in (True, False))
        return local_squared_norm(own, device, others, self._squares)

    def scaled_global_norm(self) -> torch.Tensor:
        """Return the norm of the whole model's gradient as accumulated (times the loss scale),
        fp32, `[1]`: local squared sums of all groups, then one reduction of them all.
        """
        squares = self._squares.zeros(self.num_norm_groups, self.device)
        for index in range(len(self.groups)):
            own = self._squared_norm(index, self.device).squeeze()
            squares[self._param_group_of(index)] += own
        return self._norm_of(reduce_squared_norm(squares, self.norm_group))

    def _norm_of(self, squares: torch.Tensor) -> torch.Tensor:
        """The norm from reduced squared sums per group, which are kept."""
        self.group_squares = self._squares.totals(squares)
        return self.group_squares.sum(0, keepdim=True).sqrt_()

    # Update

    @property
    def waits_for_gradients(self) -> bool:
        """Whether the host waits for gradients anyway, because the update is there."""
        return self.cpu_offload or isinstance(self.optimizer, HostOptimizer)

    @torch.no_grad()
    def update(self, scaling: GradientScaling) -> None:
        self.publishing.await_parameters()
        self._update(scaling)
        self.writes.keep()
        self.partial.end()

    def _update(self, scaling: GradientScaling) -> None:
        if self._low_precision is not None:
            tracker = self.context.tracker
            number = tracker.micro_steps // tracker.steps
            run = partial(scaling.step, self.optimizer)
            self._low_precision.step(number, run, self.partial.runs)
            self.publishing.publish()
            return
        if isinstance(self.optimizer, HostOptimizer) and not self.per_param:
            publishers = self.publishing.publishers()
            masters = (group.masters[0] for group in self.groups)
            factor = float(scaling.factor)
            # Updates that were made ahead are of whole shards.
            runs = self.partial.runs
            early = None if runs else self.early
            disk_error = None
            try:
                with self.optimizer.fused(
                    factor, dict(zip(masters, publishers, strict=True)), early, runs
                ):
                    self.optimizer.step()
            except OSError as error:
                # Other ranks wait in the collectives below, and are told behind them.
                disk_error = error
                for publisher in publishers:
                    publisher.abandon()
            self.publishing.publish(delivered=True)
            self._raise_disk_error(disk_error)
            return
        groups = self.groups[: len(self.optimizer.param_groups)]
        grads = [group.grad_for_step() for group in groups]
        for group, grad in zip(groups, grads, strict=True):
            views = group.param_views(grad) if self.per_param else [grad]
            for master, view in zip(group.masters, views, strict=True):
                master.grad = view
        with self.partial.stepping():
            scaling.step(self.optimizer, grads)
        for group in groups:
            for master in group.masters:
                master.grad = None
        self.publishing.publish()

    def _raise_disk_error(self, own: OSError | None) -> None:
        """Raise on all ranks what a file of state of one of them has failed of."""
        if self.settings.files is not None and own is not None:
            mend()
        if self.settings.files is not None and self.norm_group is not None:
            raise_disk_error(own, self.norm_group)
        elif own is not None:
            raise own

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Model-precision parameters <- masters, on every rank."""
        self.publishing.await_parameters()
        self.publishing.publish()
        self.writes.keep()

    def refresh_fp32_params(self) -> None:
        """Masters <- model-precision parameters (after loading or editing weights)."""
        self.publishing.await_parameters()
        for group in self.groups:
            group.refresh_master()

    def set_param(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Set the model's `param`, the same on all ranks; its master is set already."""
        with torch.no_grad():
            param.copy_(value)

    # What is asked of the state

    def numbered_params(self) -> list[list[nn.Parameter]]:
        """The model's parameters by group, in the order in which the state lays them out."""
        return [group.params for group in self.groups]

    def own_tensors(self) -> Iterator[OwnTensor]:
        """Yield every tensor that the wrapped optimizer updates, in its order."""
        for index, group in enumerate(self.groups):
            if self.per_param:
                for master, param in zip(group.masters, group.params, strict=True):
                    yield OwnTensor.of_param(master, index, param)
                continue
            runs = [
                ParamRun(group.params[part.param], part.param_start, part.shard_start, part.numel)
                for part in group.file_table.of_shard(group.shard_rank)
            ]
            yield OwnTensor(
                group.masters[0],
                self._param_group_of(index),
                runs,
                filed_as=(group.file_table.shard_numel,),
                has_state=self.owner_steps is None,
            )
        if self.owner_steps is not None:
            for tensor, index, param_index, name in self.owner_steps.owned():
                own = OwnTensor.of_param(tensor, index, self.groups[index].params[param_index])
                shape = tuple(logical_shape(own.runs[0].param))
                yield own._replace(filed_as=shape, beside=name)

    @property
    def owner_steps(self) -> OwnerSteps | None:
        return self.optimizer if isinstance(self.optimizer, OwnerSteps) else None

    def gradient_pieces(
        self, sums_in: Callable[[nn.Parameter], torch.dtype]
    ) -> list[GradientPiece]:
        """List where reduced gradients lie: all fragments, in an order alike on all ranks."""
        pieces = []
        for group in self.groups:
            for index, param in enumerate(group.params):
                for part in group.table.of_param(index):
                    is_own = part.shard == group.shard_rank
                    read = _reader(group, part.shard_start, part.numel) if is_own else None
                    where = (param, part.param_start, part.numel)
                    pieces.append(GradientPiece(*where, read, sums_in(param)))
        return pieces

    def gather_full(
        self, links: Sequence[tuple[int, int]], shards: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Gather whole tensors of several parameters, with one collective per process group that
        shares them; all ranks that hold the parameters call it alike.

        Args:
            links: Group and index of each parameter.
            shards: For each group, this rank's shard of the wanted quantity.

        Returns:
            fp32 tensors in the parameters' shapes, on the model's device.
        """
        by_group: dict[dist.Group, list[int]] = {}
        for position, (group, _) in enumerate(links):
            by_group.setdefault(self.groups[group].process_group, []).append(position)
        values: dict[int, torch.Tensor] = {}
        for process_group, positions in by_group.items():
            pieces = self._gather_from([links[at] for at in positions], shards, process_group)
            values.update(zip(positions, pieces, strict=True))
        return [values[position] for position in range(len(links))]

    def _gather_from(
        self,
        links: Sequence[tuple[int, int]],
        shards: Sequence[torch.Tensor],
        process_group: dist.Group,
    ) -> list[torch.Tensor]:
        numels = [self.groups[group].table.numels[index] for group, index in links]
        flat = torch.zeros(sum(numels), dtype=torch.float32, device=self.device)
        start = 0
        for (group, index), numel in zip(links, numels, strict=True):
            owned = self.groups[group].owned(index)
            if owned is not None:
                whole = flat[start : start + numel]
                whole[owned.in_param].copy_(shards[group][owned.in_shard])
            start += numel
        # Every element is non-zero on its owner at most, so the sum is exact.
        if process_group is not None:
            dist.all_reduce(flat, group=process_group)
        shapes = [logical_shape(self.groups[group].params[index]) for group, index in links]
        return [piece.view(shape) for piece, shape in zip(flat.split(numels), shapes, strict=True)]

    def lend(self) -> None:
        """Know that a script is given this rank's masters, state or gradients themselves."""
        if self.early is not None:
            self.early.lent()

    def destroy(self) -> None:
        """Let go of buffers; parameters keep their values in storage of their own."""
        if self.early is not None:
            self.early.destroy()
        self.publishing.destroy()
        for param in self.places:
            if hasattr(param, "_hp_mapping"):
                del param._hp_mapping
        for group in self.groups:
            group.release()
        self.groups = []
        self.places = {}


class MasterNames:
    """What an optimizer with masters tells of them, under upstream's names."""

    groups: list[ShardedGroup] = forwarded("masters")
    writes: ModelWrites = forwarded("masters")
    cpu_offload: bool = forwarded("masters")
    bit16_groups: list[list[nn.Parameter]] = forwarded("masters")
    single_partition_of_fp32_groups: list[torch.Tensor] = forwarded("masters")
    partition_count: list[int] = forwarded("masters")
    group_paddings: list[int] = forwarded("masters")
    owner_steps: OwnerSteps | None = forwarded("masters")
    gather_full = forwarded("masters", MasterWeights.gather_full)
    lend = forwarded("masters", MasterWeights.lend)
    set_param = forwarded("masters", MasterWeights.set_param)
    update_lp_params = forwarded("masters", MasterWeights.update_lp_params)
