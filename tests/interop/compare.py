"""Do checkpoints go on in upstream, and upstream's here? Trains, saves, loads, compares, prints a
table (docs/interoperation.md).

    python tests/interop/compare.py --upstream /path/to/python [--cases zero2_fp32 ...]

`--upstream` is an interpreter that has upstream's deepspeed. Each side trains 8 steps and saves
after 4; each then loads what either side saved and trains the last 4 again. The jobs themselves are
`worker.py`'s.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from deepspeed.checkpoint.files import read_file  # noqa: E402  the path above is where it lies

SAVED_AFTER, TAG = 4, "step4"
SIDES = ("here", "upstream")
NAMES = [
    *("zero0_fp32", "zero0_bf16", "zero0_fp16", "zero1_fp32", "zero1_bf16", "zero1_bf16_fp32acc"),
    *("zero1_fp16", "zero2_fp32", "zero2_bf16", "zero2_fp16"),
    *("pipe2_zero0_fp32", "pipe2_zero1_bf16"),
    *("experts_zero0_fp32", "experts_zero1_bf16", "experts_zero2_fp32"),
]


@dataclass(frozen=True)
class Outcome:
    """How one side (`loader`) went on from a checkpoint of the `saver`.

    Attributes:
        problem: Why there are no figures; empty if there are.
        equal_state: How many of `all_state` tensors and values of the scaler are bit-equal in the
            files that the loader saves right away.
        loss, norm: Largest relative deviations of the 4 steps from the saver's own.
    """

    case: str
    saver: str
    loader: str
    problem: str = ""
    equal_state: int = 0
    all_state: int = 0
    loss: float = float("nan")
    norm: float = float("nan")

    def __str__(self) -> str:
        way = f"| {self.case} | {self.saver} -> {self.loader} |"
        if self.problem:
            return f"{way} {self.problem} | | |"
        state = f"{self.equal_state} of {self.all_state}"
        return f"{way} {state} | {self.loss:.1e} | {self.norm:.1e} |"


class Interpreters:
    """Runs jobs on either side; everything is written in ``folder``."""

    def __init__(self, upstream: str, folder: Path) -> None:
        self.interpreters = {"here": sys.executable, "upstream": upstream}
        self.folder = folder
        self.versions: dict[str, str] = {}

    def run(self, side: str, jobs: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Problems by the folder that a job saves to."""
        asked, answer = self.folder / f"{side}-jobs.json", self.folder / f"{side}-answer.json"
        asked.write_text(json.dumps(jobs))
        answer.unlink(missing_ok=True)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        # Upstream compiles an op at the first use, for a minute; a folder of its own, since an
        # interrupted build leaves a lock.
        environment.setdefault("TORCH_EXTENSIONS_DIR", str(self.folder / f"{side}-ops"))
        environment["GLOO_SOCKET_IFNAME"] = environment.get("GLOO_SOCKET_IFNAME", "lo")
        if side == "here":
            environment["PYTHONPATH"] = str(HERE.parents[1])
        log = self.folder / f"{side}.log"
        with log.open("a") as output:
            command = [self.interpreters[side], str(HERE / "worker.py"), str(asked), str(answer)]
            pipes = {"stdout": output, "stderr": subprocess.STDOUT}
            subprocess.run(command, cwd=self.folder, env=environment, **pipes)
        if not answer.exists():
            said = log.read_text()[-4000:]
            raise SystemExit(f"{self.interpreters[side]} failed; the end of its output:\n{said}")
        found = json.loads(answer.read_text())
        self.versions[side] = f"deepspeed {found['version']}, torch {found['torch']}"
        problems: dict[str, str] = found["problems"]
        return problems


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Tensors, and what a loss scaler has, with where they stand."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _values(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _values(item, f"{path}/{index}")
    elif "loss_scaler" in path:
        numbers = {key: item for key, item in vars(value).items() if isinstance(item, (int, float))}
        yield from ((f"{path}/{key}", torch.tensor(item)) for key, item in numbers.items())


def _content(folder: str) -> dict[str, torch.Tensor]:
    files = sorted(Path(folder, TAG).glob("*.pt"))
    files = [path for path in files if not path.name.startswith("host_state")]
    found = dict(pair for path in files for pair in _values(read_file(str(path)), path.name))
    if any(path.name.startswith("expp_rank") for path in files):
        # Upstream's model file has a copy of one rank's, which nobody reads and this project does
        # not write.
        for name in [name for name in found if "_model_states.pt/optimizer/" in name]:
            del found[name]
    return found


def _deviation(
    found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]], column: int
) -> float:
    pairs = [(a[column], b[column]) for a, b in zip(found, wanted, strict=True)]
    if not all(a and b for a, b in pairs):
        return float("nan")  # upstream reports no norm at stage 0
    return max(abs(a - b) / abs(b) for a, b in pairs)


def compare(case: str, saver: str, loader: str, saved: str, went_on: str) -> Outcome:
    """What the loading side held and did, against the saving side."""
    wanted, found = _content(saved), _content(went_on)
    equal = sum(name in found and torch.equal(found[name], value) for name, value in wanted.items())
    seen, expected = (json.loads(Path(f"{folder}.json").read_text()) for folder in (went_on, saved))
    loss, norm = (_deviation(seen, expected[SAVED_AFTER:], column) for column in range(2))
    return Outcome(case, saver, loader, "", equal, len(wanted), loss, norm)


def measure(
    upstream: str, cases: Sequence[str], folder: Path
) -> tuple[list[Outcome], dict[str, str]]:
    """All outcomes, and the versions of both sides."""
    sides, problems = Interpreters(upstream, folder), {}
    for side in SIDES:
        jobs = [{"case": case, "save": f"{folder}/{case}-{side}"} for case in cases]
        problems |= sides.run(side, jobs)
    for side in SIDES:
        pairs = [(case, f"{folder}/{case}-{saver}") for case in cases for saver in SIDES]
        pairs = [(case, saved) for case, saved in pairs if not problems[saved]]
        jobs = [{"case": case, "load": saved, "save": f"{saved}-{side}"} for case, saved in pairs]
        problems |= sides.run(side, jobs)
    ways = [(case, saver, loader) for case in cases for saver in SIDES for loader in SIDES]
    return [_outcome(*way, folder, problems) for way in ways], sides.versions


def _outcome(case: str, saver: str, loader: str, folder: Path, problems: dict[str, str]) -> Outcome:
    saved, went_on = f"{folder}/{case}-{saver}", f"{folder}/{case}-{saver}-{loader}"
    if problems[saved]:
        return Outcome(case, saver, loader, f"not saved: {problems[saved]}")
    if problems[went_on]:
        return Outcome(case, saver, loader, f"not loaded: {problems[went_on]}")
    return compare(case, saver, loader, saved, went_on)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peer = "interpreter that has upstream's deepspeed"
    parser.add_argument("--upstream", required=True, help=peer)
    parser.add_argument("--cases", nargs="+", default=NAMES, choices=NAMES)
    left = "a folder to which checkpoints and logs are written and left"
    parser.add_argument("--keep", type=Path, help=left)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        outcomes, versions = measure(arguments.upstream, arguments.cases, folder)
    for side, version in versions.items():
        print(f"{side}: {version}")
    print("\n| Case | Saved by -> goes on in | State equal | Loss | Norm |\n|---|---|---|---|---|")
    print("\n".join(map(str, outcomes)))


if __name__ == "__main__":
    main()
