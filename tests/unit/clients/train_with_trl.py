"""A user's script: a trainer of trl at stage 3. Run by zero3_trl.py; the matrix has all stages.

`dpo` has a second model that is only evaluated, unless its words are asked for before; `grpo` and
`rloo` generate with the model that they train.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset, IterableDataset, load_from_disk
from peft import LoraConfig

from unit.clients.matrix.stand_ins import causal, pairs_of_words, said, tokenizer
from unit.clients.scripts import BATCH, TRAINER, auto, begin, by_step, digest_of, tell
from unit.clients.train_with_sequence_parallel import parallelism

STEPS, SAVED_AT = 4, 2
KINDS = ("sft", "sft-lora", "dpo", "grpo")
MORE_KINDS = ("sft-stream", "sft-ulysses", "dpo-precomputed", "reward", "rloo")


def config(stage: int) -> dict[str, Any]:
    """Of which nothing stays whole at stage 3."""
    zero = auto("reduce_bucket_size", "stage3_prefetch_bucket_size")
    zero |= {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero |= {"stage3_gather_16bit_weights_on_model_save": True}
    return {**BATCH, "zero_optimization": zero}


def pretrained(out: Path) -> str:
    """A folder with a model and its tokenizer."""
    folder = out / "pretrained"
    if torch.distributed.get_rank() == 0 and not folder.exists():
        torch.manual_seed(0)
        causal().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    torch.distributed.barrier()
    return str(folder)


def distinct(completions: list[str], **others: Any) -> list[float]:
    """A reward: how many words of a completion differ."""
    return [float(len(set(completion.split()))) for completion in completions]


def make_trainer(kind: str, out: Path, plan: dict[str, Any] | None) -> Any:
    """The trainer as its page shows it; without a plan, without DeepSpeed."""
    words: dict[str, Any] = {
        **{"output_dir": str(out / kind), "deepspeed": plan, "use_cpu": plan is None, **TRAINER},
        **{"bf16": False, "max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1, "seed": 3},
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        **{"save_strategy": "steps", "save_steps": SAVED_AT},
        "model_init_kwargs": {"dtype": "float32"},
    }
    model, starts = pretrained(out), range(64)
    if kind == "sft-ulysses":
        words["pad_to_multiple_of"] = 2
        if plan is not None:  # the ranks share what each of them has otherwise
            words |= {"parallelism_config": parallelism(), "per_device_train_batch_size": 4}
    if kind.startswith("sft"):
        texts = [{"text": said(start, 12)} for start in starts]
        data = Dataset.from_list(texts)
        if kind == "sft-stream":
            data = IterableDataset.from_generator(lambda: iter(texts))
        adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        more = {"peft_config": adapters} if kind == "sft-lora" else {}
        settings = trl.SFTConfig(**words, max_length=16)
        return trl.SFTTrainer(model=model, args=settings, train_dataset=data, **more)
    if kind.startswith("dpo") or kind == "reward":
        pairs = Dataset.from_list(list(pairs_of_words()))
        words["max_length"] = 16
        if kind == "reward":
            settings = trl.RewardConfig(**words)
            return trl.RewardTrainer(model=model, args=settings, train_dataset=pairs)
        precomputed = kind == "dpo-precomputed"
        if precomputed:  # from a file: rank 0 keeps what it finds beside it
            if torch.distributed.get_rank() == 0 and not (out / "pairs").exists():
                pairs.save_to_disk(out / "pairs")
            torch.distributed.barrier()
            pairs = load_from_disk(out / "pairs")
        settings = trl.DPOConfig(**words, precompute_ref_log_probs=precomputed)
        return trl.DPOTrainer(model=model, args=settings, train_dataset=pairs)
    prompts = Dataset.from_list([{"prompt": said(start, 4)} for start in starts])
    name = "RLOO" if kind == "rloo" else "GRPO"
    words |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
    settings, trainer = getattr(trl, f"{name}Config")(**words), getattr(trl, f"{name}Trainer")
    return trainer(model=model, args=settings, reward_funcs=distinct, train_dataset=prompts)


def run(arguments: Namespace) -> dict[str, Any]:
    """What a user sees of one run."""
    begin()
    (kind,) = arguments.words
    trainer = make_trainer(kind, arguments.out, config(3))
    saved = arguments.out / kind / f"checkpoint-{SAVED_AT}"
    trainer.train(resume_from_checkpoint=str(saved) if arguments.resume else None)
    engine = trainer.model_wrapped
    seen = {key: by_step(trainer, key) for key in ("loss", "grad_norm")}
    seen |= {"engine": type(engine).__module__, "stage": engine.zero_optimization_stage()}
    return {**seen, "weights": digest_of(trainer.model)}


if __name__ == "__main__":
    tell(run, ", ".join(KINDS + MORE_KINDS))
