"""Move tokens into the slots of experts and back, by index. Routes and slots are inverse maps of
each other, so that each direction is a gather forward and backward and needs no atomic additions
(slow, and in an order that changes). S tokens, k routes per token, E experts, M model width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.moe.gating import SparseRoutes


class RouteMap(NamedTuple):
    """Inverse maps; -1 where a token was dropped, and in empty slots.

    Attributes:
        slot_of_route: Slot (expert * slots per expert + location) of each route, [k, S].
        route_of_slot: Route (choice * S + token) in each slot, [E * slots].
        token_of_slot: Token in each slot, [E * slots].
    """

    slot_of_route: Tensor
    route_of_slot: Tensor
    token_of_slot: Tensor


def route_map(routes: SparseRoutes, slots_per_expert: int) -> RouteMap:
    """Invert `routes` for experts that have `slots_per_expert` slots, at least the capacity."""
    dropped = routes.indices < 0
    slots = routes.indices * slots_per_expert + routes.locations
    num_slots = routes.num_experts * slots_per_expert
    # Dropped routes go to a slot that is cut off: selecting the others would wait for the device.
    route_of_slot = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=slots.device)
    route_of_slot.scatter_(
        0,
        slots.masked_fill(dropped, num_slots).flatten(),
        torch.arange(slots.numel(), device=slots.device),
    )
    route_of_slot = route_of_slot[:num_slots]
    token_of_slot = torch.where(
        route_of_slot < 0, route_of_slot, route_of_slot % max(slots.shape[1], 1)
    )
    return RouteMap(slots.masked_fill(dropped, -1), route_of_slot, token_of_slot)


def dispatch(tokens: Tensor, routes: RouteMap) -> Tensor:
    """Fill all slots, [E * slots, M], from tokens [S, M], with zeros in empty ones."""
    return _Dispatch.apply(tokens, *routes)


def combine(slots: Tensor, weights: Tensor, routes: RouteMap) -> Tensor:
    """Sum slots [E * slots, M] with weights [k, S] over each token's routes, to [S, M]."""
    return _Combine.apply(slots, weights, *routes)


def _rows(source: Tensor, index: Tensor) -> Tensor:
    """Take source[index] along the first axis, with zeros where the index is -1."""
    if not len(source):
        return source.new_zeros((len(index), *source.shape[1:]))
    rows = source.index_select(0, index.clamp(min=0))
    missing = index < 0
    # Filled, not multiplied: an expert may make infinity of an empty slot, and 0 times that is NaN.
    if rows.device.type == "cpu":
        # A mask that is broadcast over rows costs four times what the selection does there; a
        # device would wait for `nonzero`.
        return rows.index_fill_(0, missing.nonzero().view(-1), 0)
    return rows.masked_fill_(missing.view(-1, *(1,) * (rows.dim() - 1)), 0)


class _Dispatch(torch.autograd.Function):
    """Tokens to slots; a token's gradient is the sum over the slots it is in."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, slot_of_route: Tensor, _: Any, token_of_slot: Tensor
    ) -> Tensor:
        ctx.save_for_backward(slot_of_route)
        return _rows(tokens, token_of_slot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slot_of_route,) = ctx.saved_tensors
        grad = _rows(grads[0], slot_of_route[0])
        for slots in slot_of_route[1:]:
            grad += _rows(grads[0], slots)
        return grad, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: Tensor, weights: Tensor, *routes: Tensor) -> Tensor:
        ctx.save_for_backward(slots, weights, *routes)
        slot_of_route = routes[0]
        factors = weights.to(slots.dtype).unsqueeze(2)
        output = _rows(slots, slot_of_route[0]).mul_(factors[0])
        for factor, route in zip(factors[1:], slot_of_route[1:], strict=True):
            output.addcmul_(_rows(slots, route), factor)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        slots, weights, slot_of_route, route_of_slot, token_of_slot = ctx.saved_tensors
        arrived = _rows(grads[0], token_of_slot)
        # The gate is in fp32 and so is the sum over the model width that makes its gradient. What
        # it makes of an empty slot's content, which may be infinite, is not looked at.
        of_slot = (slots * arrived).sum(dim=1, dtype=weights.dtype)
        factors = weights.to(arrived.dtype).reshape(-1).index_select(0, route_of_slot.clamp(min=0))
        return (
            arrived.mul_(factors.unsqueeze(1)),
            _rows(of_slot, slot_of_route.flatten()).view_as(weights),
            None,
            None,
            None,
        )
