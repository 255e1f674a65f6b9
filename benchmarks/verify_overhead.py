"""What the checks of synchronization cost: off, ledger, collective intent, and the stream checker
on the simulated device.

    python benchmarks/verify_overhead.py
    python benchmarks/verify_overhead.py --model tiny --stage 2 --rounds 30

Two ranks over gloo, one thread each. All variants live in the same processes and take turns: a
block of steps of each, for many rounds, each round in another order. A ratio is taken within a
round, against `without` (the engine with the calls to the checks cut out, which stands for a build
without them); reported is its median, and the spread of the middle half. The checker is measured on
the simulated device against the simulated device, in processes of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parent))
from systems import Step, Workload, build_step  # noqa: E402  the path above is where it lies

NUM_RANKS = 2
HOST_VARIANTS = ("without", "off", "ledger", "intent")
SIM_VARIANTS = ("sim", "sim-streams")


def workload(arguments: argparse.Namespace) -> Workload:
    """What is trained; the GPT is that of `train_step.py` with fewer layers, so that a round takes
    seconds.
    """
    if arguments.model == "tiny":
        return Workload("tiny", arguments.precision, 50, 8, 0, 2, 1.0, False)
    return Workload("gpt", arguments.precision, arguments.layers, 4, 128, 2, 1.0, False)


@contextmanager
def cut_out() -> Iterator[None]:
    """The engine as it would be without this project's checks."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.engine_parts import (
        verification,  # startup: after the accelerator is chosen
    )
    from deepspeed.runtime.optimizers.step_sequence import StepSequence

    kept: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        kept.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    replace(verification, "configure", lambda engine, block: None)
    replace(DeepSpeedEngine, "_tell_opened", lambda self, sequence, loss, scale_wrt_gas: None)
    replace(StepSequence, "_settle", lambda self, factor: None)
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


@contextmanager
def intent_on() -> Iterator[None]:
    """Collective intents compared."""
    from deepspeed.comm.watch import intent  # startup: only this variant has it

    intent.enable()
    try:
        yield
    finally:
        intent.disable()


def around(variant: str) -> AbstractContextManager[Any]:
    """What a block of steps of this variant runs under."""
    if variant == "without":
        return cut_out()
    if variant == "intent":
        return intent_on()
    if variant == "sim-streams":
        from deepspeed.verify import check_streams  # startup: only this variant has it

        return check_streams()
    return nullcontext()


def build(work: Workload, stage: int, variant: str) -> Step:
    """One engine's training step."""
    os.environ["DS_VERIFY"] = "ledger" if variant == "ledger" else ""
    with cut_out() if variant == "without" else nullcontext():
        return build_step(work, f"zero{stage}")


def timed(step: Step, steps: int, barrier: Callable[[], Any]) -> float:
    """Seconds per step of a block; ranks begin together."""
    barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    barrier()
    return (time.perf_counter() - start) / steps


def rank_main(
    rank: int, store: str, arguments: argparse.Namespace, variants: tuple[str, ...], results: Any
) -> None:
    """One rank: builds all variants, then measures them in turns."""
    torch.set_num_threads(1)
    accelerator = "sim" if variants == SIM_VARIANTS else "cpu"
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), DS_ACCELERATOR=accelerator
    )
    import deepspeed  # startup: the accelerator is chosen above

    deepspeed.init_distributed(
        dist_backend="gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=NUM_RANKS,
        verbose=False,
    )
    barrier = deepspeed.comm.barrier
    steps = {variant: build(workload(arguments), arguments.stage, variant) for variant in variants}
    order = random.Random(0)
    rounds = []
    for number in range(arguments.rounds + 1):
        seconds = {}
        for variant in order.sample(variants, len(variants)):
            with around(variant):
                seconds[variant] = timed(steps[variant], arguments.steps, barrier)
        if number:  # the first round warms up
            rounds.append(seconds)
    if rank == 0:
        results.put(rounds)


def measure(arguments: argparse.Namespace, variants: tuple[str, ...]) -> list[dict[str, float]]:
    """Seconds per step of each variant in each round."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            rank_main,
            (os.path.join(folder, "store"), arguments, variants, results),
            nprocs=NUM_RANKS,
        )
    return results.get()


def show(rounds: list[dict[str, float]], variants: tuple[str, ...]) -> None:
    """Print the ratios to the first variant."""
    base = variants[0]
    for variant in variants:
        ratios = sorted(seconds[variant] / seconds[base] for seconds in rounds)
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        milliseconds = statistics.median(seconds[variant] for seconds in rounds) * 1e3
        print(
            f"{variant:12s} {milliseconds:9.2f} ms per step  {statistics.median(ratios):7.3f} x "
            f"{base}  ({low:.3f} .. {high:.3f})"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=("gpt", "tiny"), default="gpt")
    parser.add_argument("--layers", type=int, default=2, help="blocks of the GPT")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2), default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="steps per block")
    parser.add_argument("--no-sim", action="store_true", help="leave the simulated device out")
    arguments = parser.parse_args()
    show(measure(arguments, HOST_VARIANTS), HOST_VARIANTS)
    if not arguments.no_sim:
        arguments.model, arguments.rounds = "tiny", min(arguments.rounds, 5)
        show(measure(arguments, SIM_VARIANTS), SIM_VARIANTS)


if __name__ == "__main__":
    main()
