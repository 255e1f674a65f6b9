"""The order of an optimizer step, the same for every stage and precision: `StepSequence`.

Finish gradients -> norm -> skip if it is not finite, or unscale, clip and update -> tell the loss
scaler -> clear. Stages differ in who owns which shard, where gradients are reduced to and when;
that is in their own files. What clients ask and set of any optimizer is in `client_methods`; master
weights over sharded groups, which most of them have, are in `master_weights`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.checkpoint.constants import MASTER_KEYS
from deepspeed.runtime.fp16.loss_scaler import LossScaler, LossScalerBase
from deepspeed.runtime.gradients.accumulation import AccumulationTracker, Window
from deepspeed.runtime.gradients.norm import clip_factor
from deepspeed.runtime.gradients.observer import UNOBSERVED, GradientObserver
from deepspeed.runtime.gradients.reduce_rule import ReduceRule
from deepspeed.runtime.gradients.scope import GradientPiece
from deepspeed.runtime.optimizers.client_methods import ClientMethods
from deepspeed.runtime.optimizers.state_layout import OwnTensor, StateLayout
from deepspeed.runtime.optimizers.step_outcome import (
    GradientScaling,
    StepOutcome,
    takes_scaling,
)
from deepspeed.runtime.sharding.loading_in_place import load_apart
from deepspeed.runtime.streams import LateNumber, runs_ahead
from deepspeed.utils.logging import log_dist, log_once


def tell_no_backward(what: str) -> None:
    """Warn that `what` found no gradient on this rank, once per process."""
    log_once(
        f"{what} without a backward since the last step, on rank {dist.get_rank()}: this rank adds "
        "zeros to the gradient. The step is taken and counted all the same, because other ranks "
        "may have a gradient; if none has, only momentum, weight decay and the schedule move. Call "
        "step() after a backward only, on all ranks alike"
    )


class StepSequence(ClientMethods, ABC):
    """The order of an optimizer step, the same for every stage and precision.

    Args:
        init_optimizer: The torch optimizer that does the arithmetic.
        clip_grad: Maximum global gradient norm; 0 disables clipping.
        tracker: Who knows what is the boundary.
        reduce_rule: Who knows by what gradients are scaled.
        loss_scaler: State machine of the loss scale; static 1 when no scaling is needed.
        check_grad_overflow: Skip steps whose gradient is not finite.
        dp_process_group: Ranks that hold the same dense parameters and average their gradients;
            None is the world.
        expert_data_parallel_group: By `param.group_name`, the ranks that hold the same experts.
        norm_group: Ranks over which squared sums are added for the norm; None: this rank counts
            everything itself.
        counts_in_norm: Whether this rank counts a parameter in the norm (False for a replica that
            another rank counts).
        num_norm_groups: Length of the norm's tensor, the same on all ranks; None: the number of
            parameter groups here.
        device: Device of the model, for a rank that has no trainable parameter to ask.
        allow_empty: Other ranks hold other parts of the model, so this one may have no trainable
            parameter.

    Raises:
        ValueError: If there is no trainable parameter and `allow_empty` is not set.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        *,
        clip_grad: float = 0.0,
        tracker: AccumulationTracker | None = None,
        reduce_rule: ReduceRule | None = None,
        loss_scaler: LossScalerBase | None = None,
        check_grad_overflow: bool = True,
        dp_process_group: dist.Group = None,
        expert_data_parallel_group: Mapping[str, dist.Group] | None = None,
        norm_group: dist.Group = None,
        counts_in_norm: Callable[[nn.Parameter], bool] | None = None,
        num_norm_groups: int | None = None,
        device: torch.device | None = None,
        allow_empty: bool = False,
    ) -> None:
        self.optimizer = init_optimizer
        params = [p for group in init_optimizer.param_groups for p in group["params"]]
        trainable = next((param for param in params if param.requires_grad), None)
        if trainable is None and not allow_empty:
            raise ValueError(
                "the optimizer has no trainable parameter: check requires_grad and model_parameters"
            )
        self.device = trainable.device if trainable is not None else device or torch.device("cpu")
        self.dp_process_group = (
            dp_process_group if dp_process_group is not None else dist.get_world_group()
        )
        self.expert_data_parallel_group = dict(expert_data_parallel_group or {})
        self.norm_group = norm_group
        self.num_norm_groups = num_norm_groups or len(init_optimizer.param_groups)
        self._counts_in_norm = counts_in_norm
        self.clip_grad = clip_grad
        self.tracker = tracker or AccumulationTracker(steps=1)
        self.reduce_rule = reduce_rule or ReduceRule(world=dist.get_world_size())
        self._scaler = loss_scaler or LossScaler(scale=1.0)
        self.check_grad_overflow = check_grad_overflow
        # Of the last step; and of those that the host still has to learn of, oldest first.
        self._outcome: StepOutcome | None = None
        self._applied: StepOutcome | None = None  # the last that was not skipped
        self._unknown: deque[StepOutcome] = deque()
        self._overflow = False
        # One is on its way while the one before is read.
        self._late_norms = deque((LateNumber(), LateNumber()))
        # Reduced, `[num_norm_groups]`, of the gradient as accumulated.
        self._group_squares: torch.Tensor | None = None
        self._group_norm_factor = 1.0
        self._frozen = [param for param in params if not param.requires_grad]
        # Set by the engine: what a plain loss.backward() has left undivided.
        self.accumulation_divisor = 1.0
        self.observer: GradientObserver = UNOBSERVED
        # Steps that were skipped, as far as the host knows; see `learn_outcome`.
        self.skipped_steps = 0

    def require_states(self, what: str) -> None:
        """Before `what` ("forward", "backward", "step", or a method of the engine's): see that the
        state that it needs is on the device.
        """

    # Gradients: what a stage provides

    def backward_prologue(self) -> None:
        """Before the first gradient of a backward."""

    def backward_epilogue(self) -> None:
        """After the last gradient of a backward, before any reduction: accumulate what is not
        accumulated yet.
        """

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Reduce what this micro-batch has to reduce; every rank issues the same collectives."""

    def exit_backward(self) -> None:
        """After reduction: forget the state of this backward."""

    @property
    def reduces_now(self) -> bool:
        """Whether the micro-batch at hand is one that reduces: the boundary, and at ZeRO-2 each."""
        return self.tracker.is_boundary and not self.tracker.in_no_sync

    @property
    def has_reduced_gradients(self) -> bool:
        """Whether something was reduced since all gradients were forgotten."""
        return True  # only the engine steps what is no client's optimizer

    @property
    def works_during_backward(self) -> bool:
        """Whether something is done with gradients, from hooks, before backward is over."""
        return False

    def finish_gradients(self) -> None:
        """Return when all reductions are complete."""

    def local_gradient(self, param: torch.Tensor) -> torch.Tensor:
        """This rank's sum of `param`'s gradients over micro-batches before any reduction, made zero
        if there is none.

        Complete and writable between `backward_epilogue` and `reduce_gradients`: who adds to it
        what other ranks have (a parameter that pipeline stages share) must have said so with
        `hold`.

        Raises:
            ValueError: If the parameter is frozen.
        """
        if not param.requires_grad:
            raise ValueError(
                f"local_gradient: a frozen parameter (shape {tuple(param.shape)}) has no gradient"
            )
        return self._make_gradient(param) if param.grad is None else param.grad

    def _make_gradient(self, param: torch.Tensor) -> torch.Tensor:
        """Give `param` a gradient of zeros."""
        param.grad = torch.zeros_like(param)
        return param.grad

    def hold(self, params: Iterable[nn.Parameter]) -> None:
        """Reduce the gradients of `params` only in `reduce_gradients`: they are not complete when
        their hooks fire.

        An optimizer that reduces nothing from hooks has nothing to do. Called on all data-parallel
        ranks alike, before training.
        """

    def _replicas(self, expert_group: str | None) -> dist.Group:
        """The ranks that average the gradients of dense parameters (None), or of the experts of
        this group name.
        """
        if expert_group is None:
            return self.dp_process_group
        if expert_group not in self.expert_data_parallel_group:
            raise ValueError(
                f"experts of group {expert_group!r}: expert_data_parallel_group knows "
                f"{sorted(self.expert_data_parallel_group)}; make the groups first "
                "(deepspeed.moe.layer.MoE.set_deepspeed_parallelism, or deepspeed.initialize does)"
            )
        return self.expert_data_parallel_group[expert_group]

    @abstractmethod
    def scaled_global_norm(self) -> torch.Tensor:
        """Norm of the whole model's gradient as accumulated (times the loss scale), fp32, shape
        `[1]`.
        """

    def _norm_of(self, squares: torch.Tensor) -> torch.Tensor:
        """The norm from reduced squared sums per group, `[num_norm_groups]`, which are kept for
        `group_grad_norms`.
        """
        self._group_squares = squares
        return squares.sum(0, keepdim=True).sqrt_()

    @abstractmethod
    def _update(self, scaling: GradientScaling) -> None:
        """Optimizer step with scaled gradients."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget every gradient, reduced or not. Subclasses' ends with this one."""
        self.tracker.window = Window()
        self.observer.cleared()

    @abstractmethod
    def gradient_pieces(self) -> list[GradientPiece]:
        """Where reduced gradients lie, for observers: all pieces of all parameters, in an order
        that is the same on all ranks.
        """

    def observe(self, observer: GradientObserver) -> None:
        """Tell `observer` from now on what happens to gradients, and the one before no more."""
        self.observer.detached()
        self.observer = observer

    def _settle(self, factor: float) -> None:
        """Have the gradients checked that the update is about to multiply by `factor` and the
        clipping factor.
        """
        self.observer.settled(factor)

    # The sequence

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One optimizer step, or none if the gradient is not finite on some rank.

        Raises:
            ValueError: If a closure is given; it would run forward and backward outside the engine.
            RuntimeError: If gradients are still each rank's own, which the engine's own step never
                finds: a program has called this one at a micro-batch that does not reduce.
        """
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
        self._refuse_unfrozen()
        self.finish_gradients()
        if not (self.tracker.window.is_reduced or self.has_reduced_gradients):
            # A client's own call: the engine has reduced before it steps. What lies in the buffers
            # is the last step's.
            tell_no_backward("optimizer.step()")
            self.reduce_gradients()
            self.exit_backward()
            self.finish_gradients()
        step_factor = self.reduce_rule.step_factor / self._step_divisor
        norm = (self.scaled_global_norm() * step_factor).squeeze()
        scale = self._used_scale()
        self._group_norm_factor = step_factor / scale
        self._outcome = StepOutcome(norm, scale, self.check_grad_overflow)
        self._unknown.append(self._outcome)
        self._settle(step_factor / scale)
        if self._device_decides(norm):
            # Nothing waits here. The copy of the norm is queued before the update, so that a host
            # that has to wait for it does so while the device is busy with the update.
            self._outcome.send(self._late_norms[0])
            self._late_norms.rotate()
            clip = clip_factor(norm / scale, self.clip_grad)
            factor = step_factor * clip / scale
            self._update(GradientScaling(factor, self._outcome.found_inf()))
        elif not self.overflow:
            known = self._outcome.host_norm / scale if self.clip_grad > 0 else 0.0
            self._update(GradientScaling(step_factor * clip_factor(known, self.clip_grad) / scale))
        # The next backward needs a scale that moves. Otherwise there is time until the next step's
        # update is queued: the host runs ahead by a whole step.
        self.learn_outcome(but_last=not self.dynamic_loss_scale)
        self.zero_grad()

    def _device_decides(self, norm: torch.Tensor) -> bool:
        """Whether the step goes on without the host's knowing the norm; see [Note: who decides]."""
        return runs_ahead(norm) and (not self.check_grad_overflow or takes_scaling(self.optimizer))

    def learn_outcome(self, but_last: bool = False) -> None:
        """Let the host know which steps were skipped, which may wait for the device: the scale
        moves on, and skips are counted and logged.

        Called before anything that depends on it is read. Where no step is skipped nothing waits.

        Args:
            but_last: Of the last step it need not know yet.

        Raises:
            RuntimeError: If the scale cannot shrink any more; see `DynamicLossScaler`.
        """
        while len(self._unknown) > int(but_last):
            outcome = self._unknown.popleft()
            self._overflow = outcome.is_skipped
            self._scaler.update_scale(self._overflow)
            if self._overflow:
                self.skipped_steps += 1
                self._report_skip(outcome.scale)
            else:
                self._applied = outcome

    def _refuse_unfrozen(self) -> None:
        """A parameter unfrozen after construction is in no bucket: ranks would train it apart
        without a word.
        """
        unfrozen = sum(param.requires_grad for param in self._frozen)
        if unfrozen:
            raise RuntimeError(
                f"{unfrozen} parameters that were frozen when the engine was made require a "
                "gradient now; their gradients would not be reduced. Make a new engine "
                "(deepspeed.initialize) after unfreezing, or freeze them again"
            )

    def _used_scale(self) -> float:
        """The scale that the gradients at hand carry: the scaler moves on when the outcome of their
        step is known.
        """
        return float(self._scaler.loss_scale)

    def _report_skip(self, scale: float) -> None:
        new_scale = self._scaler.loss_scale
        detail = (
            f"loss scale {scale:g} -> {new_scale:g}"
            if scale != new_scale or scale != 1.0
            else "no loss scaling"
        )
        message = (
            f"step skipped on all ranks: the gradient is not finite ({detail}); parameters are "
            "unchanged"
        )
        log_dist(message, ranks=[0], level=logging.WARNING)

    @property
    def _step_divisor(self) -> float:
        """What is left of `accumulation_divisor` to be divided by at the step.

        Gradients that live in `param.grad` are divided here: their buffer is averaged again by a
        second backward at the boundary, and a division per average would count twice.
        """
        return 1.0

    # State in checkpoints. The answers here are those of an optimizer that updates the model's own
    # parameters, each whole on every rank that has it.

    @property
    def state_layout(self) -> StateLayout:
        """How the state lies in files."""
        return StateLayout()

    def numbered_params(self) -> list[list[nn.Parameter]]:
        """The model's parameters by group, in the order in which the state numbers them or, flat,
        lays them out.
        """
        return [group["params"] for group in self.param_groups]

    def own_tensors(self) -> Iterator[OwnTensor]:
        """Every tensor that the wrapped optimizer updates, in its order."""
        for index, params in enumerate(self.numbered_params()):
            for param in params:
                yield OwnTensor.of_param(param, index, param, required=param.requires_grad)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's tensors."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = True,
    ) -> None:
        """Restore what `state_dict` returned.

        Args:
            state_dict: As `state_dict()` returned it on this rank.
            load_optimizer_states: Restore moments and hyper-parameters, not only masters.
            load_from_fp32_weights: Restore masters, where there are any; otherwise round them up
                from the model-precision weights.
        """
        if load_optimizer_states:
            load_apart(self.optimizer, state_dict)

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether `saved`, of a run that is divided over its ranks as this one is, could be of this
        rank's `state_dict`; otherwise it is resharded.
        """
        return not MASTER_KEYS & saved.keys()

    def rebuilt_state(
        self, base: dict[str, Any], masters: Sequence[torch.Tensor], scaler: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What `state_dict` would return if this were the state.

        Args:
            base: State dict of the wrapped optimizer.
            masters: The master of each of `own_tensors`, in its shape in files; padding is zero.
            scaler: State of the loss scale, of whatever kind of scaler; may be empty.
        """
        return base

    # The accumulation window in checkpoints

    @property
    def has_gradients(self) -> bool:
        """Whether this rank has summed anything since all gradients were forgotten."""
        return any(param.grad is not None for params in self.numbered_params() for param in params)

    def gradient_layout(self) -> str:
        """How gradients lie in this rank's buffers: equal where they lie alike."""
        return ""

    def window_state(self) -> dict[str, Any]:
        """What this rank has summed since the last step, reduced or not, between two backwards; the
        tensors themselves.
        """
        grads = [param.grad for params in self.numbered_params() for param in params]
        return {"gradients": grads, "divisor": self.accumulation_divisor}

    @torch.no_grad()
    def load_window_state(self, saved: Mapping[str, Any]) -> None:
        """Go on where `window_state` of an equal run was; all gradients were forgotten."""
        params = [param for params in self.numbered_params() for param in params]
        for param, grad in zip(params, saved["gradients"], strict=True):
            if grad is not None:
                self._make_gradient(param).copy_(grad)
        self.accumulation_divisor = saved["divisor"]

    def refresh_fp32_params(self) -> None:
        """Masters, where there are any, <- model-precision parameters (after loading or editing
        weights).
        """

    def destroy(self) -> None:
        """Remove hooks and let go of buffers."""
