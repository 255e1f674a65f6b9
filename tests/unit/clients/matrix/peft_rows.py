"""What users of peft do: adapters on a frozen base, by the Trainer."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, PeftWarning, get_peft_model
from safetensors.torch import load_file
from transformers import Trainer

import deepspeed
from unit.clients.matrix import transformers_rows
from unit.clients.matrix.reference import assert_close, assert_equal, params_of, whole
from unit.clients.matrix.row import Row, main, scenario
from unit.clients.matrix.transformers_rows import (
    DATA,
    STEPS,
    arguments,
    config,
    forget,
    loaded,
    said,
)

ROWS: dict[str, Row] = {}


def adapted(folder: Path) -> Any:
    """The model with adapters that are not zero, the same each time."""
    base = loaded(folder)
    torch.manual_seed(1)
    settings = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], modules_to_save=["lm_head"]
    )
    return get_peft_model(base, settings)


def run(folder: Path, plan: dict[str, Any] | None, resume: bool = False, **words: Any) -> Trainer:
    """Train the adapters."""
    given = arguments(folder, plan, **words)
    made = Trainer(adapted(folder), given, train_dataset=DATA)
    made.train(resume_from_checkpoint=resume or None)
    return made


@scenario(ROWS, 0, 1, 2, 3)
def adapters_equal_plain(folder: Path, stage: int) -> None:
    words = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    made = run(folder, config(stage), **words)
    values = whole(made.model)
    plain = run(folder, None, **words)
    assert_close(values, params_of(plain.model), 1e-5)
    norms = zip(said(made, "grad_norm"), said(plain, "grad_norm"), strict=True)
    assert max(abs(a - b) for a, b in norms) < 1e-3


@scenario(ROWS, 0, 1, 2, 3)
def adapters_are_saved_and_loaded(folder: Path, stage: int) -> None:
    made = run(folder, config(stage), bf16=True, save_strategy="steps", save_steps=2)
    values = whole(made.model)
    made.save_model(str(folder / "adapter"))
    with deepspeed.zero.GatheredParameters(made.model.parameters()):
        if deepspeed.comm.get_rank() == 0:
            made.model.save_pretrained(folder / "by-hand")
    deepspeed.comm.barrier()
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    by_hand = load_file(folder / "by-hand" / "adapter_model.safetensors")
    assert saved.keys() == by_hand.keys()
    assert all(torch.equal(saved[name], by_hand[name]) for name in saved)
    named = dict(zip((name for name, _ in made.model.named_parameters()), values, strict=True))
    for name, value in named.items():
        short = name.replace(".default", "").replace(".modules_to_save", "")
        if "lora_" in name or "modules_to_save" in name:
            assert torch.equal(saved[short], value), name
    forget()
    again = PeftModel.from_pretrained(loaded(folder), folder / "adapter")
    assert again.active_adapter == "default"
    # The Trainer goes on from its own checkpoint, which holds the adapters alone.
    transformers_rows.rename(folder / f"checkpoint-{STEPS}", folder / "last")
    resumed = run(folder, config(stage), True, bf16=True, save_strategy="steps", save_steps=2)
    assert_equal(whole(resumed.model), values)


@scenario(ROWS, 3)
def ungathered_adapters_are_warned_of(folder: Path, stage: int) -> None:
    """As peft's own test of stage 3 has it, which asks for a GPU; before 0.21 peft says nothing."""
    made = run(folder, config(stage))
    if deepspeed.comm.get_rank() == 0:
        is_told = pytest.warns(PeftWarning, match="DeepSpeed ZeRO-3")
        with is_told if tuple(peft.__version__.split(".")) >= ("0", "21") else nullcontext():
            made.model.save_pretrained(folder / "shards")
    with deepspeed.zero.GatheredParameters(made.model.parameters()):
        if deepspeed.comm.get_rank() == 0:
            made.model.save_pretrained(folder / "whole")
            saved = load_file(folder / "whole" / "adapter_model.safetensors")
            assert saved and all(value.dim() == 2 and value.numel() for value in saved.values())
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main(ROWS, forget, forget)
