"""The gate with its weights, and the layer: gate, move tokens into slots, all-to-all over the
expert group, experts, all-to-all back, combine (GShard). Every rank of an expert group issues the
same two all-to-alls of the same size, whether or not its experts have tokens.

In a tensor-parallel model each tensor rank sends its part of the slots; if the experts are tensor
parallel too, all parts are gathered before them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from deepspeed import comm as dist
from deepspeed._lazy import lazy_attributes
from deepspeed.comm.parallel_map import Axis, ParallelMap
from deepspeed.moe.dispatch import combine, dispatch, route_map
from deepspeed.moe.gating import (
    JITTER,
    NOISE_POLICIES,
    AgreementGroups,
    Routes,
    SparseRoutes,
    multiplicative_jitter,
    refuse_tutel,
    top1gating,
    top2gating,
    topkgating,
)
from deepspeed.moe.mappings import drop_tokens_over, gather_tokens_over
from deepspeed.utils import groups

# Upstream's path of these names; its further ones say what to use instead.
_GATING = dict.fromkeys(("DenseRoutes", "gumbel_rsample"), "deepspeed.moe.gating")
__getattr__ = lazy_attributes(__name__, _GATING)


class Lanes(NamedTuple):
    """Rows of the first axis to and from each rank of a group; None: equally many."""

    group: dist.Group
    sent: list[int] | None = None
    received: list[int] | None = None

    @property
    def back(self) -> Lanes:
        return Lanes(self.group, self.received, self.sent)


class _AllToAll(torch.autograd.Function):
    """Piece i of the first axis to rank i of the group; the gradient goes back, unscaled."""

    @staticmethod
    def forward(ctx: Any, lanes: Lanes, input: torch.Tensor) -> torch.Tensor:
        ctx.lanes = lanes
        return _exchange(input, lanes)

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _exchange(grad_output[0], ctx.lanes.back)


def exchange(rows: torch.Tensor, lanes: Lanes) -> torch.Tensor:
    """Exchange rows [rows, ...], in the order of the ranks; differentiable and collective."""
    received: torch.Tensor = _AllToAll.apply(lanes, rows)
    return received


def _exchange(pieces: torch.Tensor, lanes: Lanes) -> torch.Tensor:
    rows = len(pieces) if lanes.received is None else sum(lanes.received)
    received = pieces.new_empty((rows, *pieces.shape[1:]))
    dist.all_to_all_single(
        received, pieces.contiguous(), lanes.received, lanes.sent, group=lanes.group
    )
    return received


class TopKGate(nn.Module):
    """A linear gate of k routes per token, computed in fp32 whatever the model's dtype.

    The capacity factors are slots per expert in units of k tokens / experts, in training and
    evaluation; `min_capacity` is the least. `noisy_gate_policy` is None, "Jitter" (noise on the
    gate's input) or "RSample" (sampled expert, k = 1), in training only. `drop_tokens`, `use_rts`
    and `ep_group`: see `top1gating`. ValueError for a k or a policy that does not exist or fit.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: AgreementGroups = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if not 1 <= k <= num_experts:
            raise ValueError(
                f"k={k}: a token can be routed to 1..num_experts={num_experts} experts"
            )
        if noisy_gate_policy not in NOISE_POLICIES:
            raise ValueError(
                f"noisy_gate_policy={noisy_gate_policy!r}: expected one of {NOISE_POLICIES}"
            )
        if noisy_gate_policy == "RSample" and k > 1:
            raise ValueError(
                f"noisy_gate_policy='RSample' samples the one expert of k=1, got k={k}; use "
                "'Jitter' or None"
            )
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.num_experts = num_experts
        self.ep_group = ep_group
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def _set_ep_group(self, ep_group: AgreementGroups) -> None:
        self.ep_group = ep_group

    def forward(
        self,
        input: torch.Tensor,
        used_token: torch.Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> Routes:
        """Route tokens [S, M] but those whose `used_token` [S] is 0."""
        refuse_tutel(use_tutel)
        # Autocast would go back to half precision, in which close experts are confused.
        with torch.autocast(input.device.type, enabled=False):
            values = input.float()
            if self.noisy_gate_policy == JITTER and self.training:
                values = multiplicative_jitter(values, values.device)
            logits = functional.linear(values, self.wg.weight.float())
            return self._route(logits, used_token, sparse_routes)

    def _route(self, logits: torch.Tensor, used_token: torch.Tensor | None, sparse: bool) -> Routes:
        shared: dict[str, Any] = {
            "capacity_factor": self.capacity_factor if self.training else self.eval_capacity_factor,
            "min_capacity": self.min_capacity,
            "drop_tokens": self.drop_tokens,
            "ep_group": self.ep_group,
            "sparse_routes": sparse,
            "used_token": used_token,
        }
        if self.k == 1:
            policy = self.noisy_gate_policy if self.training else None
            return top1gating(logits, noisy_gate_policy=policy, use_rts=self.use_rts, **shared)
        if self.k == 2:
            return top2gating(
                logits, top2_2nd_expert_sampling=self.top2_2nd_expert_sampling, **shared
            )
        return topkgating(logits, self.k, **shared)


class MOELayer(nn.Module):
    """Gate (a `TopKGate`, or a module with its forward), exchange, experts (from [ranks, local
    experts, slots, M] to the same shape), exchange, combine.

    `parallel_map` is that of the engine, once the expert groups are set; `l_aux` and `exp_counts`
    are the load-balancing loss and the tokens of each expert, before dropping, of the last forward.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
    ) -> None:
        super().__init__()
        refuse_tutel(use_tutel)
        self.gate = gate
        self.experts = experts
        self.parallel_map: ParallelMap | None = None
        self.ep_group: dist.Group = None
        self.ep_group_name = ep_group_name
        self.ep_size = ep_size
        self.num_local_experts = num_local_experts
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.l_aux = torch.zeros(())
        self.exp_counts = torch.zeros(
            gate.num_experts if isinstance(gate, TopKGate) else 0, dtype=torch.int64
        )

    def _set_ep_group(self, ep_group: dist.Group) -> None:
        """Exchange over ``ep_group``, and agree on capacities over all that need equal ones."""
        self.ep_group = ep_group
        self.parallel_map = groups.current()
        agreement: tuple[Any, ...] = (ep_group,)
        if self.parallel_map.tensor.size > 1 and not self.enable_expert_tensor_parallelism:
            # Tensor ranks put their slots together again but may be in different expert groups;
            # expert and expert-data groups are the rows and columns of one block, so that two
            # agreements in turn reach all of it.
            agreement = (ep_group, self.parallel_map.experts(self.ep_group_name).data.group)
        if isinstance(self.gate, TopKGate):
            self.gate._set_ep_group(agreement)

    def forward(self, *input: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Run the experts on hidden states [..., M]; a second argument masks the tokens used."""
        if self.ep_group is None or self.parallel_map is None:
            raise RuntimeError(
                "MoE layer without expert groups: pass the model to deepspeed.initialize, or call "
                "set_deepspeed_parallelism() of the MoE layer on all ranks"
            )
        hidden = input[0]
        used_token = input[1] if len(input) > 1 else kwargs.get("used_token")
        tokens = hidden.reshape(-1, hidden.shape[-1])
        routes = cast(SparseRoutes, self.gate(tokens, used_token, sparse_routes=True))
        self.l_aux, self.exp_counts = routes.l_aux, routes.exp_counts
        # Tensor ranks take equal parts of each expert's slots; surplus slots stay empty.
        tensor = self.parallel_map.tensor
        parts = tensor.size
        slots_per_expert = -(-routes.capacity // parts) * parts
        moves = route_map(routes, slots_per_expert)
        slots = dispatch(tokens, moves).view(routes.num_experts, slots_per_expert, -1)
        outputs = self._run_experts(slots, tensor).reshape(
            routes.num_experts * slots_per_expert, -1
        )
        return combine(outputs, routes.gates, moves).view(*hidden.shape[:-1], -1)

    def _run_experts(self, slots: torch.Tensor, tensor: Axis) -> torch.Tensor:
        mine = self._all_to_all(slots, tensor)
        outputs = self.experts(mine.view(self.ep_size, self.num_local_experts, mine.shape[1], -1))
        return self._all_to_all(
            outputs.reshape(slots.shape[0], mine.shape[1], -1), tensor, back=True
        )

    def _all_to_all(self, slots: torch.Tensor, tensor: Axis, back: bool = False) -> torch.Tensor:
        whole_after = back or self.enable_expert_tensor_parallelism
        whole_before = not back or self.enable_expert_tensor_parallelism
        sent = drop_tokens_over(tensor, slots, dim=1) if whole_before else slots
        received = (
            exchange(sent, Lanes(self.ep_group))
            if dist.get_world_size(group=self.ep_group) > 1
            else sent
        )
        return gather_tokens_over(tensor, received, dim=1) if whole_after else received
