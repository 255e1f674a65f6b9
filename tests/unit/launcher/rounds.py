"""Campaigns of random rounds."""

import argparse
import random
import time
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


def campaign_options(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Of a campaign of random rounds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=None, help="default: another one every time")
    return parser


def told_seed(seed: int | None) -> int:
    """The seed, another one every time if there is none; it is printed."""
    seed = random.SystemRandom().randrange(1 << 30) if seed is None else seed
    print(f"seed {seed}", flush=True)
    return seed


def count_good(
    args: argparse.Namespace,
    draw: Callable[[random.Random], R],
    play: Callable[[int, R], object],
    good: str,
) -> int:
    """Draw and play rounds, print what is wrong with each, if anything is, and how many are
    `good`; the exit code is 0 if all are.
    """
    rng = random.Random(told_seed(args.seed))
    number_good = 0
    for number in range(args.rounds):
        drawn, began = draw(rng), time.monotonic()
        wrong = play(number, drawn)
        number_good += not wrong
        seconds = time.monotonic() - began
        print(f"{number}: {seconds:.1f} s, {wrong or 'good'} {drawn}", flush=True)
    print(f"{number_good} of {args.rounds} {good}", flush=True)
    return int(number_good != args.rounds)
