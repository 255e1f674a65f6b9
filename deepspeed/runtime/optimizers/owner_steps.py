"""Steps of a client's optimizer on whole parameters: each rank takes those of the parameters that
are dealt to it.

Such an optimizer (Adafactor, torch's Muon) looks at a parameter whole and asks nobody for it, as
those of `ops.whole_parameters` do. So masters and gradients travel to the owners, where the
client's own code updates them, and the masters travel back. Masters stay cut as for any other
optimizer; what the optimizer remembers of a parameter, in whatever shapes, stays with its owner
alone.

In checkpoints that state is filed by parameter name, in the owner's file (`STATE_OF_PARAMETERS`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from deepspeed.checkpoint.constants import STATE_OF_PARAMETERS
from deepspeed.ops.whole_parameters import WholeParameterOptimizer
from deepspeed.runtime.sharding.dealt_parameters import DealtParameters
from deepspeed.runtime.sharding.fragments import ParamIndex
from deepspeed.runtime.sharding.loading_in_place import load_in_place


class _Owned(NamedTuple):
    """A parameter that is dealt to this rank: what the client's optimizer keeps its state by, empty
    but during a step; its number in its group; its name.
    """

    tensor: nn.Parameter
    param: ParamIndex
    name: str


class OwnerSteps(WholeParameterOptimizer):
    """A client's optimizer behind shards, which updates each parameter by itself; see module. Its
    parameter groups are those of the client's, with shards as parameters, so whoever holds the
    client's sets rates there.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        # Not torch's: there are groups already, and hooks of a step are the client's optimizer's.
        self.inner = inner
        self._shards = {}
        self._made: list[list[_Owned]] | None = None
        self._left_out: Collection[str] = ()

    @contextmanager
    def leaving_out(self, names: Collection[str]) -> Iterator[None]:
        """Let steps leave parameters of these names as they are."""
        self._left_out = names
        try:
            yield
        finally:
            self._left_out = ()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]  # as above
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # as above
        return self.inner.defaults

    # Parameters

    def _parameters(self) -> list[DealtParameters]:
        return [cast(DealtParameters, self._shards[g["params"][0]]) for g in self.param_groups]

    def _owned(self) -> list[list[_Owned]]:
        if self._made is None:
            self._made = [
                [
                    _Owned(nn.Parameter(shard.new_empty(0)), param, parameters.names[param])
                    for param in parameters.owned
                ]
                for group, parameters in zip(self.param_groups, self._parameters(), strict=True)
                for shard in group["params"]
            ]
        return self._made

    def owned(self) -> Iterator[tuple[torch.Tensor, int, ParamIndex, str]]:
        """Yield what this rank keeps state by: the tensor, its group, number in it, and name."""
        for number, group in enumerate(self._owned()):
            for tensor, param, name in group:
                yield tensor, number, param, name

    @contextmanager
    def _in_groups(self) -> Iterator[None]:
        """Let the client's groups have the parameters that are dealt to this rank, not shards."""
        shards = [group["params"] for group in self.param_groups]
        try:
            for group, own in zip(self.param_groups, self._owned(), strict=True):
                group["params"] = [tensor for tensor, _, _ in own]
            yield
        finally:
            for group, params in zip(self.param_groups, shards, strict=True):
                group["params"] = params

    # Steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # no closure gets here
        """Step the client's optimizer once. All ranks call it; every shard has a gradient."""
        shards = [group["params"][0] for group in self.param_groups]
        parameters = self._parameters()
        masters = [
            of.to_owners(own.data, own.device) for of, own in zip(parameters, shards, strict=True)
        ]
        grads = [
            of.to_owners(own.grad, own.device) for of, own in zip(parameters, shards, strict=True)
        ]
        for own, of, master, grad in zip(self._owned(), parameters, masters, grads, strict=True):
            wholes = zip(own, of.wholes(master), of.wholes(grad), strict=True)
            for (tensor, _, name), (_, whole), (_, gradient) in wholes:
                tensor.data = whole
                tensor.grad = None if name in self._left_out else gradient
        with self._in_groups():
            self.inner.step()
        for own, of, master, shard in zip(self._owned(), parameters, masters, shards, strict=True):
            for (tensor, _, _), (_, whole) in zip(own, of.wholes(master), strict=True):
                if tensor.data_ptr() != whole.data_ptr():
                    whole.copy_(tensor)  # it was replaced, not written to
                tensor.grad = None
                tensor.data = shard.new_empty(0)
            shard.data.copy_(of.from_owners(master, shard.device)[: shard.numel()])

    # State

    def state_of(self, group: int, param: ParamIndex, key: str) -> torch.Tensor:
        """Send state `key` of one parameter to every rank that has shards of it. Collective.

        Raises:
            KeyError: The optimizer keeps no such state.
        """
        parameters = self._parameters()[group]
        own = [self.state.get(one.tensor, {}) for one in self._owned()[group] if one.param == param]
        value = own[0].get(key) if own else None
        # By way of the host: a pickled tensor comes back on the device that it was on.
        value = value.cpu() if isinstance(value, torch.Tensor) else value
        value, known = parameters.from_owner(param, (value, sorted(own[0]) if own else []))
        if value is None:
            hint = f"known: {', '.join(known)}" if known else "there is none before the first step"
            raise KeyError(f"the optimizer has no state {key!r} ({hint})")
        return torch.as_tensor(value).to(self.param_groups[group]["params"][0].device)

    def set_state_of(self, group: int, param: ParamIndex, key: str, value: torch.Tensor) -> None:
        for one in self._owned()[group]:
            if one.param == param:
                self.state[one.tensor][key].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        with self._in_groups():
            base = self.inner.state_dict()
        state: dict[int, Any] = {}
        groups = []
        for number, (own, options) in enumerate(
            zip(self._owned(), base["param_groups"], strict=True)
        ):
            numbered = zip(own, options["params"], strict=True)
            kept = {one.name: base["state"][key] for one, key in numbered if key in base["state"]}
            # Also where it is empty: so that files tell whose state they have.
            state[number] = {STATE_OF_PARAMETERS: kept}
            groups.append({**options, "params": [number]})
        return {"state": state, "param_groups": groups}

    def has_state_of(self, base: Mapping[str, Any]) -> bool:
        """Whether a saved `state_dict` is of the parameters that are dealt to this rank."""
        saved = [
            set(base["state"].get(number, {}).get(STATE_OF_PARAMETERS, ()))
            for number in range(len(base["param_groups"]))
        ]
        own = [{one.name for one in group} for group in self._owned()]
        return len(saved) == len(own) and all(
            there == here or not there for there, here in zip(saved, own, strict=True)
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for number, (own, options) in enumerate(
            zip(self._owned(), state_dict["param_groups"], strict=True)
        ):
            saved = state_dict["state"].get(number, {})
            kept = saved.get(STATE_OF_PARAMETERS, {})
            if saved.keys() - {STATE_OF_PARAMETERS}:
                raise ValueError(
                    f"the state of parameter group {number} is of shards "
                    f"({', '.join(sorted(saved))}), and {type(self.inner).__name__} updates whole "
                    "parameters: load with load_optimizer_states=False"
                )
            first = sum(len(group["params"]) for group in groups)
            numbers = list(range(first, first + len(own)))
            numbered = zip(numbers, own, strict=True)
            states.update({key: kept[one.name] for key, one in numbered if one.name in kept})
            groups.append({**options, "params": numbers})
        with self._in_groups():
            load_in_place(self.inner, {"state": states, "param_groups": groups})
