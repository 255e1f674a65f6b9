"""A user's script: transformers.Trainer with a configuration full of "auto"."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers.training_args
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

from unit.clients import scripts
from unit.clients.scripts import BATCH, TRAINER, auto, begin, by_step, digest_of, tell
from unit.clients.small_models import Counting, tiny_gpt2

STEPS, SAVED_AT = 4, 2
MICRO_BATCHES = 6  # of a step over all ranks, where bits are compared
SEEN = ("loss", "grad_norm", "learning_rate", "eval_loss")
# The library refuses bf16=True on a host without a GPU, unless use_cpu=True, which would leave
# DeepSpeed out. Only this gate is opened; bf16 itself works on the host.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
STAGE3 = {
    **auto("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    **dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 1e9),
    **{"sub_group_size": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
}


def config(stage: int, client: bool) -> dict[str, Any]:
    """What the DeepSpeed documentation of transformers recommends, for this stage."""
    zero = {"overlap_comm": True, "reduce_bucket_size": "auto", "contiguous_gradients": True}
    zero |= {"stage": stage, **(STAGE3 if stage == 3 else {})}
    own = {} if client else {"optimizer": scripts.ADAMW, "scheduler": scripts.DECAY}
    return {**BATCH, "bf16": {"enabled": "auto"}, "zero_optimization": zero, **own}


def accumulation_of(kind: str) -> int:
    return MICRO_BATCHES // int(os.environ["WORLD_SIZE"]) if kind == "bits" else 2


def pretrained(folder: Path) -> Path:
    """A folder with a model that somebody else has trained."""
    found = folder.parent / "pretrained"
    if torch.distributed.get_rank() == 0 and not found.exists():
        tiny_gpt2().save_pretrained(found)
    torch.distributed.barrier()
    return found


def train(folder: Path, resume: bool, kind: str, stage: str) -> dict[str, Any]:
    """One run; returns what a user sees of it. `kind` is whose optimizer and schedule: config, the
    configuration's, or the Trainer's own, client (AdamW) or adafactor; bits: the configuration's,
    with the canonical sum.
    """
    begin()
    words = config(int(stage), kind not in ("config", "bits"))
    if kind == "bits":
        words["reproducibility"] = {"world_size_invariant": True}
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=words,
        bf16=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation_of(kind),
        **{"max_grad_norm": 0.5, "learning_rate": 1e-2, "warmup_steps": 2, "logging_steps": 1},
        **{"eval_strategy": "steps", "eval_steps": SAVED_AT, "save_steps": SAVED_AT, "seed": 3},
        gradient_checkpointing=kind == "client",
        optim="adafactor" if kind == "adafactor" else "adamw_torch",
        **TRAINER,
    )
    # At stage 3 the library makes the model inside `zero.Init`, because the arguments say so.
    model = GPT2LMHeadModel.from_pretrained(pretrained(folder))
    trainer = Trainer(model, arguments, train_dataset=Counting(64), eval_dataset=Counting(8))
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}") if resume else None)
    engine = trainer.model_wrapped
    return {
        **{key: by_step(trainer, key) for key in SEEN},
        "weights": digest_of(trainer.model),
        "digest": engine.state_digest(),
        "engine": type(engine).__module__,
        "optimizer": type(engine.optimizer).__name__,
        "stage": engine.zero_optimization_stage(),
        "dtype": str(next(trainer.model.parameters()).dtype),
        "world": arguments.world_size,
    }


if __name__ == "__main__":
    tell(scripts.of_each_word(train), "KIND-STAGE")
