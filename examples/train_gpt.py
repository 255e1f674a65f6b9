"""Train a small byte-level GPT with deepspeed; `make demo` runs this.

    deepspeed --num_gpus 2 examples/train_gpt.py

Shows a whole run: configuration, engine, data, accumulation, validation, checkpoint, resume. Ctrl-C
saves and ends it. The same command run again resumes: an unfinished run goes on to its end, a
finished one trains for `--steps` more. The model is in gpt.py, the text in text_data.py, what is
shown and drawn in progress.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, GPTConfig, half_products_are_slow
from progress import History, Progress, draw_curve
from text_data import Split, Windows, load_text

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.dataloader import RepeatingLoader

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VALIDATION_WINDOWS = 64
SAMPLE_PROMPT = b"class Queue:\n    def "
SAMPLE_LENGTH = 600


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the launcher adds --local_rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", help="file or folder to train on (default: the Python standard library's sources)"
    )
    parser.add_argument("--out", default="demo_out", help="folder for checkpoints, log and picture")
    parser.add_argument(
        "--fresh", action="store_true", help="remove the checkpoints in --out and start anew"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="fail if there is no checkpoint in --out to resume from",
    )
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3), help="ZeRO stage")
    parser.add_argument("--precision", default="bf16", choices=tuple(DTYPES))
    parser.add_argument(
        "--offload",
        action="store_true",
        help="keep optimizer state in host memory (stages 1 to 3)",
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a run")
    parser.add_argument(
        "--accumulation", type=int, default=2, help="micro-batches per optimizer step"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=8, help="sequences per process and micro-batch"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--width", type=int, default=128, help="features per position, a multiple of 32"
    )
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument(
        "--clip", type=float, default=1.0, help="largest gradient norm; 0 for no clipping"
    )
    parser.add_argument("--validate-every", type=int, default=50, help="steps between validations")
    parser.add_argument("--save-every", type=int, default=150, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    arguments = parser.parse_args(argv)
    for name in (
        "steps",
        "accumulation",
        "micro_batch",
        "layers",
        "width",
        "context",
        "validate_every",
        "save_every",
    ):
        if getattr(arguments, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}"
            )
    if arguments.width % 32:
        parser.error(
            f"--width must be a multiple of 32 (the size of a head), got {arguments.width}"
        )
    if arguments.offload and arguments.stage == 0:
        parser.error("--offload needs --stage 1, 2 or 3: stage 0 shards no optimizer state")
    if arguments.fresh and arguments.resume:
        parser.error("--fresh and --resume contradict each other")
    return arguments


def engine_config(arguments: argparse.Namespace, total_steps: int) -> dict[str, Any]:
    """The configuration that a user would keep in a JSON file."""
    zero: dict[str, Any] = {"stage": arguments.stage}
    if arguments.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    schedule = {
        "total_num_steps": total_steps,
        "warmup_num_steps": max(2, arguments.steps // 20),
        "cos_min_ratio": 0.05,
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "gradient_clipping": arguments.clip,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": arguments.lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        "zero_optimization": zero,
        "dataloader_drop_last": True,
        "watch": {"enabled": True, "output_path": arguments.out, "job_name": "watch"},
    }
    if arguments.precision != "fp32":
        config[arguments.precision] = {"enabled": True}
    return config


def saved_step(checkpoints: Path) -> int:
    """Steps that the latest checkpoint in this folder has behind it; 0 if there is none."""
    latest = checkpoints / "latest"
    if not latest.is_file():
        return 0
    match = re.fullmatch(r"global_step(\d+)", latest.read_text().strip())
    if match is None:
        raise ValueError(
            f"{latest} names no checkpoint of this example; use another --out, or --fresh"
        )
    return int(match.group(1))


def total_steps(done: int, steps: int) -> int:
    """Where this run ends: an unfinished run goes on to its end, a finished one is trained for as
    many steps again.
    """
    return (done // steps + 1) * steps


def all_mean(*values: torch.Tensor) -> list[float]:
    """Means of scalars over all ranks."""
    sums = torch.stack([value.detach().float() for value in values])
    dist.all_reduce(sums)
    return (sums / dist.get_world_size()).tolist()


@torch.no_grad()
def validate(engine: deepspeed.DeepSpeedEngine, windows: Windows, micro_batch: int) -> float:
    """Mean loss over a fixed choice of windows, dealt to the ranks in turn."""
    world, rank = dist.get_world_size(), dist.get_rank()
    # The same number of windows on every rank, so that the mean of means is the mean. Spread over
    # the text, not its beginning.
    each = max(1, min(VALIDATION_WINDOWS, len(windows)) // world)
    indices = torch.linspace(0, len(windows) - 1, each * world).long()[rank::world].tolist()
    engine.eval()
    losses = [
        engine(
            torch.stack([windows[i] for i in indices[start : start + micro_batch]]).to(
                engine.device
            )
        )
        * len(part)
        for start in range(0, each, micro_batch)
        if (part := indices[start : start + micro_batch])
    ]
    engine.train()
    return all_mean(torch.stack(losses).sum() / each)[0]


def train_step(engine: deepspeed.DeepSpeedEngine, batches: RepeatingLoader) -> torch.Tensor:
    """One optimizer step; returns this rank's mean loss over its micro-batches."""
    losses = []
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(next(batches).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def resume(engine: deepspeed.DeepSpeedEngine, checkpoints: Path) -> History:
    """Restore model, optimizer, schedule, random state and data position, if there is a checkpoint;
    return its history.
    """
    if not saved_step(checkpoints):
        return History()
    folder, client = engine.load_checkpoint(str(checkpoints))
    if dist.get_rank() == 0:
        position = engine.training_dataloader.state_dict()
        where = f"epoch {position['epoch']}, sequence {position['consumed_samples']}"
        print(f"resumed from {folder}: step {engine.global_steps}, data at {where}", flush=True)
    return History.from_state((client or {})["history"])


def save(engine: deepspeed.DeepSpeedEngine, checkpoints: Path, history: History) -> None:
    """Save a checkpoint, and remove those before it once it is complete."""
    engine.save_checkpoint(str(checkpoints), client_state={"history": history.state()})
    if dist.get_rank() == 0:
        for old in checkpoints.glob("global_step*"):
            if old.name != f"global_step{engine.global_steps}":
                shutil.rmtree(old)


@contextlib.contextmanager
def noted_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event that this gives, instead of ending the program in the middle
    of a step, where one rank would leave the others waiting.
    """
    asked = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: asked.set()) for number in numbers]
    try:
        yield asked
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def train(
    engine: deepspeed.DeepSpeedEngine, text: Split, arguments: argparse.Namespace, end: int
) -> History:
    """Train up to step `end`, validating and saving on the way; Ctrl-C saves and ends it."""
    checkpoints = Path(arguments.out) / "checkpoints"
    history = resume(engine, checkpoints)
    validation = Windows(text.validation, arguments.context)
    batches = RepeatingLoader(engine.training_dataloader)
    if not history.validation:
        history.add_validation(0, validate(engine, validation, arguments.micro_batch))
    tokens = engine.train_batch_size() * arguments.context
    with (
        noted_signals() as asked,
        Progress(engine.global_steps, end, tokens, visible=dist.get_rank() == 0) as progress,
    ):
        stop = 0.0
        while engine.global_steps < end and not stop:
            lr = engine.get_lr()[0]  # before the step: the schedule moves on within it
            loss = train_step(engine, batches)
            # A signal may have reached one rank only, or others a step later: they stop together.
            loss, stop = all_mean(loss, torch.tensor(float(asked.is_set()), device=loss.device))
            step = engine.global_steps
            history.add_step(step, loss, float(engine.get_global_grad_norm() or 0.0), lr)
            progress.step(history)
            if step % arguments.validate_every == 0 or step == end:
                history.add_validation(step, validate(engine, validation, arguments.micro_batch))
            if step % arguments.save_every == 0 or step == end or stop:
                save(engine, checkpoints, history)
    if stop and dist.get_rank() == 0:
        print(
            f"stopped at step {step}, which is saved; the same command goes on from it", flush=True
        )
    return history


def finish(model: GPT, history: History, arguments: argparse.Namespace, seconds: float) -> None:
    """On rank 0: write log and picture, print the numbers and a sample."""
    out = Path(arguments.out)
    log = {"arguments": vars(arguments), "seconds": round(seconds, 1), **history.state()}
    (out / "log.json").write_text(json.dumps(log, indent=1) + "\n")
    draw_curve(history, out / "loss.png")
    sample = model.eval().generate(SAMPLE_PROMPT, SAMPLE_LENGTH, seed=arguments.seed)
    (first_step, first), (last_step, last) = history.validation[0], history.validation[-1]
    print(
        f"validation loss {first:.3f} at step {first_step}, {last:.3f} at step {last_step} (nats "
        "per byte)"
    )
    print(f"curve: {out / 'loss.png'}  log: {out / 'log.json'}  checkpoint: {out / 'checkpoints'}")
    print(f"page (open it while training, too): {out / 'watch' / 'watch.html'}")
    print(f"sample (prompt: its first {len(SAMPLE_PROMPT)} bytes):\n" + "-" * 72)
    print(sample.decode("utf-8", errors="replace"))
    print("-" * 72, flush=True)


def main() -> None:
    """Run the example on this rank."""
    arguments = parse_arguments()
    deepspeed.init_distributed()
    checkpoints = Path(arguments.out) / "checkpoints"
    if dist.get_rank() == 0:
        if arguments.fresh:
            shutil.rmtree(checkpoints, ignore_errors=True)
        checkpoints.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    torch.manual_seed(arguments.seed)
    text = load_text(arguments.data)
    device = torch.device(get_accelerator().current_device_name())
    wide = half_products_are_slow(DTYPES[arguments.precision], device)
    size = GPTConfig(
        arguments.layers,
        arguments.width,
        arguments.width // 32,
        arguments.context,
        wide_products=wide,
    )
    model = GPT(size)
    done = saved_step(checkpoints)
    if arguments.resume and not done:
        raise ValueError(f"--resume: {checkpoints} holds no checkpoint")
    end = total_steps(done, arguments.steps)
    engine, *_ = deepspeed.initialize(
        args=arguments,
        model=model,
        model_parameters=model.parameters(),
        training_data=Windows(text.train, arguments.context),
        config=engine_config(arguments, end),
    )
    if dist.get_rank() == 0:
        print(
            f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text.train):,} bytes "
            f"of text, {dist.get_world_size()} processes on {device}, ZeRO-{arguments.stage}, "
            f"{arguments.precision}"
            + (", products in fp32 (this processor is slow at others)" if wide else ""),
            flush=True,
        )
    start = time.perf_counter()
    history = train(engine, text, arguments, end)
    if dist.get_rank() == 0 and engine.global_steps == end:
        finish(model, history, arguments, time.perf_counter() - start)
    # The others must not leave while rank 0, which hosts the rendezvous, still works.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
