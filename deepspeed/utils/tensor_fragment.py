"""Access to a parameter's fp32 value, gradient and optimizer state, wherever its shards lie.

Every `*_full_*` function is collective: all data-parallel ranks call it for the same parameters in
the same order. The `*_local_*` functions touch only what this rank owns, a 1-D fragment, and
communicate nothing. Gradients are those that the next step will use, averaged, without the loss
scale; they can be read between the boundary's backward and `engine.step()` (ZeRO-2: after any).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from deepspeed._absent import FRAGMENTS
from deepspeed._lazy import lazy_attributes
from deepspeed._modules import stand_in

# Upstream's further names here say what to use instead.
__getattr__ = lazy_attributes(__name__)

tensor_fragment = stand_in("tensor_fragment", __name__, f"tensor_fragment: {FRAGMENTS}")


@dataclass(frozen=True)
class fragment_address:  # upstream's name; its import path is part of the checkpoint format
    """A fragment's place in a shard: `numel` elements from `start`."""

    numel: int
    start: int

    def __deepcopy__(self, memo: dict[int, object]) -> fragment_address:
        """Return itself: it cannot change, and a state dict has one for each parameter."""
        return self


class _Fragment(Protocol):
    @property
    def in_shard(self) -> slice: ...
    @property
    def in_param(self) -> slice: ...


class _Group(Protocol):
    params: list[nn.Parameter]
    master: torch.Tensor
    masters: list[nn.Parameter]

    @property
    def grad(self) -> torch.Tensor: ...
    def owned(self, index: int) -> _Fragment | None: ...


class _OwnerSteps(Protocol):
    inner: torch.optim.Optimizer

    def state_of(self, group: int, param: int, key: str) -> torch.Tensor: ...
    def set_state_of(self, group: int, param: int, key: str, value: torch.Tensor) -> None: ...


class _Observer(Protocol):
    def replaced(self, param: nn.Parameter) -> None: ...


class _Writes(Protocol):
    def take_in(self) -> None: ...


class _Idle(Protocol):
    def give(self, param: nn.Parameter) -> None: ...


class _Masters(Protocol):
    """What is asked of an optimizer with sharded masters, which stands above this module."""

    @property
    def groups(self) -> Sequence[_Group]: ...
    @property
    def state(self) -> Mapping[torch.Tensor, dict[str, torch.Tensor]]: ...
    @property
    def owner_steps(self) -> _OwnerSteps | None: ...
    @property
    def observer(self) -> _Observer: ...
    @property
    def idle(self) -> _Idle: ...
    @property
    def writes(self) -> _Writes: ...
    @property
    def has_reduced_gradients(self) -> bool: ...
    @property
    def read_factor(self) -> float: ...
    def finish_gradients(self) -> None: ...
    def lend(self) -> None: ...
    def gather_full(
        self, wanted: Sequence[tuple[int, int]], shards: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]: ...
    def set_param(self, param: nn.Parameter, value: torch.Tensor) -> None: ...


def logical_shape(param: torch.Tensor) -> torch.Size:
    """The shape of a parameter, also while it is sharded (stage 3)."""
    shape: torch.Size = getattr(param, "ds_shape", param.shape)
    return shape


def own_shard(param: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a parameter: its shard (stage 3), or all of it."""
    own: torch.Tensor = getattr(param, "ds_tensor", param)
    return own.detach()


def _link(param: nn.Parameter) -> tuple[_Masters, int, int] | None:
    return getattr(param, "_hp_mapping", None)


def _replicated_factor(param: nn.Parameter) -> float:
    """Find what a step without masters multiplies `param.grad` by: plain backward leaves it."""
    link = getattr(param, "_ds_replicated_by", None)
    return 1.0 if link is None else float(link.optimizer.read_factor)


def _require_link(param: nn.Parameter, what: str) -> tuple[_Masters, int, int]:
    link = _link(param)
    if link is None:
        raise ValueError(
            f"{what}: this parameter (shape {tuple(param.shape)}) has no master weight. It is "
            "frozen, or the engine trains it without one (stage 0 in fp32): read and write the "
            "parameter itself"
        )
    return link


# What can be read: a flat buffer per group


def _shards(
    param_optimizer: _Masters, key: str | None, params: Sequence[nn.Parameter] = ()
) -> list[torch.Tensor]:
    """List this rank's shards: the masters, or state `key` of the groups of `params`; others may
    lack it, and masters stand in their place.
    """
    param_optimizer.writes.take_in()
    groups = param_optimizer.groups
    asked = {_require_link(param, "optimizer state")[1] for param in params}
    return [
        group.master
        if key is None or index not in asked
        else _state_shard(param_optimizer, index, key)
        for index, group in enumerate(groups)
    ]


def _state_shard(optimizer: _Masters, group_index: int, key: str) -> torch.Tensor:
    group = optimizer.groups[group_index]
    if not group.params:
        return group.master
    if optimizer.owner_steps is not None:
        raise KeyError(
            f"{key!r}: {type(optimizer.owner_steps.inner).__name__} keeps state of whole "
            "parameters, of which there are no fragments; use safe_get_full_optimizer_state"
        )
    states = [optimizer.state.get(master, {}) for master in group.masters]
    missing = [state for state in states if key not in state]
    if missing:
        known = sorted({name for state in states for name in state})
        hint = f"known: {', '.join(known)}" if known else "there is none before the first step"
        raise KeyError(f"the optimizer has no state {key!r} ({hint})")
    if len(states) == 1 and states[0][key].shape == group.masters[0].shape:
        return states[0][key].view(-1)  # a view: setters write through it
    return torch.cat([state[key].reshape(-1) for state in states])


def owned_gradients(optimizer: _Masters) -> list[torch.Tensor] | None:
    """List the owned gradient of each group, padding included; None if there is none now."""
    optimizer.finish_gradients()
    if not optimizer.has_reduced_gradients:
        return None
    factor = optimizer.read_factor
    return [group.grad if factor == 1.0 else group.grad * factor for group in optimizer.groups]


def _full(
    params: Sequence[nn.Parameter], shards_of: Callable[[_Masters], list[torch.Tensor] | None]
) -> list[torch.Tensor] | None:
    links = [_require_link(param, "safe_get") for param in params]
    if not links:
        return []
    optimizer = links[0][0]
    shards = shards_of(optimizer)
    if shards is None:
        return None
    return optimizer.gather_full([(group, index) for _, group, index in links], shards)


def _is_frozen(param: nn.Parameter) -> bool:
    return _link(param) is None and not param.requires_grad


def _owned(param: nn.Parameter, shards: list[torch.Tensor]) -> torch.Tensor | None:
    optimizer, group, index = _require_link(param, "safe_get_local")
    optimizer.lend()
    owned = optimizer.groups[group].owned(index)
    return None if owned is None else shards[group][owned.in_shard]


def _assign(param: nn.Parameter, shards: list[torch.Tensor], value: torch.Tensor) -> None:
    optimizer, group, index = _require_link(param, "safe_set_full")
    given, shape = tuple(value.shape), tuple(logical_shape(param))
    if given != shape:
        raise ValueError(f"value has shape {given}, the parameter {shape}")
    owned = optimizer.groups[group].owned(index)
    if owned is not None:
        with torch.no_grad():
            shards[group][owned.in_shard].copy_(value.detach().reshape(-1)[owned.in_param])


# Full values


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the fp32 value, on every rank; None without a master: the parameter is the value."""
    if _link(param) is None:
        is_value = param.requires_grad and param.dtype == torch.float32
        return param.detach().float() if is_value else None
    values = _full([param], lambda optimizer: _shards(optimizer, None))
    return values[0] if values else None


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return state `optim_state_key` ("exp_avg", ...), fp32 in the parameter's shape, on every
    rank; of state of whole parameters as it is (Adafactor's rows). KeyError if there is none.
    """
    if _link(param) is None:
        return None
    return safe_get_full_optimizer_states([param], optim_state_key)[0]


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the averaged gradient, fp32 in shape, on every rank; None if there is none now."""
    if _link(param) is None:
        factor = _replicated_factor(param)
        return param.grad if factor == 1.0 or param.grad is None else param.grad * factor
    values = _full([param], owned_gradients)
    return values[0] if values else None


def safe_get_full_grads(params: Sequence[nn.Parameter]) -> list[torch.Tensor] | None:
    """Call `safe_get_full_grad` for many parameters of one engine, with one collective."""
    return _full(params, owned_gradients)


def safe_get_full_fp32_params(params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Call `safe_get_full_fp32_param` for many parameters of one engine, with one collective."""
    return _full(params, lambda optimizer: _shards(optimizer, None)) or []


def safe_get_full_optimizer_states(
    params: Sequence[nn.Parameter], optim_state_key: str
) -> list[torch.Tensor]:
    """Call `safe_get_full_optimizer_state` for many parameters of one engine, with one collective,
    or one each where state is of whole parameters.
    """
    links = [_require_link(param, "safe_get") for param in params]
    steps = links[0][0].owner_steps if links else None
    if steps is not None:
        return [steps.state_of(group, index, optim_state_key) for _, group, index in links]
    return _full(params, lambda optimizer: _shards(optimizer, optim_state_key, params)) or []


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set master and model-precision value of `param` on every rank; `value` is the same on all."""
    optimizer, _, _ = _require_link(param, "safe_set_full_fp32_param")
    _assign(param, _shards(optimizer, None), value)
    optimizer.set_param(param, value)


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set optimizer state of `param`; `value` is the same on all ranks."""
    optimizer, group_index, index = _require_link(param, "safe_set_full_optimizer_state")
    group = optimizer.groups[group_index]
    if optimizer.owner_steps is not None:
        optimizer.owner_steps.set_state_of(group_index, index, optim_state_key, value)
        return
    if len(group.masters) > 1:
        with torch.no_grad():
            optimizer.state[group.masters[index]][optim_state_key].copy_(value)
        return
    _assign(param, _shards(optimizer, optim_state_key, [param]), value)


def _gradients_to_replace(
    param: nn.Parameter, what: str, value: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Where gradients lie, about to be replaced, and `value` in the scale that they have there."""
    optimizer, _, _ = _require_link(param, what)
    optimizer.finish_gradients()
    optimizer.observer.replaced(param)
    optimizer.idle.give(param)
    factor = optimizer.read_factor
    return [group.grad for group in optimizer.groups], value / factor if factor != 1.0 else value


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the averaged gradient of `param`; `value` is the same on all ranks."""
    if _link(param) is None:
        # In place: norm and clipping read this buffer, and would not see another one.
        param.grad = param.grad if param.grad is not None else torch.zeros_like(param)
        param.grad.copy_(value.detach() / _replicated_factor(param))
        link = getattr(param, "_ds_replicated_by", None)
        if link is not None:
            link.optimizer.idle.give(param)
        return
    _assign(param, *_gradients_to_replace(param, "safe_set_full_grad", value))


def safe_update_full_grad_vectorized(
    param_list: list[nn.Parameter],
    update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor],
) -> None:
    """Replace each gradient by `update_func(grad, param)`, gathering all with one collective."""
    grads = safe_get_full_grads(param_list)
    if grads is None:
        return
    for param, grad in zip(param_list, grads, strict=True):
        safe_set_full_grad(param, update_func(grad, param))


# Local fragments


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the owned fragment of the fp32 value, 1-D, writable; None if there is none."""
    if _is_frozen(param):
        return None
    optimizer, _, _ = _require_link(param, "safe_get_local_fp32_param")
    return _owned(param, _shards(optimizer, None))


def safe_get_local_optimizer_state(
    param: nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    """Return that of an optimizer state; None as for `safe_get_local_fp32_param`."""
    if _is_frozen(param):
        return None
    optimizer, _, _ = _require_link(param, "safe_get_local_optimizer_state")
    return _owned(param, _shards(optimizer, optim_state_key, [param]))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return that of the averaged gradient; None if there is none now."""
    if _is_frozen(param):
        return None
    optimizer, _, _ = _require_link(param, "safe_get_local_grad")
    shards = owned_gradients(optimizer)
    return None if shards is None else _owned(param, shards)


def _set_local(param: nn.Parameter, shards: list[torch.Tensor], value: torch.Tensor) -> None:
    owned = _owned(param, shards)
    held = 0 if owned is None else owned.numel()
    if value.numel() != held:
        raise ValueError(f"value has {value.numel()} elements, this rank owns {held}")
    if owned is not None:
        with torch.no_grad():
            owned.copy_(value.reshape(-1))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the owned fragment of the fp32 value; the model sees it after the next step."""
    _set_local(param, _shards(_require_link(param, "safe_set_local_fp32_param")[0], None), value)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set the owned fragment of an optimizer state."""
    optimizer, _, _ = _require_link(param, "safe_set_local_optimizer_state")
    _set_local(param, _shards(optimizer, optim_state_key, [param]), value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the owned fragment of the averaged gradient."""
    _set_local(param, *_gradients_to_replace(param, "safe_set_local_grad", value))
