"""What the users' scripts of this folder share: configurations that the client fills in, how they
begin on a host without a GPU, and how they tell the test what they have seen.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState

import deepspeed
from deepspeed.utils import groups
from unit.clients.small_models import tiny_llama
from unit.one_process import OneProcess


def auto(*keys: str) -> dict[str, Any]:
    """Keys that the client library fills in."""
    return dict.fromkeys(keys, "auto")


BATCH = auto("train_batch_size", "train_micro_batch_size_per_gpu")
BATCH |= auto("gradient_accumulation_steps", "gradient_clipping")
ADAMW = {"type": "AdamW", "params": auto("lr", "betas", "eps", "weight_decay")}
RATES = auto("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
WARMUP = {"type": "WarmupLR", "params": RATES}
DECAY = {"type": "WarmupDecayLR", "params": {**RATES, "total_num_steps": "auto"}}
# Arguments of every Trainer here.
TRAINER = {"accelerator_config": {"use_configured_state": True}, "report_to": []}
TRAINER |= {"disable_tqdm": True}
LR = 0.1


def begin(deepspeed_is_used: bool = True) -> None:
    """Forget what the libraries keep for the process. accelerate asks for no backend on a host
    without a GPU and then believes to be alone; a state made beforehand says gloo.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    groups.reset()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(deepspeed_is_used).lower()
    PartialState(backend="gloo", **({} if deepspeed_is_used else {"cpu": True}))


def tell(run: Callable[[argparse.Namespace], Any], words: str) -> None:
    """Run what the command line asks for; rank 0 writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="+", help=words)
    parser.add_argument("--resume", action="store_true", help="go on from an earlier run's state")
    parser.add_argument("--local_rank", type=int, help="the launcher gives it")
    arguments = parser.parse_args()
    result = run(arguments)
    if torch.distributed.get_rank() == 0:
        (arguments.out / "result.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


def of_each_word(train: Callable[..., Any]) -> Callable[[argparse.Namespace], dict[str, Any]]:
    """For `tell`: runs one after the other, in a folder each, of what the parts of a word say."""
    return lambda given: {
        word: train(given.out / word, given.resume, *word.split("-")) for word in given.words
    }


def by_step(trainer: Any, key: str) -> dict[int, float]:
    """What a Trainer has logged under ``key``."""
    history = trainer.state.log_history
    return {entry["step"]: float(entry[key]) for entry in history if key in entry}


def digest(params: Iterable[torch.Tensor]) -> str:
    """Tells weights apart that differ in a bit."""
    whole = torch.cat([param.detach().float().flatten() for param in params])
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()


def digest_of(model: torch.nn.Module) -> str:
    """`digest` of a model that may be sharded. Collective."""
    with deepspeed.zero.GatheredParameters(model.parameters()):
        return digest(model.parameters())


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a model of transformers says of words of its forward."""
    return model(**batch).loss


def plain_weights(steps: Iterable[list[dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Of `tiny_llama` after steps of plain torch, each on these micro-batches."""
    alone = OneProcess(tiny_llama(), LR, loss_of)
    for batches in steps:
        alone.step(batches)
    return alone.params()


def largest_error(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Of all weights of `tiny_llama`, relative to how far training has moved each."""
    first = dict(tiny_llama().named_parameters())
    moved = {name: (value - first[name]).norm() for name, value in wanted.items()}
    return max(float((found[name] - wanted[name]).norm() / moved[name]) for name in wanted)
