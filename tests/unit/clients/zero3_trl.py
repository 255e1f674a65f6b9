"""Trainers of trl at stage 3: each goes on in new processes as a run that did not stop."""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from unit.clients.launching import launch

# As `train_with_trl.KINDS`, which cannot be imported without trl.
KINDS = ("sft", "sft-lora", "dpo", "grpo")
TIMEOUT_S = 900.0
SAVED_AT = 2


def check(kind: str) -> bool:
    """Train straight and resumed, print what differs."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        try:
            straight, resumed = (
                launch(
                    "train_with_trl.py", out, kind, *more, launcher="torchrun", timeout=TIMEOUT_S
                )
                for more in ((), ("--resume",))
            )
            bad = [key for key in straight if straight[key] != resumed[key]]
            if (straight["engine"], straight["stage"]) != ("deepspeed.runtime.engine", 3):
                bad.append(f"trained by {straight['engine']}, stage {straight['stage']}")
            losses = ", ".join(f"{loss:.4f}" for loss in straight["loss"].values())
        except (AssertionError, subprocess.TimeoutExpired) as error:
            bad, losses = [str(error)[-3000:]], "none"
    verdict = "FAIL" if bad else "PASS"
    print(f"{kind:10} {verdict}  losses {losses}  {time.monotonic() - began:5.0f} s", flush=True)
    for line in bad:
        print(f"    differs when resumed: {line}", flush=True)
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
