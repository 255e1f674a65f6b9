"""A user's script: accelerate's documented loop with a DeepSpeed plugin, saved and gone on from."""

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from tiny_gpt2 import Counting, tiny_gpt2
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import deepspeed

STEPS, SAVED_AT, ACCUMULATION = 4, 2, 2


def make_accelerator(stage: int, offload: bool, config: dict[str, Any] | None) -> Accelerator:
    """With a configuration of the script's own, or with accelerate's, made from arguments."""
    # accelerate asks for no backend on a host without a GPU and then believes to be alone; a state
    # made beforehand says gloo.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(backend="gloo")
    if config is not None:
        plugin = DeepSpeedPlugin(
            hf_ds_config={
                **config,
                "zero_optimization": {
                    "stage": stage,
                    "reduce_bucket_size": "auto",
                    **({"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}),
                },
            }
        )
    else:
        device = "cpu" if offload else "none"
        plugin = DeepSpeedPlugin(
            zero_stage=stage,
            gradient_accumulation_steps=ACCUMULATION,
            gradient_clipping=0.5,
            offload_optimizer_device=device,
            zero3_save_16bit_model=stage == 3,
        )
    return Accelerator(
        mixed_precision="bf16", deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATION
    )


CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}


def train(
    folder: Path, stage: int, resume: bool, offload: bool, from_config: bool
) -> dict[str, Any]:
    """One run; returns what a user sees of it."""
    accelerator = make_accelerator(stage, offload, CONFIG if from_config else None)
    model = tiny_gpt2()
    if from_config:
        optimizer: Any = DummyOptim(model.parameters(), lr=1e-2)
        scheduler: Any = DummyScheduler(optimizer, warmup_num_steps=3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    # A generator of its own: torch's loader draws from the global one at each start, which a run
    # that goes on has one more of.
    loader = DataLoader(Counting(32), batch_size=2, generator=torch.Generator())
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    done = 0
    if resume:
        accelerator.load_state(str(folder / "state"))
        done = SAVED_AT
    seen: dict[str, Any] = {"loss": {}, "grad_norm": {}, "learning_rate": {}, "boundaries": []}
    batches = (
        loader if not resume else accelerator.skip_first_batches(loader, SAVED_AT * ACCUMULATION)
    )
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
        seen["loss"].setdefault(str(done + 1), []).append(
            accelerator.gather(loss.detach().float()).mean().item()
        )
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
    named = unwrapped.named_parameters()
    weights = torch.cat([own[name].float().flatten() for name, _ in named])
    return {
        "engine": f"{type(model).__module__}.{type(model).__name__}",
        "inner": model.optimizer.optimizer.__class__.__name__,
        "unwrapped": type(unwrapped).__name__,
        "state_dict_is_the_model": gathered.keys() == own.keys()
        and all(torch.equal(gathered[k].cpu(), own[k]) for k in own),
        "state_dict_is_a_copy": all(
            gathered[k].data_ptr() != value.data_ptr()
            for k, value in unwrapped.state_dict().items()
            if value.numel()
        ),
        "distributed_type": str(accelerator.distributed_type),
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    }


def main() -> None:
    """Run what is asked for; rank 0 writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "cases", nargs="+", help="STAGE-KIND, one after the other; KIND: arguments, offload, config"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the state of an earlier run"
    )
    parser.add_argument("--local_rank", type=int, help="the launcher gives it")
    args = parser.parse_args()
    result = {}
    for name in args.cases:
        stage, kind = name.split("-")
        result[name] = train(
            args.out / name, int(stage), args.resume, kind == "offload", kind == "config"
        )
    if torch.distributed.get_rank() == 0:
        (args.out / "result.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
