"""Which expert sees which token: the gates of Switch (top 1), GShard (top 2) and top k. Pure
decisions over logits; the only communication is the agreement on a capacity when no token may be
dropped. S tokens, E experts, k routes per token, C slots per expert ("capacity").

The load-balancing loss is E * sum_e(mean gate of e * fraction of the tokens routed to e), over k
for the top-k gate, where every route counts; it is 1 when balanced. Top 2 counts first choices
only, as GShard does. Routes are counted before any is dropped: else overload would look balanced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

JITTER = "Jitter"
RSAMPLE = "RSample"
NOISE_POLICIES = (None, "None", JITTER, RSAMPLE)
DROP_POLICIES = ("probs", "position")

Capacity = int
# One process group, several (to agree over each in turn), or None for this rank alone.
AgreementGroups = Any


class SparseRoutes(NamedTuple):
    """The decision as indices: what tokens are moved by.

    Attributes:
        l_aux: Load-balancing loss, fp32 scalar; differentiable.
        capacity: Slots of each expert.
        num_experts: E.
        indices: Expert of each route, [k, S]; -1 where the token was dropped.
        locations: Slot of each route within its expert, [k, S]; 0 where dropped.
        gates: Weight of each route in the output, [k, S] fp32; 0 where dropped; differentiable.
        exp_counts: Tokens routed to each expert before dropping, [E].
    """

    l_aux: torch.Tensor
    capacity: Capacity
    num_experts: int
    indices: torch.Tensor
    locations: torch.Tensor
    gates: torch.Tensor
    exp_counts: torch.Tensor


class DenseRoutes(NamedTuple):
    """The decision as masks, for code that multiplies by them: O(S * E * C) memory.

    Attributes:
        l_aux: Load-balancing loss, fp32 scalar; differentiable.
        combine_weights: Weight of each slot in each token's output, [S, E, C] fp32; differentiable.
        dispatch_mask: Which token is in which slot, [S, E, C] bool.
        exp_counts: Tokens routed to each expert before dropping, [E].
    """

    l_aux: torch.Tensor
    combine_weights: torch.Tensor
    dispatch_mask: torch.Tensor
    exp_counts: torch.Tensor


Routes = DenseRoutes | SparseRoutes


# -- noise -----------------------------------------------------------------------------------------


def multiplicative_jitter(
    x: torch.Tensor, device: torch.device, epsilon: float = 1e-2
) -> torch.Tensor:
    """Multiply by uniform noise in [1 - epsilon, 1 + epsilon] of ``device``'s default generator."""
    if epsilon == 0:
        return x
    return x * torch.empty(x.shape, dtype=x.dtype, device=device).uniform_(1 - epsilon, 1 + epsilon)


def gumbel_rsample(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Draw standard Gumbel noise: the arg max of logits plus this is a sample of their softmax."""
    # A standard Gumbel variable is minus the logarithm of a standard exponential one.
    return -torch.empty(tuple(shape), device=device).exponential_().log()


# -- the gates -------------------------------------------------------------------------------------


def top1gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: torch.Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: AgreementGroups = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> Routes:
    """Route each token to its best expert, weighted by the gate's probability (Switch).

    Args: see `TopKGate`. Logits are [S, E] fp32; `used_token` [S] is 0 for tokens that no expert
    shall see (padding). With ``drop_tokens`` an expert's tokens beyond its capacity,
    ``capacity_factor`` S / E, are dropped, at random with ``use_rts``, else the last ones;
    otherwise every expert gets as many slots as the fullest needs, over ``ep_group``. "RSample" as
    ``noisy_gate_policy`` samples the expert. ``use_tutel`` is not supported: NotImplementedError.
    """
    refuse_tutel(use_tutel)
    gates = functional.softmax(logits, dim=1)
    preference = (
        logits + gumbel_rsample(logits.shape, logits.device)
        if noisy_gate_policy == RSAMPLE
        else gates
    )
    experts = preference.detach().argmax(dim=1, keepdim=True)  # [S, 1]
    limits = (capacity_factor, min_capacity, drop_tokens, ep_group)
    score = torch.rand_like(gates) if drop_tokens and use_rts else None
    return _routed(gates, experts, score, limits, used_token, sparse_routes, _kept_gates)


def top2gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: AgreementGroups = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
    used_token: torch.Tensor | None = None,
) -> Routes:
    """Route each token to its two best experts (the second sampled, with
    ``top2_2nd_expert_sampling``), weighted by their probabilities normalized to 1 (GShard).

    Second choices fill the slots that first choices leave. Arguments as in `top1gating`; capacities
    are of 2 S / E.
    """
    num_tokens, num_experts = logits.shape
    gates = functional.softmax(logits, dim=1)
    first = gates.detach().argmax(dim=1, keepdim=True)
    noise = (
        gumbel_rsample(logits.shape, logits.device)
        if top2_2nd_expert_sampling
        else torch.zeros_like(logits)
    )
    second = (logits.detach() + noise).scatter(1, first, float("-inf")).argmax(dim=1, keepdim=True)
    wanted = [_mask_of(experts, num_experts, used_token) for experts in (first, second)]
    counts = wanted[0].sum(dim=0) + wanted[1].sum(dim=0)
    limits = (2 * capacity_factor, min_capacity, drop_tokens, ep_group)
    capacity = _capacity(counts, num_tokens, *limits)
    # A token's two experts differ, so that one table holds the slots of both of its choices.
    positions = torch.where(
        wanted[1].bool(), _positions(wanted[1]) + wanted[0].sum(dim=0), _positions(wanted[0])
    )
    kept = (wanted[0] + wanted[1]).bool() & (positions < capacity)
    chosen = _Chosen(torch.cat([first, second], dim=1), positions, kept)
    return _result(
        chosen, _shares(gates, chosen), _balance(gates, wanted[0]), capacity, counts, sparse_routes
    )


def topkgating(
    logits: torch.Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: AgreementGroups = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
    used_token: torch.Tensor | None = None,
) -> Routes:
    """Route each token to its k best experts, weighted by their probabilities normalized to 1.

    Arguments as in `top1gating`; capacities are of k S / E. An overfull expert drops by
    ``drop_policy``: "probs" the tokens of least probability, "position" the last ones.
    """
    if drop_policy not in DROP_POLICIES:
        raise ValueError(f"drop_policy={drop_policy!r}: expected one of {DROP_POLICIES}")
    gates = functional.softmax(logits, dim=1)
    experts = logits.detach().topk(k, dim=1).indices
    limits = (k * capacity_factor, min_capacity, drop_tokens, ep_group)
    score = gates.detach() if drop_tokens and drop_policy == "probs" else None
    return _routed(gates, experts, score, limits, used_token, sparse_routes, _shares)


# -- their parts -----------------------------------------------------------------------------------


class _Chosen(NamedTuple):
    """Experts [S, k]; the slots that tokens would have [S, E]; the pairs that are routed [S, E]."""

    experts: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor


def refuse_tutel(use_tutel: bool) -> None:
    """Say why there are no Tutel kernels, if they are asked for."""
    if use_tutel:
        raise NotImplementedError(
            "use_tutel=True: Tutel's kernels are not supported; tokens are moved by index here "
            "anyway, so use use_tutel=False"
        )


def _routed(
    gates: torch.Tensor,
    experts: torch.Tensor,
    score: torch.Tensor | None,
    limits: tuple[float, int, bool, AgreementGroups],
    used_token: torch.Tensor | None,
    sparse: bool,
    weigh: Callable[[torch.Tensor, _Chosen], torch.Tensor],
) -> Routes:
    """Route tokens to their experts [S, k]; full ones keep the best by score [S, E], or first."""
    wanted = _mask_of(experts, gates.shape[1], used_token)
    counts = wanted.sum(dim=0)
    capacity = _capacity(counts, len(gates), *limits)
    if score is not None:
        kept = _best(score, wanted, capacity)
    else:
        kept = wanted.bool() & (_positions(wanted) < capacity)
    chosen = _Chosen(experts, _positions(kept), kept)
    l_aux = _balance(gates, wanted) / experts.shape[1]
    return _result(chosen, weigh(gates, chosen), l_aux, capacity, counts, sparse)


def _mask_of(
    experts: torch.Tensor, num_experts: int, used_token: torch.Tensor | None
) -> torch.Tensor:
    mask = torch.zeros(
        len(experts), num_experts, dtype=torch.int64, device=experts.device
    ).scatter_(1, experts, 1)
    return mask if used_token is None else mask * used_token.reshape(-1, 1).bool()


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """[S, E]: how many earlier tokens the mask gives to the same expert."""
    if get_accelerator().is_synchronized_device():
        return mask.cumsum(dim=0) - 1
    # Over contiguous rows: a device scans a column of a few experts' width element by element.
    return mask.t().contiguous().cumsum(dim=1).t() - 1


def _best(score: torch.Tensor, mask: torch.Tensor, capacity: Capacity) -> torch.Tensor:
    """Mark [S, E] the ``capacity`` highest of each expert's scores (not negative) in the mask."""
    wanted = mask.bool()
    best = (
        score.masked_fill(~wanted, -1).topk(min(capacity, len(score)), dim=0, sorted=False).indices
    )
    return torch.zeros_like(wanted).scatter_(0, best, True) & wanted


def _capacity(
    counts: torch.Tensor,
    num_tokens: int,
    factor: float,
    min_capacity: int,
    drop_tokens: bool,
    groups: AgreementGroups,
) -> Capacity:
    """Count slots per expert: for its share of tokens, or for the fullest of all ranks."""
    if drop_tokens:
        # Local: ranks of one expert group exchange slots, so they must see equally many tokens.
        return max(math.ceil(num_tokens / len(counts) * factor), min_capacity)
    most = counts.max()
    for group in groups if isinstance(groups, list | tuple) else (groups,):
        if group is not None and dist.get_world_size(group=group) > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    # One slot at least: experts and exchanges need no case for nothing.
    return max(int(most), 1)


def _balance(gates: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    num_tokens, num_experts = gates.shape
    counted = max(num_tokens, 1)
    return num_experts * torch.sum(
        gates.sum(dim=0) / counted * (wanted.sum(dim=0).to(gates.dtype) / counted)
    )


def _kept_gates(gates: torch.Tensor, chosen: _Chosen) -> torch.Tensor:
    return gates.gather(1, chosen.experts) * chosen.kept.gather(1, chosen.experts)


def _shares(gates: torch.Tensor, chosen: _Chosen) -> torch.Tensor:
    """[S, k]: the probabilities of the kept routes, normalized to 1 per token."""
    weights = _kept_gates(gates, chosen)
    # A token whose routes are all dropped has sum 0 and keeps weights of 0.
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)


def _result(
    chosen: _Chosen,
    weights: torch.Tensor,
    l_aux: torch.Tensor,
    capacity: Capacity,
    counts: torch.Tensor,
    sparse: bool,
) -> Routes:
    num_experts = len(counts)
    kept = chosen.kept.gather(1, chosen.experts)  # [S, k]
    locations = chosen.positions.gather(1, chosen.experts) * kept
    if sparse:
        indices = chosen.experts.masked_fill(~kept, -1)
        return SparseRoutes(
            l_aux, capacity, num_experts, indices.t(), locations.t(), weights.t(), counts
        )
    slots = chosen.experts * capacity + locations
    shape = (len(kept), num_experts, capacity)
    # Adding, not setting: a dropped route adds 0 to a slot that a kept one may own.
    combine = weights.new_zeros(len(kept), num_experts * capacity).scatter_add(1, slots, weights)
    taken = torch.zeros_like(combine, dtype=torch.int64).scatter_add(1, slots, kept.long())
    return DenseRoutes(l_aux, combine.view(shape), taken.bool().view(shape), counts)
