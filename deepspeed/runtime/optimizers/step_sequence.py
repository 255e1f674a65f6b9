"""The order of an optimizer step, the same for every stage and precision: `StepSequence`.

Finish gradients -> norm -> skip if it is not finite, or unscale, clip and update -> tell the loss
scaler -> clear. Stages differ in their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed._absent import reason
from deepspeed.accelerator import runs_ahead
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.gradients.accumulation import AccumulationTracker, Window
from deepspeed.runtime.gradients.asked import AskedGradient
from deepspeed.runtime.gradients.idle import IdleParameters, UnusedParameters
from deepspeed.runtime.gradients.norm import clip_factor
from deepspeed.runtime.gradients.observer import GradientObserver
from deepspeed.runtime.gradients.reduction import (
    GradientContext,
    GradientReduction,
    refused_gradients,
)
from deepspeed.runtime.gradients.scope import GradientPiece
from deepspeed.runtime.optimizers.state_layout import OwnTensor, StateFiles, StateLayout
from deepspeed.runtime.optimizers.step_outcome import (
    GradientScaling,
    Outcomes,
    UnreadNorms,
    takes_scaling,
)
from deepspeed.runtime.sharding.group import expert_group_of
from deepspeed.utils import memory_names
from deepspeed.utils.logging import log_once, warn_once


def tell_no_backward(what: str) -> None:
    """Warn that `what` found no gradient on this rank, once per process."""
    log_once(
        f"{what} without a backward since the last step, on rank {dist.get_rank()}: this rank adds "
        "zeros to the gradient. The step is taken and counted all the same, because other ranks "
        "may have a gradient; if none has, only momentum, weight decay and the schedule move. Call "
        "step() after a backward only, on all ranks alike"
    )


class _Forwarded:
    """A name of an optimizer that is one of a part of it."""

    def __init__(self, part: str, method: object, name: str) -> None:
        self._part = part
        self._method = method
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, instance: object, owner: type) -> object:
        if instance is None:
            return self if self._method is None else self._method
        return getattr(getattr(instance, self._part), self._name)

    def __set__(self, instance: object, value: object) -> None:
        setattr(getattr(instance, self._part), self._name, value)


class _TorchsOwn:
    """A method of `torch.optim.Optimizer` that a step sequence has not: `hasattr` says so."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        raise AttributeError(self._name)  # which asks `__getattr__`


def forwarded(part: str, method: Callable[..., object] | None = None, name: str = "") -> Any:
    """Make a class attribute that stands for that of the same name (or `name`) of a part of its
    objects; `method` is what the class itself has by the name, if it can be called.
    """
    return _Forwarded(part, method, name)


class Updated(Protocol):
    """What a step updates: `MasterWeights`, or the model's own parameters."""

    group_squares: torch.Tensor | None
    state: Any

    @property
    def waits_for_gradients(self) -> bool: ...  # the host does anyway
    # Of the whole model's gradient as accumulated, fp32, shape `[1]`.
    def scaled_global_norm(self) -> torch.Tensor: ...
    # What scripts do to the model.
    @property
    def writes(self) -> Writes: ...
    # What a step leaves out.
    @property
    def partial(self) -> Partial: ...
    def update(self, scaling: GradientScaling) -> None: ...
    def link(self, sequence: StepSequence) -> None: ...
    # In an order that is the same on all ranks.
    def gradient_pieces(
        self, sums_in: Callable[[nn.Parameter], torch.dtype]
    ) -> list[GradientPiece]: ...
    # By group, in the order in which the state numbers them or, flat, lays them out.
    def numbered_params(self) -> list[list[nn.Parameter]]: ...
    def own_tensors(self) -> Iterator[OwnTensor]: ...
    def refresh_fp32_params(self) -> None: ...
    def destroy(self) -> None: ...


class Writes(Protocol):
    """What scripts have done to the model's parameters: `ModelWrites`."""

    compares_all: bool

    def refuse_converted(self) -> None: ...
    def rejoin(self) -> None: ...
    def take_in(self) -> None: ...


class Partial(Protocol):
    """What a step leaves out: `PartialSteps`."""

    @property
    def begins(self) -> bool: ...
    def leave_out(self, params: Collection[nn.Parameter]) -> None: ...


class MovableState(Protocol):
    """What may leave the device between steps."""

    def require_states(self, what: str) -> None: ...
    def reload_states(self, non_blocking: bool = False) -> None: ...


class StepSequence(torch.optim.Optimizer):
    """The order of an optimizer step over its parts, and under upstream's names what these know.

    It is one of torch's optimizers by class, so that torch's schedules take it, and by what these
    need: `param_groups`, `defaults` and `state` are those of the optimizer that does the
    arithmetic. Nothing of torch's implementation is used.

    Args:
        init_optimizer: The torch optimizer that does the arithmetic.
        context: What all parts know of the gradients.
        reduction: Sums and averages gradients.
        masters: What is updated.
        files: The state in checkpoints.
        outcomes: The loss scale, and what became of steps.
        movable: What may leave the device; None: nothing.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        context: GradientContext,
        reduction: GradientReduction,
        masters: Updated,
        files: StateFiles,
        outcomes: Outcomes,
        movable: MovableState | None = None,
    ) -> None:
        # Not torch's: it would make groups and state of its own, and wrap `step` of the class.
        self.optimizer = init_optimizer
        self.context = context
        self.reduction = reduction
        self.masters = masters
        self.files = files
        self.outcomes = outcomes
        self.movable = movable
        trained = [param for params in masters.numbered_params() for param in params]
        self.context.idle.watch([param for param in trained if param.requires_grad])
        self._forget_leftovers(trained)
        self._unused: UnusedParameters | None = None
        if context.skips_unused:
            wanted = [param for param in trained if param.requires_grad]
            replicas = lambda param: context.replicas(expert_group_of(param))  # noqa: E731
            self._unused = UnusedParameters(wanted, replicas, context.device)
        held = next((group.params[0] for group in reduction.groups if group.params), None)
        is_held = held is not None and reduction.holds_gradients
        self._asked = AskedGradient(held) if held is not None and is_held else None
        masters.link(self)
        memory_names.register(reduction)

    # Type checkers must go on finding what is misspelled.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise, with what to use instead if the name is upstream's."""
            cls = type(self)
            is_torchs = hasattr(torch.optim.Optimizer, name)
            raise AttributeError(
                reason(f"{cls.__module__}.{cls.__qualname__}", name)
                or f"{cls.__name__!r} object has no attribute {name!r}"
                + ("; the torch optimizer that it has as `optimizer` does" if is_torchs else "")
            )

    tracker: AccumulationTracker = forwarded("context")
    idle: IdleParameters = forwarded("context")
    device: torch.device = forwarded("context")
    dp_process_group: dist.Group = forwarded("context")
    observer: GradientObserver = forwarded("context")
    accumulation_divisor: float = forwarded("context")

    reduces_now: bool = forwarded("reduction")
    has_reduced_gradients: bool = forwarded("reduction")
    works_during_backward: bool = forwarded("reduction")
    backward_epilogue = forwarded("reduction", GradientReduction.backward_epilogue)
    reduce_gradients = forwarded("reduction", GradientReduction.reduce_gradients)
    exit_backward = forwarded("reduction", GradientReduction.exit_backward)
    finish_gradients = forwarded("reduction", GradientReduction.finish_gradients)

    clip_grad: float = forwarded("outcomes")
    check_grad_overflow: bool = forwarded("outcomes")
    overflow: bool = forwarded("outcomes")
    skipped_steps: int = forwarded("outcomes")
    loss_scaler: LossScalerBase = forwarded("outcomes")
    loss_scale: float = forwarded("outcomes")
    dynamic_loss_scale: bool = forwarded("outcomes")
    global_grad_norm: float | torch.Tensor | None = forwarded("outcomes")
    group_grad_norms: list[float] | None = forwarded("outcomes")
    unread_norms: UnreadNorms | None = forwarded("outcomes")
    learn_outcome = forwarded("outcomes", Outcomes.learn_outcome)
    needs_scaler = forwarded("outcomes", Outcomes.needs_scaler)
    scale_if_loss = forwarded("outcomes", Outcomes.scale_if_loss)

    state_layout: StateLayout = forwarded("files")
    state_dict = forwarded("files", StateFiles.state_dict)
    load_state_dict = forwarded("files", StateFiles.load_state_dict)
    fits = forwarded("files", StateFiles.fits)
    rebuilt_state = forwarded("files", StateFiles.rebuilt_state)

    state: Any = forwarded("masters")
    scaled_global_norm = forwarded("masters", Updated.scaled_global_norm)
    numbered_params = forwarded("masters", Updated.numbered_params)
    own_tensors = forwarded("masters", Updated.own_tensors)
    refresh_fp32_params = forwarded("masters", Updated.refresh_fp32_params)

    param_groups: list[dict[str, Any]] = forwarded("optimizer")
    defaults: dict[str, Any] = forwarded("optimizer")

    add_param_group: Any = _TorchsOwn()
    register_step_pre_hook: Any = _TorchsOwn()
    register_step_post_hook: Any = _TorchsOwn()
    register_state_dict_pre_hook: Any = _TorchsOwn()
    register_state_dict_post_hook: Any = _TorchsOwn()
    register_load_state_dict_pre_hook: Any = _TorchsOwn()
    register_load_state_dict_post_hook: Any = _TorchsOwn()

    @property
    def cur_scale(self) -> float:
        """Upstream's other name of `loss_scale`."""
        return self.loss_scale

    def __getstate__(self) -> dict[str, Any]:
        """Return all there is, as of any object: torch's optimizers copy groups and state alone."""
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    @property
    def public_optimizer(self) -> torch.optim.Optimizer | StepSequence:
        """What `deepspeed.initialize` returns as the optimizer: this one."""
        return self

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last before a step."""
        return self.tracker.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.tracker.set_boundary(is_boundary)

    def observe(self, observer: GradientObserver) -> None:
        """Tell `observer` from now on what happens to gradients, and the one before no more."""
        self.observer.detached()
        self.observer = observer

    # The sequence

    def require_states(self, what: str) -> None:
        """Refuse `what` ("forward", or an engine's method) while state that it needs is away."""
        if self.movable is not None:
            self.movable.require_states(what)

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: object = None,
    ) -> None:
        """Go backward from the scaled loss; `engine.backward` divides for accumulation too."""
        scaled = self.outcomes.scale_if_loss(loss.float())
        scaled.backward(gradient, retain_graph, create_graph, inputs)

    def backward_prologue(self) -> None:
        self.require_states("backward")
        self._stop_asking()
        self.masters.writes.refuse_converted()
        self.idle.backward_begins()
        self.reduction.backward_prologue()

    def hold(self, params: Iterable[nn.Parameter]) -> None:
        """Reduce the gradients of `params` only in `reduce_gradients`: others add to them."""
        held = list(params)
        self.reduction.hold(held)
        if self._unused is not None:
            self._unused.count_always(held)

    def await_step(self) -> None:
        """Warn scripts, until the step or the next backward, that ask for gradients where they are
        no longer.
        """
        if self._asked is not None:
            self._asked.watch()

    def _stop_asking(self) -> None:
        if self._asked is not None:
            self._asked.stop()

    def local_gradient(self, param: torch.Tensor) -> torch.Tensor:
        """Return this rank's sum of `param`'s gradients over micro-batches before any reduction,
        made zero if there is none.

        Complete and writable between `backward_epilogue` and `reduce_gradients`: who adds to it
        what other ranks have (a parameter that pipeline stages share) must have said so with
        `hold`.
        """
        # One that is frozen for some steps has a gradient of zero, which all its ranks sum alike.
        if any(param is frozen for frozen in self.context.frozen):
            raise ValueError(
                f"local_gradient: a frozen parameter (shape {tuple(param.shape)}) has no gradient"
            )
        found = self.reduction.local_sum(param)
        return self.reduction.make_gradient(param) if found is None else found

    def step(self, closure: Callable[[], object] | None = None) -> None:  # type: ignore[override]  # it takes none
        """One optimizer step, or none if the gradient is not finite on some rank.

        Raises:
            ValueError: If a closure is given; it would run forward and backward outside the engine.
            RuntimeError: If gradients are still each rank's own, which the engine's own step never
                finds: a program has called this one at a micro-batch that does not reduce.
        """
        self.require_states("step")
        if not self.reduces_now:
            raise RuntimeError(
                "optimizer.step() at a micro-batch that has reduced no gradient yet "
                f"(gradient_accumulation_steps is {self.tracker.steps}): call engine.step() after "
                "every micro-batch, which counts them, or set gradient_accumulation_steps to 1 "
                "where the program accumulates by itself"
            )
        if closure is not None:
            raise ValueError(
                "step(closure) is not supported: run forward and backward through the engine, then "
                "call step()"
            )
        self._stop_asking()
        self._refuse_unfrozen()
        self.masters.writes.take_in()
        self.reduction.finish_gradients()
        if not (self.tracker.window.is_reduced or self.has_reduced_gradients):
            # A client's own call: the engine has reduced before it steps. What lies in the buffers
            # is the last step's.
            tell_no_backward("optimizer.step()")
            self.reduction.reduce_gradients()
            self.reduction.exit_backward()
            self.reduction.finish_gradients()
        if self._unused is not None:
            self.idle.drop(self._unused.of_window())
        self.masters.partial.leave_out(self.idle.of_step())
        outcomes = self.outcomes
        step_factor = self._step_factor
        norm = (self.masters.scaled_global_norm() * step_factor).squeeze()
        outcome = outcomes.begin(norm, self.masters.group_squares, step_factor)
        scale = outcome.scale
        self._tell_settled(step_factor / scale)
        self._refuse_unread()  # behind the observer, who says more of a gradient that was not sent
        if self._device_decides(norm):
            # Nothing waits here. The copy of the norm is queued before the update, so that a host
            # that has to wait for it does so while the device is busy with the update.
            outcomes.send(outcome)
            clip = clip_factor(norm / scale, outcomes.clip_grad)
            factor = step_factor * clip / scale
            self.masters.update(GradientScaling(factor, outcome.found_inf()))
        elif not outcomes.overflow:
            known = outcome.host_norm / scale if outcomes.clip_grad > 0 else 0.0
            clip = clip_factor(known, outcomes.clip_grad)
            self.masters.update(GradientScaling(step_factor * clip / scale))
        # The next backward needs a scale that moves. Otherwise there is time until the next step's
        # update is queued: the host runs ahead by a whole step.
        outcomes.learn_outcome(but_last=not outcomes.dynamic_loss_scale)
        self.zero_grad()

    @property
    def _step_factor(self) -> float:
        """By what the accumulated gradient is multiplied beside loss scale and clipping."""
        return self.context.reduce_rule.step_factor / self.reduction.step_divisor

    def unclipped_factor(self) -> float:
        """Return what a step would multiply gradients by now if it does not clip, to the bit."""
        return self._step_factor / self.loss_scale

    def _device_decides(self, norm: torch.Tensor) -> bool:
        """Whether the step goes on without the host's knowing the norm; see [Note: who decides]."""
        # What begins now has no state yet that a skipped step could leave alone.
        skips = takes_scaling(self.optimizer) and not self.masters.partial.begins
        can_skip = not self.check_grad_overflow or skips
        return not self.masters.waits_for_gradients and runs_ahead(norm) and can_skip

    def _tell_settled(self, factor: float) -> None:
        """Have gradients checked that the update multiplies by `factor` and the clipping's."""
        self.observer.settled(factor)

    def _refuse_unfrozen(self) -> None:
        """Refuse a parameter that was unfrozen after construction: it is in no bucket, and ranks
        would train it apart without a word.
        """
        unfrozen = sum(param.requires_grad for param in self.context.frozen)
        if unfrozen:
            raise RuntimeError(
                f"{unfrozen} parameters that were frozen when the engine was made require a "
                "gradient now; their gradients would not be reduced. Make a new engine "
                "(deepspeed.initialize) after unfreezing, or freeze them again"
            )

    def _forget_leftovers(self, params: Iterable[nn.Parameter]) -> None:
        """Drop gradients from before the engine was made, which would join its first window."""
        with torch._C.DisableTorchFunctionSubclass():
            left = [param for param in params if param.grad is not None]
            for param in left:
                param.grad = None
        if left:
            names = [self.context.name_of(param) for param in left]
            warn_once(
                f"initialize() found param.grad of {', '.join(names[:3])}"
                + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                + ", from a backward before the engine was made, and has set it to None: it would "
                "join the first step. Call backward after initialize()"
            )

    def _refuse_unread(self) -> None:
        """Refuse gradients that a script has assigned where the step does not look for them."""
        unread = self.reduction.unread_gradients()
        if unread:
            raise RuntimeError(refused_gradients([self.context.name_of(p) for p in unread]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget every gradient, reduced or not. `param.grad` becomes None either way."""
        self._stop_asking()
        self.reduction.clear()
        self.tracker.window = Window()
        self.idle.clear()
        if self._unused is not None:
            self._unused.clear()
        self.observer.cleared()

    # What observers and checkpoints ask of gradients

    @property
    def read_factor(self) -> float:
        """The factor that makes the accumulated gradient the one that is clipped and used."""
        divisor = self.reduction.step_divisor * self.loss_scale
        return self.context.reduce_rule.step_factor / divisor

    def gradient_pieces(self) -> list[GradientPiece]:
        return self.masters.gradient_pieces(self.reduction.sums_in)

    def _params(self) -> list[nn.Parameter]:
        return [param for params in self.masters.numbered_params() for param in params]

    @property
    def has_gradients(self) -> bool:
        """Whether this rank has summed anything since all gradients were forgotten."""
        has_begun = bool(self.reduction.groups) and self.tracker.window.is_plain is not None
        return has_begun or any(param.grad is not None for param in self._params())

    def gradient_layout(self) -> str:
        return self.reduction.layout()

    def window_state(self) -> dict[str, Any]:
        """Return what this rank has summed since the last step, reduced or not; no copies."""
        summed = self.reduction.window_state()
        grads = [param.grad for param in self._params()]
        kept: dict[str, Any] = {
            "divisor": self.accumulation_divisor,
            "frozen": self.idle.window_state(),
        }
        if self._unused is not None:
            kept["used"] = self._unused.window_state()
        return {"gradients": grads, **kept, **summed}

    @torch.no_grad()
    def load_window_state(self, saved: Mapping[str, Any]) -> None:
        for param, grad in zip(self._params(), saved["gradients"], strict=True):
            if grad is not None:
                self.reduction.make_gradient(param).copy_(grad)
        self.accumulation_divisor = saved["divisor"]
        self.idle.load_window_state(saved.get("frozen"))
        if self._unused is not None and "used" in saved:
            self._unused.load_window_state(saved["used"])
        self.reduction.load_window_state(saved)

    def destroy(self) -> None:
        self._stop_asking()
        if self._unused is not None:
            self._unused.destroy()
        if self.movable is not None:
            self.movable.reload_states()
        self.reduction.destroy()
        self.masters.destroy()


DeepSpeedOptimizer = StepSequence
"""Upstream's name of the base class of all that `deepspeed.initialize` returns as optimizers."""
