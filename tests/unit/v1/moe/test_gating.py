"""The gates against loops over tokens and experts; moves of tokens against dense masks."""

from typing import Any

import pytest
import torch

from deepspeed.moe import gating
from deepspeed.moe.dispatch import combine, dispatch, route_map
from deepspeed.moe.sharded_moe import (
    TopKGate,
    gumbel_rsample,
    multiplicative_jitter,
    top1gating,
    top2gating,
    topkgating,
)
from unit.models import drawn
from unit.v1.moe.slow_gate import Gate, route

SHAPES = [(12, 4), (17, 3), (8, 8), (3, 4)]
GATES = [
    Gate(k, factor, minimum, drop, last)
    for k in (1, 2, 3)
    for last in (False, True)
    for factor, minimum, drop in ((0.5, 1, True), (1.0, 4, True), (1.0, 1, False))
    if (k, last) != (1, True)
]


def run_gate(
    logits: torch.Tensor, gate: Gate, sparse: bool, used: torch.Tensor | None = None
) -> Any:
    shared: dict[str, Any] = {
        "capacity_factor": gate.factor,
        "min_capacity": gate.minimum,
        "drop_tokens": gate.drop,
        "sparse_routes": sparse,
        "used_token": used,
    }
    if gate.k == 1:
        return top1gating(logits, use_rts=False, **shared)
    if gate.k == 2 and not gate.last:
        return top2gating(logits, top2_2nd_expert_sampling=False, **shared)
    return topkgating(logits, gate.k, drop_policy="position" if gate.last else "probs", **shared)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_gates_equal_the_loops(gate: Gate, masked: bool) -> None:
    # Kills: dropping by another order, capacities without k, weights normalized before dropping,
    # counts after dropping, used_token ignored by k > 1, gradients that do not reach the logits
    # through weights or loss.
    for seed, (num_tokens, num_experts) in enumerate(SHAPES):
        logits = drawn(seed, num_tokens, num_experts) * 2
        used = (torch.arange(num_tokens) % 3 > 0).float() if masked else None
        mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        expected = route(theirs, gate, None if used is None else [int(u) for u in used])
        dense = run_gate(mine, gate, sparse=False, used=used)
        shape = (num_tokens, num_experts, expected.capacity)
        assert dense.combine_weights.shape == dense.dispatch_mask.shape == shape
        wanted = torch.zeros(shape)
        for token, expert, slot, weight in expected.routes:
            wanted[token, expert, slot] = weight.detach()
            assert dense.dispatch_mask[token, expert, slot]
        torch.testing.assert_close(dense.combine_weights.detach(), wanted)
        assert int(dense.dispatch_mask.sum()) == len(expected.routes)
        assert dense.exp_counts.tolist() == expected.counts
        torch.testing.assert_close(dense.l_aux, expected.l_aux)
        factors = drawn(seed + 99, *shape)
        (dense.l_aux + (dense.combine_weights * factors).sum()).backward()
        weighed = sum(weight * factors[t, e, c] for t, e, c, weight in expected.routes)
        (expected.l_aux + weighed).backward()
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_moves_equal_the_masks(gate: Gate) -> None:
    """Index routing and multiplication by dense masks are the same function, both ways."""
    logits = drawn(3, 10, 4) * 2
    sparse, dense = run_gate(logits, gate, sparse=True), run_gate(logits, gate, sparse=False)
    tokens = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    # One slot more than the capacity, as padding for tensor-parallel ranks makes it; it must stay
    # empty.
    slots = sparse.capacity + 1
    weights = sparse.gates.double().detach().requires_grad_()
    moves = route_map(sparse, slots)
    content = dispatch(tokens, moves)
    expected = torch.einsum("sec,sm->ecm", dense.dispatch_mask.double(), tokens)
    assert torch.equal(content.view(4, slots, 5)[:, :-1], expected)
    assert not content.view(4, slots, 5)[:, -1].any()
    wanted = torch.einsum("sec,ecm->sm", dense.combine_weights.double(), expected)
    torch.testing.assert_close(combine(content, weights, moves), wanted)
    # Kills: a gradient that misses a route, or goes to the token of a dropped one.
    assert torch.autograd.gradcheck(
        lambda t, w: combine(dispatch(t, moves).sin(), w, moves), (tokens, weights)
    )


def test_nothing_comes_from_empty_slots() -> None:
    # Kills: multiplying what an expert makes of nothing by 0: 0 * inf is NaN.
    indices, gates = torch.tensor([[0, -1]]), torch.tensor([[0.5, 0.0]])
    locations = torch.zeros(1, 2, dtype=torch.int64)
    sparse = gating.SparseRoutes(torch.zeros(()), 2, 2, indices, locations, gates, torch.zeros(2))
    moves = route_map(sparse, 2)
    slots = torch.full((4, 3), float("inf"))
    slots[0] = 1.0
    slots.requires_grad_()
    weights = sparse.gates.clone().requires_grad_()
    output = combine(slots, weights, moves)
    assert output.tolist() == [[0.5] * 3, [0.0] * 3]
    output.sum().backward()
    assert slots.grad.isfinite().all() and slots.grad[1:].abs().sum() == 0
    assert weights.grad.tolist() == [[3.0, 0.0]]


def test_random_token_selection_keeps_capacity_tokens_of_each_expert() -> None:
    logits = torch.zeros(12, 2)
    logits[:9, 0] = 5.0
    logits[9:, 1] = 5.0
    kept = []
    for seed in range(20):
        torch.manual_seed(seed)
        routes = top1gating(logits, 1.0, 1, use_rts=True, sparse_routes=True)
        assert isinstance(routes, gating.SparseRoutes)
        tokens = (routes.indices[0] == 0).nonzero().flatten().tolist()
        assert len(tokens) == 6 and set(tokens) <= set(range(9))
        assert sorted(routes.locations[0][tokens].tolist()) == list(range(6))
        assert (routes.indices[0] == 1).nonzero().flatten().tolist() == [9, 10, 11]
        kept.append(tuple(tokens))
    # Kills: always the first ones.
    assert len(set(kept)) > 5 and any(8 in tokens for tokens in kept)


def test_sampled_experts_follow_the_probabilities() -> None:
    # 4000 draws of p = 0.75: a deviation of 0.04 is six standard errors.
    torch.manual_seed(0)
    logits = torch.tensor([[3.0, 1.0]]).log().expand(4000, 2)
    routes = top1gating(logits, 4.0, 1, noisy_gate_policy="RSample", sparse_routes=True)
    assert abs((routes.exp_counts[0] / 4000).item() - 0.75) < 0.04
    # The weight is the chosen expert's probability, not the largest.
    assert isinstance(routes, gating.SparseRoutes)
    torch.testing.assert_close(routes.gates[0], torch.tensor([0.75, 0.25])[routes.indices[0]])
    logits = torch.tensor([[9.0, 3.0, 1.0]]).log().expand(4000, 3)
    second = top2gating(logits, 4.0, 1, sparse_routes=True)
    assert second.exp_counts[0] == 4000 and abs((second.exp_counts[1] / 4000).item() - 0.75) < 0.04


def test_noise() -> None:
    torch.manual_seed(0)
    noise = gumbel_rsample((20000,), torch.device("cpu"))
    assert abs(noise.mean().item() - 0.5772) < 0.05 and abs(noise.var().item() - 1.6449) < 0.1
    x = torch.full((1000,), 2.0)
    jittered = multiplicative_jitter(x, x.device)
    assert 1.98 <= jittered.min().item() < 1.985 and 2.015 < jittered.max().item() <= 2.02
    assert multiplicative_jitter(x, x.device, epsilon=0) is x


def test_jitter_is_for_training_only() -> None:
    gate = TopKGate(4, 4, noisy_gate_policy="Jitter", min_capacity=64, use_rts=False)
    x = torch.randn(64, 4)
    first, second = gate(x, sparse_routes=True), gate(x, sparse_routes=True)
    assert not torch.equal(first.gates, second.gates)
    gate.eval()
    assert torch.equal(gate(x, sparse_routes=True).gates, gate(x, sparse_routes=True).gates)


def test_gate_is_in_fp32_and_has_a_capacity_for_evaluation() -> None:
    gate = TopKGate(4, 2, capacity_factor=1.0, eval_capacity_factor=2.0, min_capacity=1).bfloat16()
    x = torch.randn(8, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routes = gate(x, sparse_routes=True)
    assert routes.gates.dtype == routes.l_aux.dtype == torch.float32 and routes.capacity == 4
    expected = torch.softmax(x.float() @ gate.wg.weight.float().t(), dim=1).amax(dim=1)
    kept = routes.indices[0] >= 0
    assert torch.equal(routes.gates[0][kept], expected[kept])
    assert gate.eval()(x, sparse_routes=True).capacity == 8


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"k": 0}, "k=0"),
        ({"k": 5}, "k=5: a token can be routed to 1..num_experts=4"),
        ({"noisy_gate_policy": "Noise"}, "noisy_gate_policy='Noise'"),
        ({"noisy_gate_policy": "RSample", "k": 2}, "noisy_gate_policy='RSample'"),
    ],
)
def test_wrong_gates_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopKGate(8, 4, **arguments)


def test_unknown_drop_policy_and_tutel_are_refused() -> None:
    with pytest.raises(ValueError, match="drop_policy='best'"):
        topkgating(torch.zeros(4, 4), 3, 1.0, 1, drop_policy="best")
    with pytest.raises(NotImplementedError, match="use_tutel=True"):
        top1gating(torch.zeros(4, 4), 1.0, 1, use_tutel=True)


def test_no_tokens() -> None:
    # Kills: a mean over nothing.
    routes = top1gating(torch.zeros(0, 4), 1.0, 2, sparse_routes=True)
    assert routes.l_aux == 0 and isinstance(routes, gating.SparseRoutes) and routes.capacity == 2
    assert not dispatch(torch.zeros(0, 3), route_map(routes, 2)).any()
