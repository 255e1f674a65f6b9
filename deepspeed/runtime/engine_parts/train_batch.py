"""A whole step by one call: `train_batch` of engines that are no pipelines.

At stage 3 its micro-batches pass the model's units together (`vertical`), elsewhere one after
the other. What is computed is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.engine_parts.engine_state import EngineState
from deepspeed.runtime.engine_parts.losses import check_loss, mean_of_all
from deepspeed.runtime.engine_parts.vertical import Turns, refuse_shared_nodes
from deepspeed.runtime.gradients.observer import UNOBSERVED
from deepspeed.runtime.utils import move_to_device
from deepspeed.runtime.zero.stage3 import Units
from deepspeed.runtime.zero.units.leaves import MicroBatchLeaves
from deepspeed.utils.exceptions import MisuseError

LossOf = Callable[[Any, Any], torch.Tensor]


def loss_of_model(engine: Any, batch: Any) -> torch.Tensor:
    """The loss that a model returns, or has as `loss` in what it returns. A mapping is given by
    name, a list or a tuple by position.
    """
    if isinstance(batch, Mapping):
        output = engine(**batch)
    else:
        output = engine(*batch) if isinstance(batch, (tuple, list)) else engine(batch)
    if isinstance(output, Mapping):
        return output["loss"]
    found: torch.Tensor = getattr(output, "loss", output)
    return found


class WholeSteps:
    """Whole steps of one engine."""

    def __init__(self, engine: EngineState) -> None:
        self._engine: Any = engine
        self._batches: Iterator[Any] | None = None

    def train_batch(
        self, data_iter: Iterator[Any] | None = None, loss_fn: LossOf | None = None
    ) -> torch.Tensor:
        """Run `gradient_accumulation_steps` micro-batches and one optimizer step on all ranks.

        At ZeRO stage 3 all of them go through a unit before the next one is gathered, so that
        parameters are gathered, and read from where they are offloaded to, once for all; gradients,
        losses and the step are to the bit those of `engine.backward(loss)` and `engine.step()` for
        each. See docs/offload.md for what it costs, and for random numbers.

        Args:
            data_iter: Gives one micro-batch of this rank at a time, which is moved to the device;
                None: that of the call before, or `training_dataloader`, over and over.
            loss_fn: Gives the loss of a micro-batch, its mean, calling the engine that it is given;
                None: the model is called with the batch, and returns it, alone or as `loss`.

        Returns:
            Mean loss over micro-batches and data-parallel ranks, fp32, 0-dim, on all ranks.
        """
        engine = self._engine
        engine._require_optimizer("train_batch")
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() needs gradients, but they are disabled here")
        self._refuse_begun()
        goes_together = self._goes_together()
        steps, loss_of = engine.tracker.steps, loss_fn or loss_of_model
        batches = [move_to_device(self._next(data_iter), engine.device) for _ in range(steps)]
        if goes_together:
            losses = self._train_together([partial(loss_of, engine, batch) for batch in batches])
        else:
            losses = []
            while batches:
                losses.append(loss_of(engine, batches.pop(0)))
                engine.backward(losses[-1])
                losses[-1] = losses[-1].detach()
                if batches:
                    engine.step()
        mean = self._mean(losses)
        engine.step()
        return mean

    def _next(self, data_iter: Iterator[Any] | None) -> Any:
        if data_iter is not None:
            self._batches = data_iter
        elif self._batches is None:
            if self._engine.training_dataloader is None:
                raise MisuseError(
                    "train_batch(): no data: give data_iter, or initialize(training_data=...)"
                )
            self._batches = iter(RepeatingLoader(self._engine.training_dataloader))
        return next(self._batches)

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        axis, device = self._engine.parallel_map.data, self._engine.device
        scalars = [loss.detach().float().reshape(()) for loss in losses]
        return mean_of_all(scalars, (len(losses), axis.size), axis.rank, device, axis.group)

    # Whether micro-batches go together

    def _refuse_begun(self) -> None:
        engine = self._engine
        engine._refuse_unmanaged("train_batch")
        tracker = engine.tracker
        if tracker.window.is_plain is not None or tracker.micro_steps % tracker.steps:
            raise MisuseError(
                "train_batch() in the middle of an accumulation window: end it by engine.step(), "
                "or forget it by engine.zero_grad()"
            )
        if tracker.in_no_sync or tracker.is_set:
            raise MisuseError(
                "train_batch() runs a whole step: leave no_sync(), and "
                "set_gradient_accumulation_boundary() out"
            )

    def _goes_together(self) -> bool:
        engine = self._engine
        offload, tree = engine.parameter_offload, engine._config.tree
        if offload is None or not offload.units or engine.tracker.steps == 1:
            return False
        is_compiled = any(
            module._compiled_call_impl is not None or "_orig_mod" in module._modules
            for module in offload.module.modules()
        )
        found = {
            "a compiled model": engine.is_compiled or is_compiled,
            "verify.ledger": engine._sequence.observer is not UNOBSERVED,
            "flops_profiler.enabled": tree.flops_profiler.enabled,
            "sequence parallelism": engine.parallel_map.sequence.size > 1,
            "tensor parallelism": engine.mp_world_size > 1,
            "enable_backward_allreduce = False": not engine.enable_backward_allreduce,
        }
        named = [name for name, is_there in found.items() if is_there]
        if named:
            raise MisuseError(
                f"train_batch() at ZeRO stage 3 does not go with {', '.join(named)}: leave it out, "
                "or use engine.backward(loss) and engine.step() for each micro-batch"
            )
        return True

    # Together

    def _train_together(self, forwards: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        engine = self._engine
        with self._leaves(len(forwards)) as leaves:
            pairs = self._forward(forwards, leaves)
            refuse_shared_nodes([scaled for _, scaled in pairs], engine.module)
            losses = [loss.detach() for loss, _ in pairs]
            engine._begin_managed_backward()
            for loss in losses:
                engine._losses.show(loss, True)
            try:
                torch.autograd.backward([scaled for _, scaled in pairs])
                del pairs
                engine._backward_epilogue()
            except BaseException:
                leaves.select(0)
                engine._abort_backward()
                raise
        return losses

    @contextmanager
    def _leaves(self, count: int) -> Iterator[MicroBatchLeaves]:
        units: Units = self._engine._sequence.reduction
        arrived = units.reduce_ready_partitions_and_remove_grads
        units.leaves = MicroBatchLeaves(count, units.hooks, units.context, arrived)
        try:
            yield units.leaves
        finally:
            units.leaves.close()
            units.leaves = None

    def _forward(
        self, forwards: list[Callable[[], torch.Tensor]], leaves: MicroBatchLeaves
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each micro-batch's loss, and what backward starts from."""
        engine, initial = self._engine, torch.initial_seed()

        def forward(own: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            loss = own()
            check_loss("train_batch", loss, needs_graph=True)
            if engine.tracker.window.is_plain is not None:
                raise MisuseError(
                    "train_batch(): loss_fn returns a loss; no backward is its to run"
                )
            return loss, engine._losses.scaled(engine._sequence, loss, True)

        def seed(number: int) -> None:
            engine._seed_forward(number, initial)

        both = [partial(forward, own) for own in forwards]
        seeds = None if engine.training and engine._seeds_forwards else seed
        with engine.timers.one_forward(engine.training):
            return Turns(engine.parameter_offload, leaves, both, seeds).run()
