"""A user's script: accelerate's documented loop with a DeepSpeed plugin, saved and gone on from."""

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import deepspeed
from unit.clients.scripts import BATCH, WARMUP, auto, begin, digest, of_each_word, tell
from unit.clients.small_models import Counting, tiny_gpt2

STEPS, SAVED_AT, ACCUMULATION = 4, 2, 2
MICRO_BATCHES = 6  # of a step over all ranks, where bits are compared


def make_accelerator(stage: int, kind: str) -> Accelerator:
    """With a configuration of the script's own, or with accelerate's, made from arguments."""
    begin()
    steps = accumulation_of(kind)
    words: dict[str, Any] = {"hf_ds_config": configuration(stage)}
    if kind == "bits":
        words["hf_ds_config"] |= {"reproducibility": {"world_size_invariant": True}}
        words["hf_ds_config"]["gradient_accumulation_steps"] = steps
    elif kind != "config":
        words = {"zero_stage": stage, "gradient_accumulation_steps": ACCUMULATION}
        words |= {"gradient_clipping": 0.5, "zero3_save_16bit_model": stage == 3}
        words |= {"offload_optimizer_device": "cpu" if kind == "offload" else "none"}
    given = {"mixed_precision": "bf16", "gradient_accumulation_steps": steps}
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(**words), **given)


def accumulation_of(kind: str) -> int:
    return MICRO_BATCHES // int(os.environ["WORLD_SIZE"]) if kind == "bits" else ACCUMULATION


def configuration(stage: int) -> dict[str, Any]:
    """What a user writes."""
    gathered = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    return {
        **BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": auto("lr", "weight_decay")},
        "scheduler": {**WARMUP, "params": {**WARMUP["params"], "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto", **gathered},
    }


def train(folder: Path, resume: bool, stage: str, kind: str) -> dict[str, Any]:
    """One run; returns what a user sees of it."""
    accelerator = make_accelerator(int(stage), kind)
    model = tiny_gpt2()
    if kind in ("config", "bits"):
        optimizer: Any = DummyOptim(model.parameters(), lr=1e-2)
        scheduler: Any = DummyScheduler(optimizer, warmup_num_steps=3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    # A generator of its own: torch's loader draws from the global one at each start, which a run
    # that goes on has one more of.
    loader = DataLoader(Counting(48), batch_size=2, generator=torch.Generator())
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    seen: dict[str, Any] = {"loss": {}, "grad_norm": {}, "learning_rate": {}, "boundaries": []}
    done, batches = 0, loader
    if resume:
        accelerator.load_state(str(folder / "state"))
        done = SAVED_AT
        batches = accelerator.skip_first_batches(loader, SAVED_AT * ACCUMULATION)
    model.train()
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen["boundaries"].append(accelerator.sync_gradients)
        everywhere = accelerator.gather(loss.detach().float())
        told = everywhere.tolist() if kind == "bits" else [everywhere.mean().item()]
        seen["loss"].setdefault(str(done + 1), []).extend(told)
        if not accelerator.sync_gradients:
            continue
        done += 1
        seen["grad_norm"][str(done)] = float(norm)
        seen["learning_rate"][str(done)] = optimizer.param_groups[0]["lr"]
        if done == SAVED_AT and not resume:
            accelerator.save_state(str(folder / "state"))
        if done == STEPS:
            break
    seen.update(look_at(accelerator, model))
    seen["digest"] = model.state_digest()
    accelerator.free_memory()
    return seen


def look_at(accelerator: Accelerator, model: Any) -> dict[str, Any]:
    """What accelerate's helpers say of the model."""
    unwrapped = accelerator.unwrap_model(model)
    gathered = accelerator.get_state_dict(model)
    with deepspeed.zero.GatheredParameters(unwrapped.parameters()):
        own = {name: value.clone() for name, value in unwrapped.state_dict().items()}
    if accelerator.process_index:
        own = gathered = own if gathered is None else gathered  # rank 0 alone may have it
    held = [value for value in unwrapped.state_dict().items() if value[1].numel()]
    return {
        "engine": f"{type(model).__module__}.{type(model).__name__}",
        "inner": model.optimizer.optimizer.__class__.__name__,
        "unwrapped": type(unwrapped).__name__,
        "state_dict_is_the_model": gathered.keys() == own.keys()
        and all(torch.equal(gathered[k].cpu(), own[k]) for k in own),
        "state_dict_is_a_copy": all(gathered[k].data_ptr() != v.data_ptr() for k, v in held),
        "distributed_type": str(accelerator.distributed_type),
        "weights": digest(own[name] for name, _ in unwrapped.named_parameters()),
    }


if __name__ == "__main__":
    tell(of_each_word(train), "STAGE-KIND; KIND: arguments, offload, config, bits")
