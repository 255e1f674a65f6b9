"""A user's script: a trainer of trl at stage 3. Run by zero3_trl.py; the matrix has all stages.

`dpo` has a second model that is only evaluated, unless its words are asked for before; `grpo` and
`rloo` generate with the model that they train.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset, load_from_disk
from peft import LoraConfig
from transformers import LlamaForCausalLM
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import deepspeed
from unit.clients.matrix.stand_ins import llama, said, tokenizer
from unit.clients.train_with_sequence_parallel import parallelism

STEPS, SAVED_AT = 4, 2
KINDS = ("sft", "sft-lora", "dpo", "grpo")
MORE_KINDS = ("sft-stream", "sft-ulysses", "dpo-precomputed", "reward", "rloo")


def config(stage: int) -> dict[str, Any]:
    """Of which nothing stays whole at stage 3."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def pretrained(out: Path) -> str:
    """A folder with a model and its tokenizer."""
    folder = out / "pretrained"
    if torch.distributed.get_rank() == 0 and not folder.exists():
        torch.manual_seed(0)
        LlamaForCausalLM(llama()).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    torch.distributed.barrier()
    return str(folder)


def distinct(completions: list[str], **others: Any) -> list[float]:
    """A reward: how many words of a completion differ."""
    return [float(len(set(completion.split()))) for completion in completions]


def make_trainer(kind: str, out: Path, plan: dict[str, Any] | None) -> Any:
    """The trainer as its page shows it; without a plan, without DeepSpeed."""
    words: dict[str, Any] = {
        "output_dir": str(out / kind),
        "deepspeed": plan,
        "use_cpu": plan is None,
        "accelerator_config": {"use_configured_state": True},
        "bf16": False,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": SAVED_AT,
        "save_strategy": "steps",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    model, starts = pretrained(out), range(64)
    if kind == "sft-ulysses":
        words["pad_to_multiple_of"] = 2
        if plan is not None:  # the ranks share what each of them has otherwise
            words |= {"parallelism_config": parallelism(), "per_device_train_batch_size": 4}
    if kind.startswith("sft"):
        texts = [{"text": said(start, 12)} for start in starts]
        stream = kind == "sft-stream"
        return SFTTrainer(
            model=model,
            args=SFTConfig(**words, max_length=16, model_init_kwargs={"dtype": "float32"}),
            train_dataset=IterableDataset.from_generator(lambda: iter(texts))
            if stream
            else Dataset.from_list(texts),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
            if kind == "sft-lora"
            else None,
        )
    if kind.startswith("dpo") or kind == "reward":
        pairs = Dataset.from_list(
            [
                {"prompt": said(start, 4), "chosen": said(start + 4, 4), "rejected": said(start, 4)}
                for start in starts
            ]
        )
        words |= {"max_length": 16, "model_init_kwargs": {"dtype": "float32"}}
        if kind == "reward":
            return RewardTrainer(model=model, args=RewardConfig(**words), train_dataset=pairs)
        precomputed = kind == "dpo-precomputed"
        if precomputed:  # from a file: rank 0 keeps what it finds beside it
            if torch.distributed.get_rank() == 0 and not (out / "pairs").exists():
                pairs.save_to_disk(out / "pairs")
            torch.distributed.barrier()
            pairs = load_from_disk(out / "pairs")
        return DPOTrainer(
            model=model,
            args=DPOConfig(**words, precompute_ref_log_probs=precomputed),
            train_dataset=pairs,
        )
    prompts = Dataset.from_list([{"prompt": said(start, 4)} for start in starts])
    trainer, settings = (RLOOTrainer, RLOOConfig) if kind == "rloo" else (GRPOTrainer, GRPOConfig)
    return trainer(
        model=model,
        args=settings(
            **words,
            num_generations=2,
            max_completion_length=6,
            beta=0.1,
            model_init_kwargs={"dtype": "float32"},
        ),
        reward_funcs=distinct,
        train_dataset=prompts,
    )


def main() -> None:
    """One run; rank 0 writes what a user sees of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("kind", choices=KINDS + MORE_KINDS)
    parser.add_argument("--resume", action="store_true", help="go on from the earlier run")
    parser.add_argument("--local_rank", type=int, help="the launcher gives it")
    arguments = parser.parse_args()
    # A host without a GPU: see docs/clients/accelerate.md.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    trainer = make_trainer(arguments.kind, arguments.out, config(3))
    saved = arguments.out / arguments.kind / f"checkpoint-{SAVED_AT}"
    trainer.train(resume_from_checkpoint=str(saved) if arguments.resume else None)
    with deepspeed.zero.GatheredParameters(trainer.model.parameters()):
        weights = torch.cat([param.detach().flatten() for param in trainer.model.parameters()])
    result = {
        "engine": type(trainer.model_wrapped).__module__,
        "stage": trainer.model_wrapped.zero_optimization_stage(),
        "loss": {
            entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry
        },
        "grad_norm": {
            entry["step"]: float(entry["grad_norm"])
            for entry in trainer.state.log_history
            if "grad_norm" in entry
        },
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    }
    if torch.distributed.get_rank() == 0:
        (arguments.out / "result.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
