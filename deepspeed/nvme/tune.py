"""The `ds_nvme_tune` command: tries settings of the `aio` block in a folder and says which is best.

Owns: its options (upstream's, and where results go), the sweep, its result and picture.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from deepspeed.nvme.measure import GB, Task, add_shared_options, measure, size_of
from deepspeed.utils.reports import pyplot

SWEEP: dict[str, list[Any]] = {
    "block_size": ["1M", "8M"],
    "queue_depth": [32, 128],
    "sequential_requests": [True, False],
    "single_submit": [False, True],
    "io_parallel": [1, 2, 4, 8],
}
"""Upstream's default of `--sweep_config`."""
RESULTS = "results.json"


def parse_sweep_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    text = "Measure settings of file I/O in a folder and write the `aio` block of the best."
    parser = argparse.ArgumentParser(prog="ds_nvme_tune", description=text)
    add = parser.add_argument
    add("--nvme_dir", nargs="+", required=True, help="folders, each used by a process of its own")
    add("--sweep_config", help="JSON file: option of ds_io -> list of its values")
    add("--no_read", action="store_true", help="do not measure reading")
    add("--no_write", action="store_true", help="do not measure writing")
    add("--io_size", type=size_of, default=400 << 20, help="bytes of a file (400M)")
    add("--loops", type=int, default=1, help="how often each setting is measured")
    add("--log_dir", default="_aio_bench_logs", help=f"folder of {RESULTS}, every speed")
    add("--verbose", action="store_true", help="say which engine moves the bytes")
    add("--gds", action="store_true", help="refused: not in this release")
    text = "refused: transfers go past the page cache, or are measured as they are"
    add("--flush_page_cache", action="store_true", help=text)
    add("--json", help="file for the aio block, which is printed too")
    add("--report", help="picture of all speeds, FILE.png (needs matplotlib)")
    add_shared_options(parser)
    return parser.parse_args(args)


def sweep_main(options: argparse.Namespace) -> None:
    """Measure, write the results and say the `aio` block.

    Raises:
        ValueError: something does not fit together, or a setting cannot be had.
        OSError: of the disk, with the file named.
    """
    _check(options)
    settings = _settings(options.sweep_config)
    kinds = [kind for kind in ("read", "write") if not getattr(options, f"no_{kind}")]
    results = []
    for number, (kind, setting) in enumerate(itertools.product(kinds, settings), 1):
        task = Task(tuple(options.nvme_dir), options.io_size, kind == "read", **setting)
        own = {"loops": options.loops, "gpu": options.gpu, "io_engine": options.io_engine}
        speed = measure(task._replace(**own))
        results.append({"kind": kind, **setting, "GB/s": speed.end_to_end / GB})
        by = f" by {speed.engine}" if options.verbose else ""
        told = " ".join(f"{name}={value}" for name, value in setting.items())
        count = f"{number}/{len(kinds) * len(settings)}"
        sys.stderr.write(f"{count} {kind} {told}: {results[-1]['GB/s']:.2f} GB/s{by}\n")
    best = best_block(results)
    text = json.dumps(best, indent=4) + "\n"
    folder = Path(options.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.json:
        Path(options.json).write_text(text, encoding="utf-8")
    if options.report:
        draw(results, options.report)
    for kind in kinds:
        speeds = [result["GB/s"] for result in results if result["kind"] == kind]
        sys.stdout.write(f"Best {kind}: {max(speeds):.2f} GB/s, worst {min(speeds):.2f}\n")
    sys.stdout.write(text)


def best_block(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the `aio` block whose slower direction is the fastest, compared with the best there is
    of each: a step reads what it writes. Of equals the first, which comes with least.
    """
    fastest: dict[str, float] = {}
    for result in results:
        fastest[result["kind"]] = max(result["GB/s"], fastest.get(result["kind"], 0.0))
    worst: dict[tuple[tuple[str, Any], ...], float] = {}
    for result in results:
        setting = tuple(item for item in result.items() if item[0] not in ("kind", "GB/s"))
        share = result["GB/s"] / fastest[result["kind"]]
        worst[setting] = min(share, worst.get(setting, 1.0))
    chosen, _ = max(worst.items(), key=lambda item: item[1])
    best = Task((), 0)._replace(**dict(chosen))
    return {
        "aio": {
            "block_size": best.block_size,
            "queue_depth": best.queue_depth,
            "intra_op_parallelism": best.io_parallel,
            "single_submit": best.single_submit,
            "overlap_events": not best.sequential_requests,
            "use_gds": False,
        }
    }


def draw(results: list[dict[str, Any]], path: str) -> None:
    """Draw every setting's speed, the fastest first, reading and writing side by side."""
    plot = pyplot()
    kinds = list(dict.fromkeys(result["kind"] for result in results))
    rows = len(results) // len(kinds)
    figure, all_axes = plot.subplots(
        1, len(kinds), figsize=(8 * len(kinds), 1 + 0.22 * rows), dpi=110, squeeze=False
    )
    for axes, kind in zip(all_axes[0], kinds, strict=True):
        own = sorted((r for r in results if r["kind"] == kind), key=lambda r: r["GB/s"])
        labels = [
            ", ".join(f"{k}={v}" for k, v in r.items() if k not in ("kind", "GB/s")) for r in own
        ]
        axes.barh(labels, [result["GB/s"] for result in own])
        axes.set_title(f"{kind}, GB/s")
        axes.tick_params(labelsize=6)
        axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plot.close(figure)


def _check(options: argparse.Namespace) -> None:
    missing = [folder for folder in options.nvme_dir if not os.path.isdir(folder)]
    if missing:
        raise ValueError(f"--nvme_dir: there is no folder {missing[0]}")
    if options.no_read and options.no_write:
        raise ValueError("--no_read with --no_write leaves nothing to measure")
    if options.loops < 1:
        raise ValueError(f"--loops {options.loops} is too few")
    if options.gds:
        raise ValueError("--gds: GPUDirect Storage is not in this release; leave it out")
    if options.flush_page_cache:
        raise ValueError("--flush_page_cache: transfers go past the page cache; leave it out")
    if options.report:
        if not options.report.endswith(".png"):
            raise ValueError(f"--report {options.report}: the file must end in .png")
        try:
            pyplot()
        except ImportError as error:
            raise ValueError(f"--report {options.report}: {error}") from error


def _settings(path: str | None) -> list[dict[str, Any]]:
    sweep = SWEEP if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    unknown = sorted(set(sweep) - set(SWEEP)) if isinstance(sweep, dict) else ["no object"]
    if unknown:
        raise ValueError(f"--sweep_config: {unknown[0]} is unknown; use {', '.join(SWEEP)}")
    settings = []
    for values in itertools.product(*sweep.values()):
        setting = dict(zip(sweep, values, strict=True))
        if "block_size" in setting:
            setting["block_size"] = size_of(str(setting["block_size"]))
        settings.append(setting)
    return settings


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; return 2, with one line on stderr, if it cannot be measured."""
    try:
        sweep_main(parse_sweep_arguments(args))
    except (argparse.ArgumentTypeError, BrokenProcessPool, OSError, ValueError) as error:
        sys.stderr.write(f"ds_nvme_tune: error: {error}\n")
        return 2
    return 0
