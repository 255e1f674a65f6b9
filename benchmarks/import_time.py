"""How much `import deepspeed` adds to `import torch`, in seconds; and that it starts no CUDA.

    python benchmarks/import_time.py

Fresh interpreters in turn, one with torch alone and one with both, so that a busy machine slows
both down.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEASURE = """
import time
start = time.perf_counter()
import torch
torch_done = time.perf_counter()
{then}
print(torch_done - start, time.perf_counter() - torch_done, torch.cuda.is_initialized())
"""


def added_seconds(then: str) -> tuple[float, float]:
    """Seconds of `import torch` and of the statement after it, in a fresh interpreter.

    Raises:
        RuntimeError: If the statement initialized CUDA.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE.format(then=then)]
    output = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    if output[2] != "False":
        raise RuntimeError(f"{then} initialized CUDA")
    return float(output[0]), float(output[1])


def main() -> None:
    """Print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    cases = ("import deepspeed", "from deepspeed.runtime import engine")
    times = {case: [added_seconds(case) for _ in range(runs)] for case in cases}
    print(
        "import torch: "
        f"{statistics.median(first for case in cases for first, _ in times[case]):.3f} s"
    )
    for case in cases:
        added = [second for _, second in times[case]]
        print(f"{case}: + {statistics.median(added):.3f} s (slowest {max(added):.3f})")


if __name__ == "__main__":
    main()
