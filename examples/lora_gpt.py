"""Fine-tune a small Llama with LoRA: transformers' Trainer, peft, ZeRO stage 3; `make demo
NAME=lora` runs this.

    deepspeed --num_gpus 2 examples/lora_gpt.py

The base is made on the spot, byte-level and with random weights, so nothing is fetched. It stays
frozen and, like the adapters, divided over the processes. At the end one plain process puts the
saved adapters on the same base: its loss is the Trainer's.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from accelerate import PartialState
from peft import LoraConfig, PeftModel, get_peft_model
from text_data import Windows, load_text
from torch.utils.data import Dataset, Subset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from deepspeed import comm as dist

CONTEXT = 64
EVALUATED = 64
CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Windows of a text as the Trainer takes them."""

    def __init__(self, text: torch.Tensor) -> None:
        self._windows = Windows(text, CONTEXT)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._windows[index]
        return {"input_ids": tokens, "labels": tokens}


def make_base(seed: int) -> LlamaForCausalLM:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT + 1,
            use_cache=False,
        )
    )


def training_arguments(steps: int, out: str) -> TrainingArguments:
    """The Trainer's; on the CPU with the two settings of docs/clients/transformers.md."""
    extra = {}
    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        extra = {"accelerator_config": {"use_configured_state": True}}
    return TrainingArguments(
        output_dir=out,
        deepspeed=CONFIG,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        max_steps=steps,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        **extra,
    )


@torch.no_grad()
def loss_of(model: torch.nn.Module, data: Subset[dict[str, torch.Tensor]]) -> float:
    """Mean loss in this process, without deepspeed."""
    tokens = torch.stack([data[i]["input_ids"] for i in range(len(data))])
    return float(model(input_ids=tokens, labels=tokens).loss)


def main() -> None:
    """Run the example on this rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="file or folder (default: Python's standard library)")
    parser.add_argument("--out", default="demo_out/lora", help="folder for the adapters")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    options = parser.parse_args()
    arguments = training_arguments(options.steps, options.out)
    text = load_text(options.data)
    validation = Sequences(text.validation)
    held_out = Subset(validation, range(min(EVALUATED, len(validation))))
    # The output layer too, which "all-linear" leaves out: nothing of this base has been trained.
    adapted = get_peft_model(
        make_base(options.seed), LoraConfig(r=16, target_modules=r".*(proj|lm_head)")
    )
    trained, total = adapted.get_nb_trainable_parameters()
    trainer = Trainer(
        adapted, arguments, train_dataset=Sequences(text.train), eval_dataset=held_out
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(options.out)
    if dist.get_rank() == 0:
        before = loss_of(make_base(options.seed), held_out)
        adapters = PeftModel.from_pretrained(make_base(options.seed), options.out)
        alone = loss_of(adapters.eval(), held_out)
        print(
            f"{trained:,} of {total:,} parameters trained; adapters: {Path(options.out)}\n"
            f"loss on {len(held_out)} held-out windows: {before:.4f} before, {loss:.4f} after, "
            f"{alone:.4f} in one process that loads the adapters",
            flush=True,
        )
    # The others must not leave while rank 0, which hosts the rendezvous, still works.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
