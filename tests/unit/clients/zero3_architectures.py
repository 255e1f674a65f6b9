"""Architectures of transformers at stage 3: which equal plain torch, with several seeds."""

import argparse
import importlib.util
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unit.clients.architectures import ARCHITECTURES
from unit.clients.launching import attempt, launch

# The gradient of two ranks is summed as that of one process with two micro-batches.
TOLERANCE = 1e-6


def bad_of(found: dict[str, Any]) -> list[str]:
    """What of a check's result is wrong."""
    ways = [(way, names[:4]) for way, names in found.items() if way != "step" and names]
    bad = [f"{way}: {', '.join(names)}" for way, names in ways]
    return bad + ([f"step: {found['step']:.3g}"] if not found["step"] <= TOLERANCE else [])


def check(name: str, seeds: Sequence[int]) -> list[list[str]]:
    """What is wrong of one architecture, for each seed."""
    if ARCHITECTURES[name].lora and importlib.util.find_spec("peft") is None:
        print(f"{name:20} skipped: peft is not installed", flush=True)
        return []

    def run(out: Path) -> tuple[list[list[str]], str]:
        words = (name, *map(str, seeds))
        results = launch("check_architectures.py", out, *words, launcher="torchrun", timeout=900.0)
        steps = ", ".join(f"{found['step']:.3g}" for found in results)
        return [bad_of(found) for found in results], f"differences of steps: {steps}"

    return attempt(name, len(seeds), run)


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
