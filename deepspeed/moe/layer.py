"""The layer that a model uses. Module names are upstream's, since checkpoints hold them:
`deepspeed_moe.gate.wg`, `deepspeed_moe.experts.deepspeed_experts.I`, and `mlp`, `coefficient`.
"""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.comm.parallel_map import ParallelMap
from deepspeed.moe.experts import Experts, plain_output
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.utils import groups


def make_expert_groups(ep_size: int, is_tensor_parallel: bool, data_first: bool) -> None:
    """Make the axes of experts on the map in force, once. Collective over the world."""
    here = groups.current()
    here.make_experts(ep_size, data_first, sharded=is_tensor_parallel and here.mpu is not None)


class MoE(nn.Module):
    """A mixture of `num_experts` copies of `expert` (see `Experts`), spread over `ep_size` ranks.

    Ranks of one expert group must see equally many tokens unless ``drop_tokens=False``. With tensor
    parallelism all tensor ranks must see the same tokens and have the same state of the default
    random generator, as they must route alike. `use_residual` adds a dense `expert`, both weighted
    by a learned softmax; with `enable_expert_tensor_parallelism` `expert` is tensor parallel; the
    others are `TopKGate`'s. ValueError for values that do not go together.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts % ep_size:
            raise ValueError(
                f"num_experts={num_experts} must be a multiple of ep_size={ep_size}: each rank "
                "holds equally many"
            )
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.ep_size = ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = MOELayer(
            gate,
            Experts(expert, self.num_local_experts, self.expert_group_name),
            self.expert_group_name,
            self.ep_size,
            self.num_local_experts,
            use_tutel,
            enable_expert_tensor_parallelism,
        )
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Make the process groups of its experts. Collective; `deepspeed.initialize` calls it."""
        make_expert_groups(
            self.ep_size, self.enable_expert_tensor_parallelism, use_data_before_expert_parallel_
        )
        axes = groups.current().experts(self.expert_group_name)
        self.deepspeed_moe._set_ep_group(axes.expert.group)

    @property
    def parallel_map(self) -> ParallelMap:
        return self.deepspeed_moe.parallel_map or groups.current()

    @property
    def global_expert_ids(self) -> range:
        """The number among all experts of each local expert, once the groups are made."""
        axes = self.parallel_map.experts(self.expert_group_name)
        first = axes.expert.rank * self.num_local_experts
        return range(first, first + self.num_local_experts)

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the experts on [..., hidden_size]; `used_token` is 0 for those no expert sees.

        Returns output (zeros for tokens without an expert), load-balancing loss to be added to the
        model's, and tokens routed to each expert before dropping.
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        l_aux, exp_counts = self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
        # What stays on the module must not hold the graph: it would keep activations alive and
        # forbid copying the model.
        self.deepspeed_moe.l_aux = l_aux.detach()
        if self.use_residual:
            coefficients = torch.softmax(self.coefficient(hidden_states), dim=-1)
            dense = plain_output(self.mlp(hidden_states))
            output = output * coefficients[..., 0:1] + dense * coefficients[..., 1:]
        return output, l_aux, exp_counts
