"""A user's script: sequences split by accelerate's configuration, in a loop and in the Trainer."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn.functional as differentiable
import transformers
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import deepspeed
from deepspeed.utils import groups, safe_get_full_fp32_param

sys.path.insert(0, str(Path(__file__).parent))
from tiny_llama import VOCABULARY, tiny_llama

RANKS, SAMPLES, LENGTH, LR, EPOCHS = 2, 4, 16, 0.1, 2


def samples() -> list[dict[str, torch.Tensor]]:
    """Each of two packed documents; a prompt, of another length in each, isn't learned."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for index in range(SAMPLES):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels, positions = tokens.clone(), torch.arange(LENGTH)
        labels[: 2 * index + 1] = -100
        positions[10:] -= 10
        made.append({"input_ids": tokens, "position_ids": positions, "labels": labels})
    return made


def parallelism() -> ParallelismConfig:
    """Two ranks share every sequence."""
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    return ParallelismConfig(sp_backend="deepspeed", sp_size=RANKS, sp_handler=handler)


def start_anew() -> None:
    """accelerate asks for no backend on a host without a GPU; a state made beforehand says gloo."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    groups.reset()
    PartialState(backend="gloo")


def reference(samples_per_step: int) -> dict[str, torch.Tensor]:
    """Plain torch on whole sequences."""
    model, data = tiny_llama(), samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for first in range(0, EPOCHS * SAMPLES, samples_per_step):
        optimizer.zero_grad()
        for index in range(first, first + samples_per_step):
            batch = {key: tensor[None] for key, tensor in data[index % SAMPLES].items()}
            (model(**batch).loss / samples_per_step).backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def difference(model: Any, wanted: dict[str, torch.Tensor]) -> float:
    """Of all weights, relative to how far training has moved them."""
    start = dict(tiny_llama().named_parameters())
    worst = 0.0
    for name, param in model.named_parameters():
        found = safe_get_full_fp32_param(param)
        moved = (wanted[name] - start[name]).norm()
        worst = max(worst, ((found - wanted[name]).norm() / moved).item())
    return worst


def with_accelerate(stage: int) -> float:
    """accelerate's documented loop."""
    start_anew()
    accelerator = Accelerator(
        parallelism_config=parallelism(),
        deepspeed_plugin=DeepSpeedPlugin(
            zero_stage=stage, gradient_accumulation_steps=1, gradient_clipping=1e6
        ),
    )
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(samples(), batch_size=1)
    )
    group = groups._get_sequence_parallel_group()
    for _ in range(EPOCHS):
        for batch in loader:
            labels = batch.pop("shift_labels")
            logits = model(**batch).logits
            loss = accelerator.unwrap_model(model).loss_function(
                logits=logits, labels=None, shift_labels=labels, vocab_size=VOCABULARY
            )
            losses = differentiable.all_gather(loss, group=group)
            counts = differentiable.all_gather((labels != -100).sum(), group=group)
            total = sum(one * count for one, count in zip(losses, counts, strict=True) if count > 0)
            accelerator.backward(total / sum(counts))
            optimizer.step()
            optimizer.zero_grad()
    worst = difference(model.module, reference(samples_per_step=1))
    model.destroy()
    return worst


def with_trainer(stage: int, out: Path) -> float:
    """transformers.Trainer, whose step takes all samples, in whatever order."""
    start_anew()
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        deepspeed=config,
        parallelism_config=parallelism(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=SAMPLES,
        max_steps=EPOCHS,
        optim="sgd",
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        accelerator_config={"use_configured_state": True},
        remove_unused_columns=False,
    )
    trainer = Trainer(tiny_llama(), arguments, train_dataset=samples())
    trainer.train()
    return difference(trainer.model_wrapped.module, reference(samples_per_step=SAMPLES))


def main() -> None:
    """Both, at the stages given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("stages", type=int, nargs="+")
    parser.add_argument("--local_rank", type=int, default=0)  # the launcher adds it
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    found = {
        f"{name} at stage {stage}": run
        for stage in arguments.stages
        for name, run in (
            ("accelerate", with_accelerate(stage)),
            ("Trainer", with_trainer(stage, arguments.out)),
        )
    }
    if deepspeed.comm.get_rank() == 0:
        (arguments.out / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
