"""How many scalar collectives a pipeline step issues, with 1 and 3 parameter groups: this project's
engine beside upstream's.

    python benchmarks/pipeline_collectives.py --peer-python /path/to/python

Counted are calls of torch.distributed in one step of each stage of two whose message is one tensor
of at most 16 elements, with gradient clipping: norms, overflow, losses. Without `--peer-python`
upstream is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

from pipeline import BASELINE, UPSTREAM, start_ranks
from pipeline_systems import Workload
from turns import print_log

NUM_RANKS = 2
CASES = (("fp32", 0), ("fp32", 1), ("bf16", 0), ("bf16", 1))


def count(name: str, work: Workload, peer_python: str | None) -> str:
    """Calls per step by function on each stage, or why there are none."""
    with tempfile.TemporaryFile("w+") as stderr:
        ranks = start_ranks(name, work, NUM_RANKS, peer_python, stderr)
        try:
            ranks.wait_until_ready()
            replies = ranks.tell("count 1")
        except RuntimeError as error:
            print_log(stderr, error)
            return "does not run"
        finally:
            ranks.close()
    of_stages = [
        ", ".join(f"{calls} {function}" for function, calls in sorted(reply.items())) or "none"
        for reply in replies
    ]
    return " / ".join(dict.fromkeys(of_stages))


def main(argv: list[str] | None = None) -> int:
    """Count and print a Markdown table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", help="interpreter with upstream DeepSpeed installed")
    arguments = parser.parse_args(argv)
    names = [BASELINE, *([UPSTREAM] if arguments.peer_python else [])]
    print(
        f"| precision | ZeRO | groups | {' | '.join(names)} |\n|---|---:|---:|{'---|' * len(names)}"
    )
    for precision, stage in CASES:
        for groups in (1, 3):
            work = Workload(
                blocks=4,
                width=32,
                context=16,
                micro_batches=4,
                precision=precision,
                zero_stage=stage,
                groups=groups,
                clip=1.0,
            )
            counts = [count(name, work, arguments.peer_python) for name in names]
            print(f"| {precision} | {stage} | {groups} | {' | '.join(counts)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
