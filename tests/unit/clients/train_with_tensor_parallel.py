"""A user's script: layers cut by the configuration, in a loop of accelerate's and in the Trainer.

Writes the largest difference of a saved weight to plain torch, relative to how far it moved.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainingArguments

from deepspeed.utils import groups

sys.path.insert(0, str(Path(__file__).parent))
from tiny_llama import VOCABULARY, tiny_llama

RANKS, SAMPLES, LENGTH, LR, BATCH = 2, 8, 8, 0.1, 2


def samples() -> list[dict[str, torch.Tensor]]:
    """Tokens that are to be learned as they are."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def start_anew() -> None:
    """accelerate asks for no backend on a host without a GPU; a state made beforehand says gloo."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    groups.reset()
    PartialState(backend="gloo")


def configuration(stage: int) -> dict[str, Any]:
    """What a user writes."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": {"autotp_size": RANKS},
    }


def reference() -> dict[str, torch.Tensor]:
    """Plain torch; a step sees the batches of all data-parallel ranks."""
    model, data = tiny_llama(), samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    step = BATCH * (int(os.environ["WORLD_SIZE"]) // RANKS)
    for first in range(0, SAMPLES, step):
        chosen = data[first : first + step]
        batch = {key: torch.stack([one[key] for one in chosen]) for key in chosen[0]}
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def largest_error(weights: dict[str, Any], right: dict[str, torch.Tensor]) -> float:
    """Relative to how far a weight moved."""
    first = dict(tiny_llama().named_parameters())
    return max(
        float((weights[name] - value).norm() / (value - first[name]).norm())
        for name, value in right.items()
    )


def with_accelerate(stage: int) -> dict[str, Any] | None:
    """A loop of the user's own; the saved weights, on rank 0."""
    start_anew()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=configuration(stage)))
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(samples(), batch_size=BATCH)
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
    start_anew()
    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        accelerator_config={"use_configured_state": True},
        deepspeed=configuration(stage),
    )
    trainer = InOrder(model=tiny_llama(), args=arguments, train_dataset=samples())
    trainer.train()
    trainer.save_model(str(out / "saved"))
    is_first = PartialState().is_main_process
    return load_file(out / "saved" / "model.safetensors") if is_first else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("stages", nargs="+", type=int)
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    right, found = reference(), {}
    for stage in args.stages:
        for name, weights in (
            (f"accelerate, stage {stage}", with_accelerate(stage)),
            (f"Trainer, stage {stage}", with_trainer(stage, args.out)),
        ):
            if weights is not None:
                found[name] = largest_error(weights, right)
    if PartialState().is_main_process:
        (args.out / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
