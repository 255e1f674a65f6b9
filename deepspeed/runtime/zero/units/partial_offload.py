"""Partial offload (`offload_optimizer.ratio`): of each rank's masters and moments a part on the
host, the rest on the device, each updated where it is.

The first parameters of an optimizer group stay on the device, the last go to the host: their
gradients come first in backward, and are on the host by the time that it ends. Both parts are
groups of the masters, so that only a step and files need know, which are those of any ratio.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import runs_ahead
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.host_optimizer import HostOptimizer
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.parameter_runs import STATE_BY_PARAMETER
from deepspeed.runtime.optimizers.partial_steps import PartialSteps
from deepspeed.runtime.optimizers.step_outcome import GradientScaling
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.sharding.loading_in_place import load_apart, load_in_place

State = Mapping[str, Any]


def num_kept(numels: Sequence[Sequence[int]], ratio: float) -> list[int]:
    """Choose how many of the first parameters (of these elements, by group) stay on the device: so
    many that what goes to the host, of this group and those before it, is as close to `ratio` of
    them as it gets.
    """
    found = []
    total = on_host = 0.0
    for sizes in numels:
        total += sum(sizes)
        left = [sum(sizes) - start for start in accumulate(sizes, initial=0)]
        wanted = ratio * total - on_host
        kept = min(range(len(left)), key=lambda first: (abs(left[first] - wanted), first))
        on_host += left[kept]
        found.append(kept)
    return found


def has_device_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a device optimizer does what this one does on the host, with its state."""
    return not isinstance(optimizer, HostOptimizer) or isinstance(
        optimizer, DeepSpeedCPUAdam | DeepSpeedCPULion
    )


def _device_optimizer(
    optimizer: torch.optim.Optimizer, masters: Sequence[Sequence[nn.Parameter]]
) -> torch.optim.Optimizer:
    """An optimizer like `optimizer` on the device, with a group of `masters` for each of its."""
    options = [
        {name: group[name] for name in group if name != "params"}
        for group in optimizer.param_groups
    ]
    groups = [{"params": list(theirs)} for theirs in masters]
    # Where the device is the host, so is its kernel: bits are the same whatever the ratio.
    is_apart = any(runs_ahead(master) for theirs in masters for master in theirs)
    if isinstance(optimizer, DeepSpeedCPUAdam) and is_apart:
        return FusedAdam(
            groups,
            adam_w_mode=optimizer.adam_w_mode,
            weight_decay=max(group["weight_decay"] for group in options),
        )
    if isinstance(optimizer, DeepSpeedCPULion) and is_apart:
        return FusedLion(groups)
    twin = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name != "step":  # schedules wrap it, bound to the other
            vars(twin).setdefault(name, value)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**ours, **mine} for ours, mine in zip(options, groups, strict=True)]
    return twin


class DevicePart:
    """The part of masters and moments that stays on the device: one group for each of `host`, which
    may be empty; hyper-parameters are those of its groups.
    """

    def __init__(
        self,
        host: torch.optim.Optimizer,
        groups: Sequence[ShardedGroup],
        names: Sequence[Sequence[str]],
    ) -> None:
        self._host = host
        self._groups = groups
        self.optimizer = _device_optimizer(host, [group.masters for group in groups])
        self._trained = [group for group in groups if group.params]
        pairs = zip(groups, names, strict=True)
        named = [theirs for group, theirs in pairs if group.params]
        self.partial = PartialSteps(self._trained, named, self.optimizer)

    @torch.no_grad()
    def step(self, scaling: GradientScaling) -> None:
        """Issue the update; the device works on it while the host updates its part."""
        for mine, theirs in zip(self.optimizer.param_groups, self._host.param_groups, strict=True):
            mine.update({key: theirs[key] for key in self._host.defaults if key in mine})
        grads = [group.grad_for_step() for group in self._trained]
        for group, grad in zip(self._trained, grads, strict=True):
            group.masters[0].grad = grad
        self._step(scaling, grads)
        self.partial.end()
        for group in self._trained:
            group.masters[0].grad = None

    def _step(self, scaling: GradientScaling, grads: list[torch.Tensor]) -> None:
        if self.partial.runs and isinstance(self.optimizer, HostOptimizer):
            # Where the device is the host: the factor is a number there.
            with self.optimizer.fused(float(scaling.factor), {}, runs=self.partial.runs):
                self.optimizer.step()
            return
        with self.partial.stepping():
            scaling.step(self.optimizer, grads)

    # State in files: that of an optimizer of both parts

    def state_dict(self) -> dict[str, Any]:
        """Return the host's state, behind it the device's tensors as `own_tensors` numbers them."""
        host, device = self._host.state_dict(), self.optimizer.state_dict()
        states = {len(self._groups) + number: state for number, state in device["state"].items()}
        return {**host, "state": {**host["state"], **states}}

    def joined(
        self, base: State, masters: Sequence[torch.Tensor]
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Make state (`state_dict`'s) and masters of the groups, the host's first, on the host."""
        count = len(self._groups)
        states = {
            number: _join(base["state"].get(count + number, {}), base["state"].get(number, {}))
            for number in range(count)
        }
        pairs = zip(masters[:count], masters[count:], strict=True)
        wholes = [torch.cat([device.detach().cpu(), host.detach().cpu()]) for host, device in pairs]
        return {**base, "state": {n: state for n, state in states.items() if state}}, wholes

    def load(self, base: State) -> None:
        parts = {number: self._cut(number, state) for number, state in base["state"].items()}
        load_in_place(
            self._host, {**base, "state": {number: host for number, (_, host) in parts.items()}}
        )
        own = self.optimizer.state_dict()["param_groups"]
        states = {number: device for number, (device, _) in parts.items() if device}
        load_apart(self.optimizer, {"state": states, "param_groups": own})

    def master_parts(self, masters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        kept = [group.table.shard_numel for group in self._groups]
        return [
            *(master[first:] for master, first in zip(masters, kept, strict=True)),
            *(master[:first] for master, first in zip(masters, kept, strict=True)),
        ]

    def _cut(self, number: int, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """State of a whole group as that of its parts on the device and on the host."""
        kept = self._groups[number].table.shard_numel
        device = {
            key: value[:kept] if _is_per_element(value) else copy.deepcopy(value)
            for key, value in state.items()
        }
        host = {key: one[kept:] if _is_per_element(one) else one for key, one in state.items()}
        return (device if self._groups[number].params else {}), host


def _is_per_element(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _join(device: State, host: State) -> dict[str, Any]:
    """Join the state of the two parts of a shard; a part without elements may have none."""
    whole = {**device, **host}
    own = {**device.get(STATE_BY_PARAMETER, {}), **host.get(STATE_BY_PARAMETER, {})}
    if own:
        whole[STATE_BY_PARAMETER] = own
    for key in device.keys() & host.keys():
        if _is_per_element(host[key]):
            whole[key] = torch.cat([device[key].cpu(), host[key].cpu()])
    return whole
