"""The whole product of configurations, trained; which have other bits than one process.

python -m unit.v1.reproducibility.product --part long --rounds 120 --steps 500

With `--rows FILE` finished configurations are kept there and not run again, so that several
sessions complete a part (of one state of the package, on one kind of processor, whose products
of matrices have bits of their own):

python -m unit.v1.reproducibility.product --part long --kind fp16 --rows long.jsonl --minutes 60
"""

import argparse
import json
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import deepspeed
from deepspeed import comm as dist
from unit.clients.launching import run_ranks
from unit.v1.reproducibility.cases import long_cases, product_cases
from unit.v1.reproducibility.pipelines import bits_of, pipe_product
from unit.v1.reproducibility.runs import digest_of, long_digest_of


class Part(NamedTuple):
    """`together`: configurations of one launch, which are lost if it fails."""

    cases: Callable[[], Sequence[Any]]
    digest: Callable[[Any, int], object]  # of a case and a number of steps
    steps: int
    together: int


PARTS = {
    "wide": Part(product_cases, digest_of, 10, 20),
    "pipe": Part(pipe_product, bits_of, 4, 20),
    "long": Part(lambda: [*long_cases()], long_digest_of, 500, 4),
}
TIMEOUT_S = 6 * 3600.0
PATH = ":".join(str(Path(__file__).resolve().parents[level]) for level in (3, 4))


class Row(NamedTuple):
    """One configuration, finished: what it came to, and its ranks' processor time."""

    part: str
    steps: int
    case: str
    digest: str
    seconds: float

    @property
    def key(self) -> tuple[str, int, str]:
        return self.part, self.steps, self.case


def launched(part: str, steps: int, cases: Sequence[Any]) -> list[Row]:
    """Train cases of equally many ranks; texts of what failed are in the place of digests."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "given").write_bytes(pickle.dumps((part, steps, cases)))
        how = {"processes": cases[0].ranks, "timeout": TIMEOUT_S}
        try:
            run_ranks(Path(__file__), Path(folder), "--worker", PYTHONPATH=PATH, **how)
            found = pickle.loads(Path(folder, "found").read_bytes())
        except (AssertionError, subprocess.TimeoutExpired) as error:
            found = [(f"FAILED {str(error)[-2000:]}", 0.0)] * len(cases)
        names = (case.name for case in cases)
        return [Row(part, steps, name, *told) for name, told in zip(names, found, strict=True)]


def worker() -> None:
    """One rank of a launch, in its folder."""
    part, steps, cases = pickle.loads(Path("given").read_bytes())
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    found = []
    for case in cases:
        began = time.process_time()
        digest = str(PARTS[part].digest(case, steps))
        seconds = torch.tensor(time.process_time() - began)
        dist.all_reduce(seconds)
        found.append((digest, round(float(seconds), 1)))
    if dist.get_rank() == 0:
        Path("found").write_bytes(pickle.dumps(found))


def chosen(part: str, kind: str, rounds: int, seed: int) -> list[Any]:
    """Cases of a part, in the order in which they run: by ranks, the plainest on one first."""
    cases = [case for case in PARTS[part].cases() if case.kind.startswith(kind)]
    if rounds < len(cases):
        cases = random.Random(seed).sample(cases, rounds)
    alone = {case.kind: case.alone for case in cases}
    others = [case for case in cases if case != alone[case.kind]]
    return [*alone.values(), *sorted(others, key=lambda case: case.ranks)]


def read_rows(path: Path | None) -> list[Row]:
    """The finished rows of a file, if there is one."""
    if path is None or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Row(**json.loads(line)) for line in lines]


def main(argv: list[str] | None = None) -> int:
    """Draw, train, compare; returns 1 if any has other bits, 2 if some are left to run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, default="wide")
    parser.add_argument("--kind", default="", help='such as "fp16" or "fp16 adam"; default: all')
    parser.add_argument("--rounds", type=int, default=1000, help="how many of the product")
    parser.add_argument("--steps", type=int, help="default: 10, 4 of pipelines, 500 of long")
    parser.add_argument("--seed", type=int, help="draws them")
    parser.add_argument("--rows", type=Path, help="finished rows: taken from there, added there")
    parser.add_argument("--minutes", type=float, help="launch nothing later than this")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        worker()
        return 0
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    name, part = arguments.part, PARTS[arguments.part]
    steps = arguments.steps or part.steps
    cases = chosen(name, arguments.kind, arguments.rounds, seed)
    if not cases:
        kinds = sorted({case.kind for case in part.cases()})
        parser.error(f"--kind {arguments.kind}: none of {', '.join(kinds)}")
    rows = {row.key: row for row in read_rows(arguments.rows)}
    until = time.monotonic() + 60 * (arguments.minutes or float("inf"))
    left = [case for case in cases if (name, steps, case.name) not in rows]
    while left and time.monotonic() < until:
        now = [case for case in left[: part.together] if case.ranks == left[0].ranks]
        left = left[len(now) :]
        found = launched(name, steps, now)
        seconds = sum(row.seconds for row in found)
        told = f"{len(now)} on {now[0].ranks} ranks: {seconds:.0f} s of processors"
        print(f"{told}, {len(left)} left", flush=True)
        for row in found:
            rows[row.key] = row
            if arguments.rows and not row.digest.startswith("FAILED"):
                with arguments.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row._asdict()) + "\n")
    return compared(name, steps, seed, cases, rows)


def compared(
    part: str, steps: int, seed: int, cases: Sequence[Any], rows: dict[tuple[str, int, str], Row]
) -> int:
    """Tell which finished cases have other bits than the first of their kind."""
    wanted: dict[str, str] = {}
    bad = total = 0
    for case in cases:
        row = rows.get((part, steps, case.name))
        if row is None:
            continue
        total += 1
        right = wanted.setdefault(case.kind, row.digest)
        if row.digest != right or row.digest.startswith("FAILED"):
            bad += 1
            print(f"{row.case}: {row.digest}, not {right}")
    for kind, digest in wanted.items():
        print(f"{kind}: {digest}")
    left = len(cases) - total
    print(f"{bad} of {total} are not equal, {left} left ({part}, {steps} steps, seed {seed})")
    return 1 if bad else 2 if left else 0


if __name__ == "__main__":
    sys.exit(main())
