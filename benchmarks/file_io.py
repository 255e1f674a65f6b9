"""How fast `deepspeed.ops.aio` moves files beside `fio` with the same block size, depth and engine,
and beside upstream's op, which is libaio's. All take turns on one file; ratios are within a round.

    python benchmarks/file_io.py --folder FOLDER [--upstream-python UPSTREAM/bin/python]

Needs `fio` on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

WORKER = """
import ctypes, sys, time, torch
from deepspeed.ops.op_builder import AsyncIOBuilder
path, verb, size, block, depth, engine = sys.argv[1:]
engine, _, pages = engine.partition(", ")
if pages:
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
own = {"engine": engine} if engine != "libaio" else {}
io = AsyncIOBuilder().load().aio_handle(int(block), int(depth), False, True, 1, **own)
buffer = io.new_cpu_locked_tensor(int(size), torch.empty(0, dtype=torch.uint8)).fill_(1)
begin = time.perf_counter()
(io.sync_pread if verb == "read" else io.sync_pwrite)(buffer, path, 0)
print("MB/s", int(size) / (time.perf_counter() - begin) / 1e6, flush=True)
"""
SMALL = "io_uring, small pages"
PAIRS = {"io_uring": "io_uring", SMALL: "io_uring", "threads": "psync", "libaio": "libaio"}
"""Engine here (libaio: upstream's) -> fio's. Threads are as many jobs as the queue is deep."""


def fio(path: str, verb: str, size: int, block: int, depth: int, engine: str) -> float:
    jobs = depth if engine == "psync" else 1
    each = size // jobs
    options = {"name": "x", "filename": path, "rw": verb, "ioengine": engine, "bs": block}
    options |= {"size": each, "io_size": each, "offset_increment": each, "numjobs": jobs}
    options |= {"iodepth": 1 if jobs > 1 else depth, "direct": 1, "output-format": "json"}
    command = ["fio", "--thread", "--group_reporting", *(f"--{k}={v}" for k, v in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    bandwidth: float = json.loads(done.stdout)["jobs"][0][verb]["bw_bytes"]
    return bandwidth / 1e6


def ours(python: str, path: str, verb: str, *how: object) -> float:
    command = [python, "-c", WORKER, path, verb, *map(str, how)]
    folder = Path(path).parent  # not this checkout, which upstream's interpreter must not find
    # Upstream's may abort when it ends, with all said and done.
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if "MB/s " not in done.stdout:
        raise RuntimeError(done.stderr)
    return float(done.stdout.rpartition("MB/s ")[2].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--size", type=int, default=1 << 30)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1 << 20, 128 << 10])
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--upstream-python")
    options = parser.parse_args()
    path = os.path.join(os.path.abspath(options.folder), "_file_io")
    print("| block | engine | write MB/s | x fio | read MB/s | x fio |")
    print("|---|---|---:|---:|---:|---:|")
    for block in options.blocks:
        pythons = dict.fromkeys(("io_uring", SMALL, "threads"), sys.executable)
        if options.upstream_python:
            pythons["libaio"] = os.path.abspath(options.upstream_python)
        speeds: dict[tuple[str, str], list[tuple[float, float]]] = {}
        how = options.size, block, options.depth
        for _ in range(options.rounds):
            for engine, python in pythons.items():
                for verb in ("write", "read"):
                    plain = fio(path, verb, *how, PAIRS[engine])
                    own = ours(python, path, verb, *how, engine)
                    speeds.setdefault((engine, verb), []).append((own, own / plain))
        for engine in pythons:
            cells = []
            for verb in ("write", "read"):
                own_speeds, ratios = zip(*speeds[engine, verb], strict=True)
                cells += [
                    f"{statistics.median(own_speeds):.0f}",
                    f"{statistics.median(ratios):.2f}",
                ]
            name = "libaio (upstream)" if engine == "libaio" else engine
            print(f"| {block >> 10} KiB | {name} | {' | '.join(cells)} |", flush=True)
    os.remove(path)


if __name__ == "__main__":
    main()
