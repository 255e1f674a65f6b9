"""Architectures of transformers at stage 3: which equal plain torch, with several seeds."""

import argparse
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unit.clients.architectures import ARCHITECTURES
from unit.clients.launching import launch

# The gradient of two ranks is summed as that of one process with two micro-batches.
TOLERANCE = 1e-6
TIMEOUT_S = 900.0


def bad_of(found: dict[str, Any]) -> list[str]:
    """What of a check's result is wrong."""
    bad = [
        f"{way}: {', '.join(names[:4])}" for way, names in found.items() if way != "step" and names
    ]
    return bad + ([f"step: {found['step']:.3g}"] if not found["step"] <= TOLERANCE else [])


def check(name: str, seeds: Sequence[int]) -> list[list[str]]:
    """What is wrong of one architecture, for each seed."""
    if ARCHITECTURES[name].lora and importlib.util.find_spec("peft") is None:
        print(f"{name:20} skipped: peft is not installed", flush=True)
        return []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = launch(
                "check_architectures.py",
                Path(folder),
                name,
                *map(str, seeds),
                launcher="torchrun",
                timeout=TIMEOUT_S,
            )
            bad = [bad_of(found) for found in results]
            steps = ", ".join(f"{found['step']:.3g}" for found in results)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            bad, steps = [[str(error)[-2000:]] for _ in seeds], "none"
    verdict = "FAIL" if any(bad) else "PASS"
    took = time.monotonic() - began
    print(f"{name:20} {verdict}  differences of steps: {steps}  {took:5.0f} s", flush=True)
    for row in bad:
        for line in row:
            print(f"    {line}", flush=True)
    return bad


def main(argv: list[str] | None = None) -> int:
    """Every architecture with each seed; returns 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="seeds per architecture")
    parser.add_argument("--seed", type=int, help="the first of them")
    parser.add_argument("--architecture", choices=ARCHITECTURES, help="only this one")
    arguments = parser.parse_args(argv)
    first = random.randrange(10**6) if arguments.seed is None else arguments.seed
    seeds = range(first, first + arguments.rounds)
    chosen = [arguments.architecture] if arguments.architecture else list(ARCHITECTURES)
    found = [bad for name in chosen for bad in check(name, seeds)]
    passed = sum(not bad for bad in found)
    print(f"{passed} of {len(found)} passed (seeds {seeds.start} to {seeds.stop - 1})")
    return int(passed != len(found))


if __name__ == "__main__":
    sys.exit(main())
