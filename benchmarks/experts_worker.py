"""One rank that trains a mixture of experts of transformers; started by `experts.py`. See
`serving`.

Besides times it answers `memory 0` with bytes that it keeps between steps (weights, gradients,
optimizer state) and the peak of resident bytes above those before the model was made.
"""

from __future__ import annotations

import argparse
import resource
from typing import Any

import psutil
import torch
import torch.distributed as dist
from serving import Step, serve, start_distributed, take_stdout

VOCABULARY = 1024


def configuration(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the engine."""
    stage = 3 if arguments.system in ("leaves", "spread_shards") else 2
    is_spread = arguments.system in ("spread", "spread_shards")
    return {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": arguments.precision == "bf16"},
        "zero_optimization": {"stage": stage},
        "expert_parallel": {"enabled": is_spread, "autoep_size": arguments.spread_over},
    }


def make_model(arguments: argparse.Namespace) -> Any:
    """A Qwen3-MoE without its tricks, and for stage 3 its blocks of experts as leaves."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    from deepspeed.utils import set_z3_leaf_modules  # startup: after the group is initialized

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.expert_width,
        moe_intermediate_size=arguments.expert_width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=arguments.hidden // 4,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.k,
        max_position_embeddings=arguments.sequence,
    )
    model = Qwen3MoeForCausalLM(config)
    if arguments.system == "leaves":
        set_z3_leaf_modules(model, [Qwen3MoeSparseMoeBlock])
    return model


def build_step(engine: Any, arguments: argparse.Namespace) -> Step:
    """Forward, backward and update on this rank's tokens."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(
        0, VOCABULARY, (arguments.batch, arguments.sequence), generator=generator
    )

    def step() -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    return step


def kept_bytes(engine: Any) -> int:
    """Storage of weights, gradients and optimizer state that this rank keeps between steps."""
    tensors = [*engine.module.parameters(), *engine.module.buffers()]
    tensors += [param.grad for param in engine.module.parameters() if param.grad is not None]
    tensors += [param.ds_tensor for param in tensors if hasattr(param, "ds_tensor")]
    for group in engine.optimizer.groups:
        tensors += [group.master, group.grad]
    for state in engine.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor is not None
    }
    return sum(storages.values())


def main() -> None:
    """Build the system and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True)
    for name in (
        "layers",
        "hidden",
        "experts",
        "expert-width",
        "k",
        "batch",
        "sequence",
        "spread-over",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--precision", required=True)
    arguments = parser.parse_args()
    protocol = take_stdout()
    torch.set_num_threads(1)
    versions = start_distributed(with_deepspeed=True)
    import transformers  # its memory is not the model's

    import deepspeed  # startup: after the group is initialized

    versions["transformers"] = transformers.__version__
    make_model(argparse.Namespace(**{**vars(arguments), "layers": 1}))
    before = psutil.Process().memory_info().rss
    engine = deepspeed.initialize(model=make_model(arguments), config=configuration(arguments))[0]

    def memory(_: Step, __: int) -> tuple[int, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return kept_bytes(engine), peak - before

    serve(protocol, versions, {"": build_step(engine, arguments)}, {"memory": memory})


if __name__ == "__main__":
    main()
