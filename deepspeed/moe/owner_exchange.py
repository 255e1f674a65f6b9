"""Run each token's experts where they are: rows go to the ranks that hold the experts a router has
chosen, no more and none dropped, and come back.

[Note: nobody stays away] An exchange needs all ranks of the group in backward too, and gradient
hooks must run in one order on all ranks: a rank that none of the rows came to would leave both out.
So its output depends on all of its experts' parameters, whose gradient is then zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from deepspeed import comm as dist
from deepspeed.moe.dispatch import RouteMap, dispatch
from deepspeed.moe.sharded_moe import Lanes, exchange

# Rows [R, M] and the number among this rank's experts that each is for, [R] -> outputs [R, M].
RunExperts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Plan(NamedTuple):
    """Tokens to the rows that are sent, rows that come back to routes, how many go and come by
    rank, and the local expert of each row that comes.
    """

    leave: RouteMap
    arrive: RouteMap
    lanes: Lanes
    experts: torch.Tensor


def run_on_owners(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    group: dist.Group,
    run: RunExperts,
    params: Sequence[torch.nn.Parameter],
) -> torch.Tensor:
    """Sum each token's routes, weight times expert's output, to [S, M]. All ranks of `group`, which
    hold `num_experts` experts in their order, call it with any number of tokens [S, M], the experts
    of each [S, k] (`num_experts` and above is none) and their weights; `params` are those of `run`.
    """
    plan = _plan(experts, num_experts, group)
    rows = exchange(dispatch(tokens, plan.leave), plan.lanes)
    if len(rows):
        # Those that no row came to know no other dtype.
        outputs = run(rows, plan.experts).to(rows.dtype)
    else:
        # See [Note: nobody stays away].
        nothing = torch.stack([param.reshape(-1)[:0].sum() for param in params]).sum()
        outputs = rows + nothing.to(rows.dtype)
    returned = exchange(outputs, plan.lanes.back)
    routes = dispatch(returned, plan.arrive).view(*weights.t().shape, -1)
    # As transformers sums: products in the wider of both dtypes, one rounding at the end.
    return (routes * weights.t().unsqueeze(2)).sum(dim=0).to(tokens.dtype)


def _plan(experts: torch.Tensor, num_experts: int, group: dist.Group) -> _Plan:
    num_ranks = dist.get_world_size(group=group)
    num_tokens = experts.shape[0]
    wanted = experts.t().reshape(-1)  # as `RouteMap` numbers routes: choice * S + token
    ordered, order = wanted.sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=wanted.device)
    sent = torch.searchsorted(ordered, bounds).diff().view(num_ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    # The only wait for the device: sizes of exchanges are the host's.
    to_ranks, from_ranks = torch.stack((sent.sum(dim=1), received.sum(dim=1))).tolist()
    order = order[: sum(to_ranks)]
    slots = torch.arange(len(order), device=order.device)
    slot_of_route = torch.full_like(wanted, -1).scatter_(0, order, slots)
    local = torch.arange(received.shape[1], device=order.device).repeat(num_ranks)
    return _Plan(
        RouteMap(slot_of_route.view(experts.t().shape), order, order % max(num_tokens, 1)),
        RouteMap(order.unsqueeze(0), slot_of_route, slot_of_route),
        Lanes(group, to_ranks, from_ranks),
        local.repeat_interleave(received.flatten(), output_size=sum(from_ranks)),
    )
