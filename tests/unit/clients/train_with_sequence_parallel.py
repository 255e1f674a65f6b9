"""A user's script: sequences split by accelerate's configuration, in a loop and in the Trainer."""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn.functional as differentiable
import transformers
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from deepspeed.utils import groups, safe_get_full_fp32_param
from unit.clients.scripts import LR, TRAINER, auto, begin, largest_error, plain_weights, tell
from unit.clients.small_models import VOCABULARY, tiny_llama

RANKS, SAMPLES, LENGTH, EPOCHS = 2, 4, 16, 2


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


def difference(model: Any, samples_per_step: int) -> float:
    """The largest error of a weight, held to plain torch on whole sequences."""
    alone = list(DataLoader(samples(), batch_size=1)) * EPOCHS
    firsts = range(0, len(alone), samples_per_step)
    wanted = plain_weights(alone[first : first + samples_per_step] for first in firsts)
    found = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    return largest_error(found, wanted)


def with_accelerate(stage: int) -> float:
    """accelerate's documented loop."""
    begin()
    words = {"zero_stage": stage, "gradient_accumulation_steps": 1, "gradient_clipping": 1e6}
    accelerator = Accelerator(
        parallelism_config=parallelism(), deepspeed_plugin=DeepSpeedPlugin(**words)
    )
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(samples(), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
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
    worst = difference(model.module, samples_per_step=1)
    model.destroy()
    return worst


def with_trainer(stage: int, out: Path) -> float:
    """transformers.Trainer, whose step takes all samples, in whatever order."""
    begin()
    config = auto("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config |= {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        **{"deepspeed": config, "parallelism_config": parallelism()},
        **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": SAMPLES},
        **{"max_steps": EPOCHS, "optim": "sgd", "learning_rate": LR, "max_grad_norm": 0.0},
        **{"lr_scheduler_type": "constant", "save_strategy": "no", **TRAINER},
        remove_unused_columns=False,
    )
    trainer = Trainer(tiny_llama(), arguments, train_dataset=samples())
    trainer.train()
    return difference(trainer.model_wrapped.module, samples_per_step=SAMPLES)


def differences(arguments: argparse.Namespace) -> dict[str, float]:
    """Both, at the stages given."""
    transformers.logging.set_verbosity_error()
    found = {}
    for stage in map(int, arguments.words):
        found[f"accelerate at stage {stage}"] = with_accelerate(stage)
        found[f"Trainer at stage {stage}"] = with_trainer(stage, arguments.out)
    return found


if __name__ == "__main__":
    tell(differences, "stages")
