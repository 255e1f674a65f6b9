"""Steps that leave parameters out: `PartialSteps`. See [Note: parameters that miss a step] in
`sharding.parameter_histories`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from deepspeed.ops.parameter_runs import ElementRun, stepped_by_runs
from deepspeed.ops.whole_parameters import WholeParameterOptimizer
from deepspeed.runtime.optimizers.owner_steps import OwnerSteps
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.sharding.parameter_histories import ParameterHistories


class PartialSteps:
    """Lets an optimizer of flat groups leave some of the model's parameters as they are.

    Args:
        groups: The groups that the optimizer steps.
        names: The names of each group's parameters.
        optimizer: Has a flat shard of each group, or (`per_param`) a master of each parameter.

    Attributes:
        runs: By flat shard, the elements that the coming step updates; of others all.
    """

    def __init__(
        self,
        groups: Sequence[ShardedGroup],
        names: Sequence[Sequence[str]],
        optimizer: torch.optim.Optimizer,
        per_param: bool = False,
    ) -> None:
        self._groups = groups
        self._names = names
        self._optimizer = optimizer
        self._per_param = per_param
        self._histories: list[ParameterHistories] = []
        if not per_param and not isinstance(optimizer, OwnerSteps):
            pairs = zip(groups, names, strict=True)
            self._histories = [ParameterHistories(group, own, optimizer) for group, own in pairs]
        self._left_out: Collection[nn.Parameter] = ()
        self.runs: dict[torch.Tensor, list[ElementRun]] = {}
        self._beside: PartialSteps | None = None

    def join(self, beside: PartialSteps) -> None:
        """Have another optimizer, of other groups, leave out the same parameters."""
        self._beside = beside

    def leave_out(self, params: Collection[nn.Parameter]) -> None:
        """Have the coming step leave these as they are; all ranks say the same."""
        self._left_out = params
        planned = {one.flat: one.begin(params) for one in self._histories}
        self.runs = {flat: runs for flat, runs in planned.items() if runs is not None}
        if self._beside is not None:
            self._beside.leave_out(params)

    @property
    def begins(self) -> bool:
        """Whether parameters begin in the coming step that others have begun before."""
        begins = any(run.is_new for runs in self.runs.values() for run in runs)
        return begins or (self._beside is not None and self._beside.begins)

    def stepping(self) -> AbstractContextManager[None]:
        """Enter while the optimizer steps, if it does not know runs by itself."""
        if self._per_param:
            return self._without_gradients()
        if isinstance(self._optimizer, OwnerSteps):
            return self._optimizer.leaving_out(self._left_out_names())
        if isinstance(self._optimizer, WholeParameterOptimizer):
            return self._optimizer.stepping(self.runs)
        return stepped_by_runs(self._optimizer, self.runs) if self.runs else nullcontext()

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        for group in self._groups:
            for master, param in zip(group.masters, group.params, strict=True):
                if param in self._left_out:
                    master.grad = None
        yield

    def _left_out_names(self) -> set[str]:
        return {
            name
            for names, group in zip(self._names, self._groups, strict=True)
            for name, param in zip(names, group.params, strict=True)
            if param in self._left_out
        }

    def end(self) -> None:
        """Keep what the step has left of counts."""
        for one in self._histories:
            one.end()
        self.runs = {}
