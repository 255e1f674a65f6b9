"""A user's script: transformers.Trainer with a configuration full of "auto"."""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers.training_args
from accelerate import PartialState
from accelerate.state import AcceleratorState
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

import deepspeed

sys.path.insert(0, str(Path(__file__).parent))
from tiny_gpt2 import Counting, tiny_gpt2

STEPS, SAVED_AT = 4, 2
# The library refuses bf16=True on a host without a GPU, unless use_cpu=True, which would leave
# DeepSpeed out. Only this gate is opened; bf16 itself works on the host.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
STAGE3 = {
    "sub_group_size": 1e9,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}


def config(stage: int, client: bool) -> dict[str, Any]:
    """What the DeepSpeed documentation of transformers recommends, for this stage."""
    blocks = {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
    }
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "contiguous_gradients": True,
            **(STAGE3 if stage == 3 else {}),
        },
        **({} if client else blocks),
    }


def pretrained(folder: Path) -> Path:
    """A folder with a model that somebody else has trained."""
    found = folder.parent / "pretrained"
    if torch.distributed.get_rank() == 0 and not found.exists():
        tiny_gpt2().save_pretrained(found)
    torch.distributed.barrier()
    return found


def train(folder: Path, stage: int, resume: bool, kind: str) -> dict[str, Any]:
    """One run; returns what a user sees of it."""
    # accelerate asks for no backend on a host without a GPU and then believes to be alone; a state
    # made beforehand says gloo.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(backend="gloo")
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=config(stage, kind != "config"),
        accelerator_config={"use_configured_state": True},
        bf16=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=SAVED_AT,
        save_steps=SAVED_AT,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        gradient_checkpointing=kind == "client",
        optim="adafactor" if kind == "adafactor" else "adamw_torch",
    )
    # At stage 3 the library makes the model inside `zero.Init`, because the arguments say so.
    model = GPT2LMHeadModel.from_pretrained(pretrained(folder))
    trainer = Trainer(model, arguments, train_dataset=Counting(64), eval_dataset=Counting(8))
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}") if resume else None)
    with deepspeed.zero.GatheredParameters(trainer.model.parameters()):
        weights = torch.cat(
            [param.detach().float().flatten() for param in trainer.model.parameters()]
        )
    history = trainer.state.log_history
    return {
        "loss": {entry["step"]: entry["loss"] for entry in history if "loss" in entry},
        "grad_norm": {
            entry["step"]: float(entry["grad_norm"]) for entry in history if "grad_norm" in entry
        },
        "learning_rate": {
            entry["step"]: entry["learning_rate"] for entry in history if "learning_rate" in entry
        },
        "eval_loss": {
            entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry
        },
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "engine": type(trainer.model_wrapped).__module__,
        "optimizer": type(trainer.model_wrapped.optimizer).__name__,
        "stage": trainer.model_wrapped.zero_optimization_stage(),
        "dtype": str(next(trainer.model.parameters()).dtype),
        "world": arguments.world_size,
    }


def main() -> None:
    """Run the stages asked for; rank 0 writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint of an earlier run"
    )
    parser.add_argument(
        "runs",
        nargs="+",
        help="KIND-STAGE, one after the other; KIND is whose optimizer and schedule: config, the "
        "configuration's, or the Trainer's own, client (AdamW) or adafactor",
    )
    parser.add_argument("--local_rank", type=int, help="the launcher gives it")
    args = parser.parse_args()
    result = {}
    for run in args.runs:
        kind, stage = run.split("-")
        result[run] = train(args.out / run, int(stage), args.resume, kind)
    if torch.distributed.get_rank() == 0:
        (args.out / "result.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
