"""The whole product of configurations, trained; which have other bits than one process.

python -m unit.v1.reproducibility.product --part long --rounds 120 --steps 500
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import deepspeed
from deepspeed import comm as dist
from unit.clients.launching import run_ranks
from unit.v1.reproducibility.cases import Case, long_cases, product_cases
from unit.v1.reproducibility.runs import digest_of, long_digest_of

# What a part is: how a run is digested, and its steps.
PARTS = {"wide": (digest_of, 10), "long": (long_digest_of, 500)}
# Configurations of one launch: so many are lost if it fails.
TOGETHER = 20
TIMEOUT_S = 6 * 3600.0
PATH = ":".join(str(Path(__file__).resolve().parents[level]) for level in (3, 4))


def digests(part: str, steps: int, cases: Sequence[Case]) -> list[str]:
    """What each comes to, in processes that are launched; texts of what failed in their place."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"part": part, "steps": steps, "cases": [asdict(case) for case in cases]}
        Path(folder, "given").write_text(json.dumps(given), encoding="utf-8")
        how = {"processes": cases[0].ranks, "timeout": TIMEOUT_S}
        try:
            run_ranks(Path(__file__), Path(folder), "--worker", PYTHONPATH=PATH, **how)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return [f"FAILED {str(error)[-2000:]}"] * len(cases)
        found: list[str] = json.loads(Path(folder, "found").read_text(encoding="utf-8"))
        return found


def worker() -> None:
    """One rank of a launch, in its folder."""
    given = json.loads(Path("given").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    digest, _ = PARTS[given["part"]]
    found = [digest(Case(**case), given["steps"]) for case in given["cases"]]
    if dist.get_rank() == 0:
        Path("found").write_text(json.dumps(found), encoding="utf-8")


def chosen(part: str, rounds: int, seed: int) -> list[Case]:
    """Cases of a part, in the order in which they run: by ranks, the plainest on one first."""
    cases = [*long_cases()] if part == "long" else product_cases()
    if rounds < len(cases):
        cases = random.Random(seed).sample(cases, rounds)
    alone = {case.kind: case.alone for case in cases}
    others = [case for case in cases if case != alone[case.kind]]
    return [*alone.values(), *sorted(others, key=lambda case: case.ranks)]


def main(argv: list[str] | None = None) -> int:
    """Draw, train, compare; returns 1 if any has other bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, default="wide")
    parser.add_argument("--rounds", type=int, default=1000, help="how many of the product")
    parser.add_argument("--steps", type=int, help="default: 10, 500 of the long part")
    parser.add_argument("--seed", type=int, help="draws them")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        worker()
        return 0
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    steps = arguments.steps or PARTS[arguments.part][1]
    cases = chosen(arguments.part, arguments.rounds, seed)
    wanted: dict[str, str] = {}
    bad = total = 0
    while cases:
        ranks, began = cases[0].ranks, time.monotonic()
        now = [case for case in cases[:TOGETHER] if case.ranks == ranks]
        cases = cases[len(now) :]
        for case, digest in zip(now, digests(arguments.part, steps, now), strict=True):
            right = wanted.setdefault(case.kind, digest)
            if digest != right or digest.startswith("FAILED"):
                bad += 1
                print(f"{case.name}: {digest}, not {right}", flush=True)
        total += len(now)
        told = f"{len(now)} on {ranks} ranks in {time.monotonic() - began:.0f} s"
        print(f"{told}: {bad} of {total} so far are not equal", flush=True)
    for kind, digest in wanted.items():
        print(f"{kind}: {digest}")
    print(f"{bad} of {total} are not equal ({arguments.part}, {steps} steps, seed {seed})")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
