"""The experts that this rank holds. Their parameters carry `allreduce = False` and `group_name =
"ep_size_N"`: they are reduced over the expert-data group of that name.
"""

from __future__ import annotations

import copy

import torch
from torch import nn


class Experts(nn.Module):
    """`num_local_experts` copies of one module, which maps [..., M] to [..., M], or to (output,
    bias), each for its own slots; `expert_group_name` is "ep_size_N", or None outside of expert
    parallelism.

    All copies start equal. Different first weights are the model's decision: construct `expert`
    under a different seed per rank (`deepspeed.initialize` then gives the ranks of each expert-data
    group the weights of its first rank), or re-initialize the members of `deepspeed_experts`.
    """

    def __init__(
        self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None
    ) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList()
        self.num_local_experts = num_local_experts
        # Inside `zero.Init` going over parameters has them gathered: copies are whole ones, which
        # other ranks share than those of `expert`.
        list(expert.parameters())
        for _ in range(num_local_experts):
            own = copy.deepcopy(expert)
            for param in own.parameters():
                param.allreduce = False  # type: ignore[attr-defined]  # marks read by the optimizers
                param.group_name = expert_group_name  # type: ignore[attr-defined]
            # A list's constructor ends for each: `zero.Init` cuts it then, before the next is made.
            self.deepspeed_experts.extend(nn.ModuleList([own]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        parts = inputs.chunk(self.num_local_experts, dim=1)
        outputs = [
            plain_output(expert(part))
            for expert, part in zip(self.deepspeed_experts, parts, strict=True)
        ]
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


def plain_output(output: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    """Take the output of a layer that may return it with a bias still to be added."""
    if isinstance(output, tuple):
        value, bias = output
        return value if bias is None else value + bias
    return output
