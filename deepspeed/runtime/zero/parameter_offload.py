"""`DeepSpeedZeRoOffload`: has the parameters of a model whole where its modules run, and only
there.

Forward: hooks on the module of every unit. Backward: what autograd saves of gathered memory is not
saved but noted as a place in it; unpacking the note gathers the unit again, whichever order
backward takes (`saved_tensors`). That memory can therefore be used for other units in between.
Parameters that are read elsewhere in a running forward or backward are gathered by
`module_hooks.parameter_reads`.

When backward does so is `backward_order`'s.

[Note: frozen modules]
Backward reads the parameters of a frozen module where what it was given has a gradient, which may
be so on some ranks only: if others pass by all that is trained before it. Ranks cannot ask each
other, so it is gathered where any of them may need it: when something that is trained has come
before it. Every rank enters the same modules with units, and what is small and stays whole has no
hooks, so that counts from where the module that it is in begins to run modules with units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from deepspeed.comm.parallel_map import OptimizerInstances
from deepspeed.runtime.module_hooks.late_parameters import LateParameters, refuse_untrained
from deepspeed.runtime.module_hooks.parameter_reads import ModuleHook, unwatch_reads, watch_reads
from deepspeed.runtime.zero.gathering.backward_order import BackwardOrder, Use
from deepspeed.runtime.zero.gathering.coordinator import (
    PartitionedParameterCoordinator,
    in_backward,
)
from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit
from deepspeed.runtime.zero.gathering.memory_pool import GatherResources
from deepspeed.runtime.zero.gathering.saved_tensors import GradientShapes, SavedTensors
from deepspeed.runtime.zero.gathering.units import (
    GatherSettings,
    UnitPlan,
    choose_persistent,
    fuse,
    is_below,
    is_called,
    plan_units,
)
from deepspeed.runtime.zero.parameters.agreement import agree_on_parameters, described
from deepspeed.runtime.zero.parameters.guarded_loads import guard_loads
from deepspeed.runtime.zero.parameters.shards import ShardedValue
from deepspeed.runtime.zero.parameters.zero_parameter import (
    ZeroParamStatus,
    become_plain,
    hide,
    is_zero_param,
    record_of,
)
from deepspeed.utils.z3_leaf_module import z3_leaf_module


@dataclass(slots=True)
class Frame:
    """A forward that runs.

    Attributes:
        use: Its place in the whole forward; None if no backward will come.
        carries: Whether gradients may flow through it on some rank; see [Note: frozen modules].
        units: What it needs whole.
        has_saved: Whether autograd has saved something of them.
    """

    module: nn.Module
    use: Use | None
    carries: bool
    units: list[GatherUnit] = field(default_factory=list)
    has_saved: bool = False


class DeepSpeedZeRoOffload:
    """See module. Without an optimizer it is also what `deepspeed.initialize` returns as one.

    Args:
        module: The model; its parameters have been cut.
        instances: Ranks that share them, and those that have other copies.
        param_names: Name of each parameter.
        cut: Cuts parameters that come later. All ranks call it with the same ones.

    Attributes:
        give_up: Frees an optimizer that has copies of the shards; None without one.
        was_taken: Another engine has the model.
        units: All units that do not persist, by the order of their modules.
        persistent_units: Those that do, one for each kind of parameter.
        forward_hooks, backward_hooks: Handles, which clients remove and empty around generation.
    """

    def __init__(
        self,
        module: nn.Module,
        instances: OptimizerInstances,
        settings: GatherSettings,
        param_names: Mapping[nn.Parameter, str],
        cut: Callable[[Iterable[nn.Parameter]], None],
    ) -> None:
        self.module = module
        self.instances = instances
        # An optimizer hears of edits too, and tells us.
        self._on_edit: Callable[[nn.Parameter], None] | None = self.shard_changed
        self.give_up: Callable[[], None] | None = None
        self.was_taken = False
        # What autograd hands back of a saved parameter is a plain tensor, whole; functions of
        # clients ask in their backward what they ask a parameter (trl's fused losses).
        torch.Tensor.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]  # it is new
        self.resources = GatherResources(settings, owner=self)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.units: list[GatherUnit] = []
        self.persistent_units: list[GatherUnit] = []
        self._frames: list[Frame] = []
        self._carries = False  # see [Note: frozen modules]
        self._is_emptied = False  # what persists has gone
        self.backward_order = BackwardOrder()
        self.saved = SavedTensors(self.resources.pool, self.backward_order, self._on_saved)
        self._shapes = GradientShapes()
        self._plan(param_names)
        self._untrained = module.register_state_dict_post_hook(_leave_out_persistent)
        self._register_deepspeed_module(module)
        self._late = LateParameters(module, self._has, cut)

    # Units

    def _plan(self, param_names: Mapping[nn.Parameter, str]) -> None:
        """Make units of these parameters, and gather what persists of them."""
        for param, name in param_names.items():
            record_of(param).name = name
        plans = plan_units(self.module, z3_leaf_module)
        for plan in plans:
            plan.own = [param for param in plan.own if not self._has(param)]
        limits = self.resources.settings
        self._make_units(plans, limits)
        self.backward_order.coordinator = PartitionedParameterCoordinator(
            self.units, limits.prefetch, limits.max_live, limits.max_reuse
        )
        self.resources.keep_for(self.units)
        self.fit_reads()
        self._uses = {plan.module: self._units_of(plan) for plan in plans}
        self._plans = {plan.module: plan for plan in plans}
        for plan in self._beside_small(plans):
            plan.is_beside_small = True
        self.resources.mark_updated()
        self.gather_persistent()

    def fit_reads(self) -> None:
        """Let memory for what is read of files fit the units, which have their shards."""
        if self.resources.reads is not None:
            units = (*self.units, *self.persistent_units)
            self.resources.reads.keep_for(unit.shard for unit in units)

    @property
    def param_coordinator(self) -> PartitionedParameterCoordinator:
        return self.backward_order.coordinator

    def _beside_small(self, plans: Sequence[UnitPlan]) -> Iterator[UnitPlan]:
        """Find what has units beside something trained without hooks: in the innermost module
        around it that has any. See [Note: frozen modules].
        """
        hooked = [plan for plan in plans if self._uses[plan.module]]
        around = {
            plan.name
            for plan in plans
            if not self._uses[plan.module] and any(param.requires_grad for param in plan.params)
        }
        while around:
            inside = {name: [one for one in hooked if is_below(one.name, name)] for name in around}
            yield from chain.from_iterable(inside.values())
            around = {name.rpartition(".")[0] for name, own in inside.items() if name and not own}

    def _has(self, param: nn.Parameter) -> bool:
        unit = record_of(param).unit if is_zero_param(param) else None
        return unit is not None and unit.resources is self.resources

    def _make_units(self, plans: Sequence[UnitPlan], settings: GatherSettings) -> None:
        params = [param for plan in plans for param in plan.own]
        persistent = choose_persistent(
            params,
            lambda param: record_of(param).numel,
            settings.param_persistence,
            settings.model_persistence - sum(unit.numel for unit in self.persistent_units),
        )

        def stays(param: nn.Parameter) -> bool:
            return param in persistent or record_of(param).persists

        def used(plan: UnitPlan) -> int:
            return sum(record_of(param).numel for param in plan.params if not stays(param))

        for fused in fuse(plans, used, settings.fusion):
            own = {plan.name: [param for param in plan.own if not stays(param)] for plan in fused}
            names = [name for name, params in own.items() if params]
            name = " to ".join((names[0], names[-1])) if len(names) > 1 else "".join(names)
            theirs = list(chain.from_iterable(own.values()))
            self.units.extend(self._by_kind(name, theirs, is_fused=len(names) > 1))
        together = [param for param in params if param in persistent]
        self.persistent_units.extend(self._by_kind("persistent", together, persists=True))
        for unit in (*self.units, *self.persistent_units):
            for record in unit.records:
                record.unit, record.persists = unit, unit.persists
                record.on_read, record.on_edit = self._on_read, self._on_edit
                record.is_running = self._is_running

    def gathers_for(self, module: nn.Module) -> bool:
        """Whether hooks gather what the forward of `module` uses."""
        return bool(self._uses.get(module))

    def holds_for(self, module: nn.Module) -> bool:
        """Whether all of that is held by forwards already."""
        return all(unit.holds for unit in self._uses[module])

    def tell_edits(self, on_edit: Callable[[nn.Parameter], None] | None) -> None:
        """Let an optimizer hear when a script has changed a shard."""
        self._on_edit = on_edit
        for unit in (*self.units, *self.persistent_units):
            for record in unit.records:
                record.on_edit = on_edit

    def _take_in_late(self) -> None:
        """Take in what the model was given since it was looked at."""
        has_modules, late = self._late.find()
        if late and self.give_up is not None:
            refuse_untrained(late.items())
        if late:
            named = [(name, described(param)) for param, name in late.items()]
            what = f"stage 3 taking in {next(iter(late.values()))}"
            told = "ranks were given different parameters"
            agree_on_parameters(named, self.instances.everyone, what, told)
            self._late.cut(late)
        if late or has_modules:
            for unit in self.persistent_units:
                unit.refuse_lost_writes()
            self.param_coordinator.release_all()
            live_numel = self.param_coordinator.live_numel
            self._plan(late)
            self.param_coordinator.live_numel = live_numel
            self._remove_hooks()
            self._shapes.drop()
            self._register_deepspeed_module(self.module)
        self._late.taken()

    def _by_kind(
        self, name: str, params: Sequence[nn.Parameter], **unit: bool
    ) -> Iterator[GatherUnit]:
        kinds: dict[Any, list[nn.Parameter]] = {}
        for param in params:
            record = record_of(param)
            kinds.setdefault((record.shard.dtype, record.device, record.group), []).append(param)
        for same in kinds.values():
            yield GatherUnit(name, same, self.resources, **unit)

    @staticmethod
    def _units_of(plan: UnitPlan) -> tuple[GatherUnit, ...]:
        found = (record_of(param).unit for param in plan.params)
        return tuple(unit for unit in dict.fromkeys(found) if unit and not unit.persists)

    # Hooks

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Watch modules; called again by clients that have removed the hooks."""
        for below in module.modules():
            watch_reads(below)
            self.forward_hooks.append(guard_loads(below))
            below.ds_external_parameters = partial(external_parameters, below)  # type: ignore[assignment]  # upstream's name, called without arguments
            if (below is self.module or self._uses.get(below)) and is_called(below):
                self.forward_hooks += [
                    below.register_forward_pre_hook(
                        ModuleHook(self._before_forward), with_kwargs=True, prepend=True
                    ),
                    below.register_forward_hook(ModuleHook(self._after_forward), always_call=True),
                ]
        self.backward_hooks += self._shapes.handles(self.units)

    # Forward

    def _before_forward(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if not self._frames:
            recomputes = in_backward()
            self.begin_forward(recomputes)
            if not recomputes and self.units:  # memory of what persists is never another's
                self.saved.start()
        place = self.backward_order.here
        external = self._external(module)
        frame = self._frame_of(module, external)
        self._frames.append(frame)
        for unit in (*self._uses.get(module, ()), *external):
            # One by one: if a gather fails, `_after_forward` leaves what was entered.
            frame.units.append(unit)
            self.param_coordinator.enter([unit])
        if place is not None and not _are_fused(frame):
            inputs = (tensor for tensor in _tensors((args, kwargs)) if tensor.grad_fn is not None)
            self.backward_order.watch(place, inputs)

    def begin_forward(self, recomputes: bool = False) -> None:
        """Begin an outermost forward, or what a backward recomputes."""
        self.have_persistent()
        if not recomputes:
            if self._late.may_be_there:
                self._take_in_late()
            self.param_coordinator.begin_pass()
        self.backward_order.begin(recomputes)
        self._carries = recomputes  # nobody recomputes what has no gradients

    def _is_running(self) -> bool:
        """Whether a forward or a backward runs, in which modules may do as they like."""
        return bool(self._frames) or in_backward()

    def exchange(self, frames: list[Frame], carries: bool) -> tuple[list[Frame], bool]:
        """Go on with a forward that another one has interrupted, and return that one."""
        interrupted = self._frames, self._carries
        self._frames, self._carries = frames, carries
        return interrupted

    def _frame_of(self, module: nn.Module, external: Sequence[GatherUnit]) -> Frame:
        plan = self._plans.get(module)
        params = chain(plan.params if plan else (), *(unit.params for unit in external))
        self._carries = (
            self._carries
            or (plan is not None and plan.is_beside_small)
            or any(param.requires_grad for param in params)
        )
        return Frame(module, self.backward_order.enter(), self._carries)

    @staticmethod
    def _external(module: nn.Module) -> list[GatherUnit]:
        registered = external_parameters(module)
        if not registered:
            return []  # for nearly all, in every forward of each
        units = (record_of(param).unit for _, param in registered if is_zero_param(param))
        return [unit for unit in dict.fromkeys(units) if unit is not None and not unit.persists]

    def _after_forward(self, module: nn.Module, args: object, outputs: object) -> None:
        if not self._frames or self._frames[-1].module is not module:
            return  # it failed before its frame was there
        frame = self._frames.pop()
        if self._frames:
            self._hand_up(frame, self._frames[-1], outputs)
        if frame.use is not None:
            self._write_down(frame, frame.use, outputs)
        self.param_coordinator.leave(frame.units)
        if self._frames:
            return
        self.backward_order.end()
        if not in_backward():  # recomputation is followed by its backward
            self.param_coordinator.end_forward()
            self.saved.end()
            if outputs is not None and not torch.is_grad_enabled():  # no step comes
                self.raise_disk_error()

    def _hand_up(self, frame: Frame, above: Frame, outputs: object) -> None:
        """Lend a parameter, or a view of one, that a forward returns to its caller."""
        for tensor in _tensors(outputs):
            buffer = self.saved.buffer_of(tensor)
            if buffer is not None and buffer.owner in frame.units:
                frame.units.remove(buffer.owner)
                above.units.append(buffer.owner)

    def _on_read(self, param: nn.Parameter) -> None:
        """Gather what is read as a module's attribute."""
        unit = record_of(param).unit
        if unit is None or unit.persists:
            return
        if self._frames:
            self._frames[-1].units.append(unit)
            self._frames[-1].carries = self._carries = self._carries or param.requires_grad
            self.param_coordinator.enter([unit])
        elif in_backward():
            self.param_coordinator.use_in_recomputation(unit)

    # Backward

    def _on_saved(self) -> None:
        self._frames[-1].has_saved = True

    def give_shape(self, param: nn.Parameter) -> None:
        self._shapes.give(param)

    def _write_down(self, frame: Frame, use: Use, outputs: object) -> None:
        """Let backward know what a forward that is over has used. What is trained is gathered on
        all ranks, though some may read nothing of it; but for an embedding, which reads indices,
        and for what the module shares with others and only took an attribute of.
        """
        place, tensors = self.backward_order.here, _tensors(outputs)
        if not frame.carries and not any(tensor.requires_grad for tensor in tensors):
            self.backward_order.leave(use, (), ())
            return
        own = self._uses.get(frame.module, ())
        reads = use.has_graph and (frame.has_saved or not isinstance(frame.module, nn.Embedding))
        gathered = (unit for unit in frame.units if reads and (unit in own or not unit.is_fused))
        self.backward_order.leave(use, frame.units, gathered)
        if place is not None and not (self._frames and _are_fused(frame)):
            made = (tensor for tensor in tensors if tensor.grad_fn is not None)
            self.backward_order.watch(place, islice(made, 1))

    def end_backward(self) -> None:
        self.backward_order.end_backward()
        self.param_coordinator.end_backward()
        self._shapes.drop()
        self._untrained.remove()

    # Shards

    def shard_changed(self, param: nn.Parameter) -> None:
        """Follow a script's edit: a gather that was begun ahead has the old shard, and so has a
        unit that is whole while the script has the parameter in memory of its own.
        """
        unit = record_of(param).unit
        if unit is not None:
            self.param_coordinator.drop_ahead(unit)
            unit.follow(param)
        self.resources.mark_updated()

    def refuse_holders(self, before: str = "step()") -> None:
        """Raise RuntimeError if somebody has parameters whole, which would keep old values, or has
        written to what persists: shards are about to change, or to leave.
        """
        held = [unit.name for unit in self.units if unit.holds > 0 or unit.num_read_apart]
        if held:
            raise RuntimeError(
                f"parameters of {', '.join(held[:4])} are whole in a running forward, by "
                "GatheredParameters or by all_gather(), and would keep their old values: leave it "
                f"before {before}"
            )
        for unit in self.persistent_units:
            unit.refuse_lost_writes()

    def raise_disk_error(self) -> None:
        """Raise on all ranks, which all call it, the error of files of shards that one has kept."""
        try:
            self.resources.raise_disk_error(self.instances.everyone)
        except OSError:
            # What was gathered, here or ahead, may be what could not be read.
            self.resources.end_reads()
            self.empty_partition_cache()
            raise

    def before_update(self) -> None:
        self.param_coordinator.release_all()
        self.resources.before_update()
        self._shapes.drop()
        self._untrained.remove()

    def after_update(self) -> None:
        self.resources.num_updates += 1
        self.resources.mark_updated()
        self.gather_persistent()
        self.param_coordinator.read_first()

    def gather_persistent(self) -> None:
        self._is_emptied = False
        for unit in self.persistent_units:
            unit.refresh()

    def have_persistent(self) -> None:
        """Have what persists, and may have gone, for a forward or a backward."""
        if self._is_emptied:
            self.gather_persistent()

    def empty_partition_cache(self) -> None:
        """Let go of all that is whole and nobody uses, what persists too until the next forward or
        backward, and of all memory for it. All ranks call it. In a forward what persists stays.
        """
        self.param_coordinator.release_all()
        if not self._frames:
            for unit in (*self.units, *self.persistent_units):
                if not unit.is_read:
                    unit.refuse_lost_writes()
                    unit.put_away()
            self._is_emptied = True
        self.resources.pool.drop_free()

    def destroy(self) -> None:
        """Give the model plain, whole parameters back. All ranks call it."""
        if self.was_taken:
            return
        self._late.close()
        self._remove_hooks()
        self.before_update()
        for unit in (*self.units, *self.persistent_units):
            unit.fetch()
            for param in unit.params:
                become_plain(param, param.data.clone())
            unit.forget()
        for module in self.module.modules():
            unwatch_reads(module)
            module.__dict__.pop("ds_external_parameters", None)
        self.resources.destroy()

    def detach(self) -> None:
        """Let go of the model: another engine takes its shards. All ranks call it."""
        self._late.close()
        self._remove_hooks()
        self.before_update()
        for unit in self.persistent_units:
            unit.forget()
            for param in unit.params:
                record_of(param).persists = False
                hide(param)
        self.resources.destroy()

    def _remove_hooks(self) -> None:
        for handle in (*self.forward_hooks, *self.backward_hooks):
            handle.remove()
        self.forward_hooks, self.backward_hooks = [], []


def external_parameters(module: nn.Module) -> list[tuple[int, Any]]:
    """List number and parameter of each `register_external_parameter`."""
    return list(module.__dict__.get("_external_params", {}).items())


def _leave_out_persistent(
    module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object
) -> None:
    """Leave what persists out of state dicts, as what does not, until the first backward or update:
    small parameters alone are no state of a model, and Lightning's tests count on their absence.
    """
    for name, param in module.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if value is None or value is param or not is_zero_param(param):
            continue
        record = record_of(param)
        if record.persists and not (record.num_lent or record.readers):
            state[prefix + name] = value.new_empty(0).as_subclass(ShardedValue)


def _are_fused(frame: Frame) -> bool:
    """Whether its units need no hooks of their own, of which there would be many."""
    return all(unit.is_fused for unit in frame.units)


def _tensors(values: object) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
