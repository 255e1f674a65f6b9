"""Mixture of experts as the papers tell it: loops in plain torch, one process; see `route`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Gate:
    """Routes per token, capacity factor, least capacity, drop, drop the last, not the least."""

    k: int
    factor: float
    minimum: int
    drop: bool
    last: bool = False


@dataclass(frozen=True)
class Decision:
    """One (token, expert, slot, weight) per kept route, loss and counts."""

    routes: list[tuple[int, int, int, torch.Tensor]]
    l_aux: torch.Tensor
    counts: list[int]
    capacity: int


def route(logits: torch.Tensor, gate: Gate, used: list[int] | None = None) -> Decision:
    """Logits [S, E] to decisions, without noise."""
    num_tokens, num_experts = logits.shape
    probabilities = torch.softmax(logits, dim=1)
    order = probabilities.detach().argsort(dim=1, descending=True).tolist()
    used = [1] * num_tokens if used is None else used
    choices = [experts[: gate.k] for experts in order]
    wanted = {
        (token, expert) for token in range(num_tokens) if used[token] for expert in choices[token]
    }
    counts = [sum((token, e) in wanted for token in range(num_tokens)) for e in range(num_experts)]
    per_expert = math.ceil(num_tokens / num_experts * gate.factor * gate.k)
    capacity = max(per_expert, gate.minimum) if gate.drop else max(counts)

    slots: dict[tuple[int, int], int] = {}
    for expert in range(num_experts):
        queue = _queue(expert, choices, wanted, probabilities.detach(), gate, capacity)
        slots |= {(token, expert): slot for slot, token in enumerate(queue)}

    routes = []
    for token in range(num_tokens):
        kept = [expert for expert in choices[token] if (token, expert) in slots]
        weights = probabilities[token, kept]
        weights = weights / weights.sum() if gate.k > 1 else weights
        taken = [slots[token, expert] for expert in kept]
        routes += zip([token] * len(kept), kept, taken, weights, strict=True)

    counted = choices if gate.k != 2 or gate.last else [choice[:1] for choice in choices]
    seen = [[used[t] and e in counted[t] for t in range(num_tokens)] for e in range(num_experts)]
    fractions = [sum(tokens) / num_tokens for tokens in seen]
    l_aux = sum(probabilities[:, e].mean() * fractions[e] for e in range(num_experts)) * num_experts
    return Decision(routes, l_aux / len(counted[0]), counts, capacity)


def _queue(
    expert: int,
    choices: list[list[int]],
    wanted: set[tuple[int, int]],
    probabilities: torch.Tensor,
    gate: Gate,
    capacity: int,
) -> list[int]:
    """The tokens that an expert takes, in the order of their slots."""
    tokens = [token for token in range(len(choices)) if (token, expert) in wanted]
    if gate.k == 2 and not gate.last:  # GShard: first choices first
        tokens.sort(key=lambda token: choices[token][0] != expert)
    if gate.drop and gate.k > 2 and not gate.last:
        best = sorted(tokens, key=lambda token: -float(probabilities[token, expert]))[:capacity]
        return sorted(best)
    return tokens[:capacity]


def expert_forward(tokens: torch.Tensor, params: Tensors, name: str) -> torch.Tensor:
    """One expert."""
    weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
    return torch.tanh(torch.nn.functional.linear(tokens, weight, bias))


def moe_forward(
    hidden: torch.Tensor,
    params: Tensors,
    gate: Gate,
    num_experts: int,
    expert_forward: Callable[[torch.Tensor, Tensors, str], torch.Tensor] = expert_forward,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and balancing loss of tokens [S, M], of experts `experts.E`."""
    decision = route(hidden.float() @ params["wg"].float().t(), gate)
    outputs = [torch.zeros_like(hidden[0]) for _ in hidden]
    for expert in range(num_experts):
        mine = [r for r in decision.routes if r[1] == expert]
        if mine:
            tokens = hidden[[token for token, *_ in mine]]
            results = expert_forward(tokens, params, f"experts.{expert}")
            for (token, _, _, weight), result in zip(mine, results, strict=True):
                outputs[token] = outputs[token] + weight.to(hidden.dtype) * result
    return torch.stack(outputs), decision.l_aux
