"""Trainers of trl at stage 3: each goes on in new processes as a run that did not stop."""

import argparse
import sys
from pathlib import Path

from unit.clients.launching import attempt, launch

# As `train_with_trl.KINDS`, which cannot be imported without trl.
KINDS = ("sft", "sft-lora", "dpo", "grpo")


def check(kind: str) -> bool:
    """Train straight and resumed, print what differs."""

    def run(out: Path) -> tuple[list[list[str]], str]:
        words, how = ("train_with_trl.py", out, kind), {"launcher": "torchrun", "timeout": 900.0}
        straight, resumed = launch(*words, **how), launch(*words, "--resume", **how)
        bad = [f"differs when resumed: {key}" for key in straight if straight[key] != resumed[key]]
        if (straight["engine"], straight["stage"]) != ("deepspeed.runtime.engine", 3):
            bad.append(f"trained by {straight['engine']}, stage {straight['stage']}")
        return [bad], ", ".join(["losses", *(f"{loss:.4f}" for loss in straight["loss"].values())])

    (bad,) = attempt(kind, 1, run)
    return not bad


def main(argv: list[str] | None = None) -> int:
    """Every trainer; returns 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    arguments = parser.parse_args(argv)
    passed = [check(kind) for kind in ([arguments.kind] if arguments.kind else KINDS)]
    print(f"{sum(passed)} of {len(passed)} passed")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
