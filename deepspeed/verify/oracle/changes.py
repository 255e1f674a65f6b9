"""What two runs change in their own model while they train, and what has to come of it: parameters
that are frozen later, and writes into the model. Collective.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from deepspeed.runtime.zero.parameters.zero_parameter import is_zero_param
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.verify.oracle.plan import FROZEN_STEPS, RunKind
from deepspeed.verify.oracle.reference import Tensors


class Changes:
    """Changes every second of `params` between steps. A run of another kind changes nothing."""

    def __init__(self, kind: RunKind, params: Mapping[str, nn.Parameter]) -> None:
        self._kind = kind
        self.params = params
        self._before: Tensors = {}

    @classmethod
    def of(cls, kind: RunKind, params: Mapping[str, nn.Parameter]) -> Changes:
        """Choose what is changed: the first parameter stays, so that there is a gradient."""
        return cls(kind, {name: params[name] for name in list(params)[1::2]})

    @property
    def looks_before(self) -> bool:
        """Whether the run compares weights."""
        return self._kind in (RunKind.FROZEN, RunKind.WRITTEN)

    def before_step(self, step: int, weights: Tensors) -> None:
        """Change the model; `weights` are the masters of `params`, or the parameters."""
        if self._kind is RunKind.FROZEN and step in (1, FROZEN_STEPS - 1):
            self._before = weights
            for param in self.params.values():
                param.requires_grad_(step != 1)
        if self._kind is RunKind.WRITTEN and step == 1:
            self._before = weights
            self._halve()

    @torch.no_grad()
    def _halve(self) -> None:
        params = list(self.params.values())
        if any(map(is_zero_param, params)):
            with GatheredParameters(params, modifier_rank=0):
                for param in params:
                    param.mul_(0.5)
            return
        for param in params:
            param.mul_(0.5)

    def after_step(self, step: int, weights: Tensors) -> None:
        """Raise RuntimeError, naming a parameter, if the step has made something else of it."""
        if self._kind is RunKind.FROZEN and 1 <= step < FROZEN_STEPS - 1:
            for name, before in self._before.items():
                if not torch.equal(weights[name], before):
                    moved = (weights[name] - before).abs().max().item()
                    raise RuntimeError(
                        f"{name} moved by {moved:.2e} at step {step}, and was frozen before it "
                        "(requires_grad_(False))"
                    )
        if self._kind is RunKind.WRITTEN and step == 1:
            for name, before in self._before.items():
                back = (weights[name] - before).norm().item()
                on = (weights[name] - before / 2).norm().item()
                if back < on:
                    raise RuntimeError(
                        f"a write to {name} between steps (param.mul_(0.5)) was put back by the "
                        f"next one: it ends {back:.2e} from the weights before the write, and "
                        f"{on:.2e} from those written"
                    )
