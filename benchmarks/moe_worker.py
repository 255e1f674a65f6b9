"""One rank that runs mixture-of-experts layers, this project's or upstream's; started by `moe.py`.
See `serving`.

Cases are named `K-TOKENS`: routes per token, and tokens per rank. A step is forward and backward of
the layer alone, without an engine: what is timed is gate, dispatch, exchange, experts and combine.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from serving import Step, serve, start_distributed, take_stdout
from torch import nn


def build_step(width: int, experts: int, k: int, tokens: int) -> Step:
    """Forward and backward of one layer on `tokens` random tokens."""
    from deepspeed.moe.layer import MoE  # startup: after the group is initialized

    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
    layer = MoE(width, expert, num_experts=experts, ep_size=dist.get_world_size(), k=k)
    layer.set_deepspeed_parallelism()
    hidden = torch.randn(
        1,
        tokens,
        width,
        generator=torch.Generator().manual_seed(dist.get_rank()),
        requires_grad=True,
    )

    def step() -> None:
        output, l_aux, _ = layer(hidden)
        (output.square().mean() + l_aux).backward()
        layer.zero_grad()
        hidden.grad = None

    return step


def main() -> None:
    """Build one layer per case and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--experts", type=int, required=True)
    parser.add_argument("--cases", nargs="+", required=True)
    arguments = parser.parse_args()
    protocol = take_stdout()
    torch.set_num_threads(1)
    versions = start_distributed(with_deepspeed=True)
    cases = {}
    for case in arguments.cases:
        k, tokens = map(int, case.split("-"))
        cases[case] = build_step(arguments.width, arguments.experts, k, tokens)
    serve(protocol, versions, cases)


if __name__ == "__main__":
    main()
