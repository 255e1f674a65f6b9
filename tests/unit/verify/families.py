"""Small transformers of all families under `ds_verify`, with several seeds: a campaign."""

import argparse
import importlib
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from deepspeed.verify.oracle import ranks
from deepspeed.verify.oracle.cli import Settings, verify
from deepspeed.verify.oracle.report import Verdict
from unit.launcher import forked
from unit.rank_server import COMPILER, OTHERS_PRELOADED

CONFIG = Path(__file__).parents[3] / "examples" / "ds_config.json"
_DENSE = "num_hidden_layers=2&hidden_size=64&intermediate_size=96&num_attention_heads=4"
_EXPERTS = f"{_DENSE}&num_key_value_heads=2&vocab_size=256"

# What each family brings: rotary and grouped attention, learned positions and tied embeddings,
# experts with and without a shared one, recurrence, two stacks, masked tokens, windows, norms of
# heads, queries and keys in one weight, positions by a bias.
FAMILIES: dict[str, str] = {
    "llama": f"hf:llama?{_DENSE}&num_key_value_heads=2&vocab_size=256",
    "qwen2": f"hf:qwen2?{_DENSE}&num_key_value_heads=2&vocab_size=256",
    "gpt2": "hf:gpt2?n_layer=2&n_embd=64&n_head=4&vocab_size=256",
    "phi": f"hf:phi?{_DENSE}&vocab_size=256",
    "gpt_neox": f"hf:gpt_neox?{_DENSE}&vocab_size=256",
    "mixtral": f"hf:mixtral?{_EXPERTS}&num_local_experts=4",
    "qwen2_moe": f"hf:qwen2_moe?{_EXPERTS}&num_experts=4&num_experts_per_tok=2"
    "&moe_intermediate_size=48&shared_expert_intermediate_size=64",
    "olmoe": f"hf:olmoe?{_EXPERTS}&num_experts=4&num_experts_per_tok=2",
    "mamba": "hf:mamba?num_hidden_layers=2&hidden_size=64&state_size=8&vocab_size=256&sequence=16",
    "t5": "hf:t5?num_layers=2&d_model=64&d_kv=16&d_ff=96&num_heads=4&vocab_size=256",
    "bart": "hf:bart?d_model=64&encoder_layers=2&decoder_layers=2&encoder_attention_heads=4"
    "&decoder_attention_heads=4&encoder_ffn_dim=96&decoder_ffn_dim=96&vocab_size=256"
    "&max_position_embeddings=64",
    "bert": f"hf:bert?{_DENSE}&vocab_size=256",
    "roberta": f"hf:roberta?{_DENSE}&vocab_size=256&max_position_embeddings=66",
    "mistral": f"hf:mistral?{_DENSE}&num_key_value_heads=2&vocab_size=256&sliding_window=16",
    "qwen3": f"hf:qwen3?{_DENSE}&num_key_value_heads=2&head_dim=16&vocab_size=256",
    "gemma2": f"hf:gemma2?{_DENSE}&num_key_value_heads=1&head_dim=16&vocab_size=256",
    "phi3": f"hf:phi3?{_DENSE}&num_key_value_heads=2&vocab_size=256&pad_token_id=0",
    "falcon": "hf:falcon?num_hidden_layers=2&hidden_size=64&num_attention_heads=4&vocab_size=256",
    "bloom": "hf:bloom?n_layer=2&hidden_size=64&n_head=4&vocab_size=256",
    "opt": "hf:opt?num_hidden_layers=2&hidden_size=64&ffn_dim=96&num_attention_heads=4"
    "&word_embed_proj_dim=64&vocab_size=256&max_position_embeddings=64",
}
_HOST = {"device": "cpu", "pin_memory": True}
KINDS: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2, "overlap_comm": True},
    "stage 3": {"stage": 3},
    "stage 3 on the host": {"stage": 3, "offload_param": _HOST, "offload_optimizer": _HOST},
}


def example_config() -> dict[str, Any]:
    """The configuration of the examples."""
    config: dict[str, Any] = json.loads(CONFIG.read_text(encoding="utf-8"))
    return config


def check(family: str, kind: str, seed: int) -> bool:
    """Run `ds_verify` and print what failed."""
    began, config = time.monotonic(), {**example_config(), "zero_optimization": KINDS[kind]}
    report = verify(Settings(config, FAMILIES[family], steps=2, schedules=2, seed=seed))
    verdict, took = "PASS" if report.passed else "FAIL", time.monotonic() - began
    print(f"{family:10} {kind:20} seed {seed}  {verdict}  {took:5.0f} s", flush=True)
    for row in report.rows:
        if row.verdict is Verdict.FAIL:
            print(f"    {row.check} {row.family}: {row.detail}", flush=True)
    return report.passed


def main(argv: list[str] | None = None) -> int:
    """Every family and kind with each seed; returns how many failed, as an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="seeds per family")
    parser.add_argument("--seed", type=int, help="the first of them")
    parser.add_argument("--family", choices=FAMILIES, help="only this one")
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    arguments = parser.parse_args(argv)
    first = random.randrange(10**6) if arguments.seed is None else arguments.seed
    chosen = [arguments.family] if arguments.family else list(FAMILIES)
    seeds = range(first, first + arguments.rounds)
    kinds = [arguments.kind] if arguments.kind else list(KINDS)
    # Two thirds of a rank's time are imports: it is forked from this process, which has them.
    for module in ("transformers.modeling_utils", *OTHERS_PRELOADED, *COMPILER):
        importlib.import_module(module)
    with patch.object(ranks, "subprocess", forked.replacement):
        passed = [check(*one) for one in itertools.product(chosen, kinds, seeds)]
    print(f"{sum(passed)} of {len(passed)} passed (seeds {seeds.start} to {seeds.stop - 1})")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
