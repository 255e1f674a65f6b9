"""A user's script: layers cut by the configuration, in a loop of accelerate's and in the Trainer.

Writes the largest difference of a saved weight to plain torch, relative to how far it moved.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from safetensors.torch import load_file
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainingArguments

from unit.clients.scripts import BATCH, LR, TRAINER, begin, largest_error, plain_weights, tell
from unit.clients.small_models import VOCABULARY, tiny_llama

RANKS, SAMPLES, LENGTH, MICRO = 2, 8, 8, 2


def samples() -> list[dict[str, torch.Tensor]]:
    """Tokens that are to be learned as they are."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def configuration(stage: int) -> dict[str, Any]:
    """What a user writes."""
    return {
        **BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": {"autotp_size": RANKS},
    }


def reference() -> dict[str, torch.Tensor]:
    """Plain torch; a step sees the batches of all data-parallel ranks."""
    step = MICRO * (int(os.environ["WORLD_SIZE"]) // RANKS)
    batches = DataLoader(samples(), batch_size=step)
    return plain_weights([batch] for batch in batches)


def with_accelerate(stage: int) -> dict[str, Any] | None:
    """A loop of the user's own; the saved weights, on rank 0."""
    begin()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=configuration(stage)))
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(samples(), batch_size=MICRO)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Any] | None = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return found


class InOrder(Trainer):
    """Its samples as they lie; the argument that says so is newer than the oldest transformers."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def with_trainer(stage: int, out: Path) -> dict[str, Any] | None:
    """The Trainer, and the weights that it saves, on rank 0."""
    begin()
    words = {"learning_rate": LR, "lr_scheduler_type": "constant", "optim": "sgd", **TRAINER}
    words |= {"per_device_train_batch_size": MICRO, "num_train_epochs": 1}
    words |= {"max_grad_norm": 0.0, "save_strategy": "no", "deepspeed": configuration(stage)}
    arguments = TrainingArguments(output_dir=str(out), **words)
    trainer = InOrder(model=tiny_llama(), args=arguments, train_dataset=samples())
    trainer.train()
    trainer.save_model(str(out / "saved"))
    is_first = PartialState().is_main_process
    return load_file(out / "saved" / "model.safetensors") if is_first else None


def errors(arguments: argparse.Namespace) -> dict[str, float]:
    """Both, at the stages given."""
    transformers.utils.logging.set_verbosity_error()
    right, found = reference(), {}
    for stage in map(int, arguments.words):
        found[f"accelerate, stage {stage}"] = with_accelerate(stage)
        found[f"Trainer, stage {stage}"] = with_trainer(stage, arguments.out)
    return {name: largest_error(saved, right) for name, saved in found.items() if saved is not None}


if __name__ == "__main__":
    tell(errors, "stages")
