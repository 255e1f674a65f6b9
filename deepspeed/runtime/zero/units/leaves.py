"""Leaves of autograd for micro-batches whose backwards run as one (`engine_parts.vertical`).

One node of autograd adds up all that a backward brings a parameter. So each micro-batch reads, as
attributes of modules, parameters of its own, in the memory of the model's: what comes to them is
that micro-batch's gradient as it would be alone, and each is reduced by itself.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import nn

from deepspeed.runtime.gradients.bucket_hooks import BucketHooks
from deepspeed.runtime.gradients.readiness import ReadinessTracker
from deepspeed.runtime.gradients.reduction import GradientContext
from deepspeed.runtime.module_hooks.parameter_reads import ParameterDict
from deepspeed.runtime.zero.parameters.zero_parameter import (
    ShardedParameter,
    record_of,
    whole_value,
)
from deepspeed.utils.exceptions import MisuseError


class MicroBatchLeaves:
    """Leaves of `count` micro-batches, of which one is at hand: for what is read, counted and sent.

    Args:
        hooks: Of the reduction: which parameters it hooks, and what it has sent.
        context: What the reduction knows.
        arrived: The body of its hooks, given a leaf and its parameter's slot.
    """

    def __init__(
        self,
        count: int,
        hooks: BucketHooks,
        context: GradientContext,
        arrived: Callable[[torch.Tensor, int], None],
    ) -> None:
        self._hooks, self._context, self._arrived = hooks, context, arrived
        self._first_step = context.tracker.micro_steps
        self._outer = hooks.readiness
        self._readiness = [_unused(hooks.readiness) for _ in range(count)]
        self._leaves: list[dict[torch.Tensor, nn.Parameter]] = [{} for _ in range(count)]
        self._sent: Counter[int] = Counter()
        self._slots = {param: slot for slot, (_, param) in enumerate(hooks.slots)}
        self.select(0)

    def select(self, number: int) -> None:
        """Have this micro-batch at hand."""
        self._own = self._leaves[number]
        self._number = number
        self._hooks.readiness = self._readiness[number]
        tracker = self._context.tracker
        tracker.micro_steps, tracker.backwards = self._first_step + number, number

    def leaf_of(self, param: nn.Parameter) -> nn.Parameter:
        """What the micro-batch at hand computes with where a module has `param`."""
        is_used = param.requires_grad and torch.is_grad_enabled()
        if not is_used or type(param) is ShardedParameter:
            return param
        leaf = self._own.get(param)
        if leaf is None:
            leaf = self._own[param] = self._made(param)
        elif leaf.data_ptr() != param.data_ptr():  # it was gathered again
            leaf.data = whole_value(param)
        return leaf

    def _made(self, param: nn.Parameter) -> nn.Parameter:
        own = (not record_of(param).persists) + self._hooks.are_set
        hooks = (param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None))
        if sum(len(each or ()) for each in hooks) > own:
            raise MisuseError(
                f"train_batch(): {self._context.name_of(param)} has a hook of the script's, which "
                "would not be called; use engine.backward(loss) and engine.step() instead"
            )
        leaf = nn.Parameter(param.detach())  # a write to it counts as one to the parameter
        leaf.__dict__.update({key: own for key, own in vars(param).items() if key != "_zero3"})
        if self._hooks.are_set:
            leaf.register_post_accumulate_grad_hook(
                partial(self._came, self._number, self._slots[param])
            )
        return leaf

    def _came(self, number: int, slot: int, leaf: torch.Tensor) -> None:
        self.select(number)
        self._arrived(leaf, slot)

    def sum_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """The gradient of `param` in the micro-batch at hand, if there is one."""
        self.refuse_others([param])
        leaf = self._own.get(param)
        return None if leaf is None else leaf.grad

    def refuse_others(self, params: Iterable[nn.Parameter]) -> None:
        """Raise if something has come to the model's own parameters: nobody knows of which."""
        for param in params:
            if param.grad is not None:
                raise MisuseError(
                    f"train_batch(): a gradient of {self._context.name_of(param)} came past its "
                    "module's attribute, so that it belongs to no micro-batch: by reentrant "
                    "checkpointing (use torch.utils.checkpoint with use_reentrant=False), or by a "
                    "parameter that is kept elsewhere. Or use engine.backward(loss) and "
                    "engine.step() instead"
                )

    def in_turn(self) -> Iterator[int]:
        """Have all micro-batches at hand, one after the other, when backward is over."""
        self.refuse_others(param for _, param in self._hooks.slots)
        for number in range(len(self._leaves)):
            self.select(number)
            yield number

    def comes_next(self, bucket: int) -> bool:
        """Whether the micro-batches before the one at hand have sent theirs of a bucket."""
        return self._sent[bucket] == self._number

    def sent(self, bucket: int, params: Iterable[nn.Parameter]) -> None:
        """Let go of what the micro-batch at hand has sent of a bucket."""
        self._sent[bucket] += 1
        for param in params:
            leaf = self._own.get(param)
            if leaf is not None:
                leaf.grad = None

    def close(self) -> None:
        self._hooks.readiness = self._outer
        for own in self._leaves:
            own.clear()


def _unused(readiness: ReadinessTracker) -> ReadinessTracker:
    """One that expects the same, and is told by an error of what it does not know."""
    one = copy.copy(readiness)
    one.reset()
    one.learned = True
    return one


class LeafParameters(ParameterDict):
    """The `_parameters` of a module, which hand out the leaves of the micro-batch at hand."""

    def __init__(self, own: ParameterDict, leaves: MicroBatchLeaves) -> None:
        super().__init__(own)
        self._leaves = leaves

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        return None if param is None else self._leaves.leaf_of(param)
