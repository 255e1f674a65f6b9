"""Ten minutes on one device: what only a device shows, as one JSON file and one page.

    python benchmarks/device.py --first

Each look runs in processes of its own, so that one that fails or hangs costs its own time and
leaves the others. A look begins only while there is time for it; one that did not begin is named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from turns import HERE, free_port

SECONDS = 600
LOOK_SECONDS = 90
TORCH = ("torch", "fsdp2")
EXPANDABLE = " with expandable segments"
# The order is that of what one wants to know first. All systems keep fp32 masters.
LOOKS = (
    "start",
    "system:zero3",
    "system:fsdp2-fused",
    "system:torch-fused-autocast",
    "streams",
    "waits",
    "trace",
    "units:growing",
    "units:shrinking",
    "units:alternating",
    "system:zero2",
    "system:zero1",
    "system:zero0",
    f"system:zero3{EXPANDABLE}",
    f"system:fsdp2-fused{EXPANDABLE}",
    f"units:growing{EXPANDABLE}",
    "graph",
    "offload:zero2-offload",
    "offload:zero3-offload",
    "ulysses",
)


@dataclass
class Look:
    """What came of one look: `found` numbers, or why there are none. `clean` says that all
    processes ended by themselves with exit code 0; `said` is the end of what they wrote.
    """

    name: str
    seconds: float = 0.0
    clean: bool = False
    found: dict[str, Any] = field(default_factory=dict)
    said: str = ""


def take(name: str, place: Any, workload: Mapping[str, Any], steps: int) -> Look:
    """One look at a `device.Place`, in at most `LOOK_SECONDS`; no process is left."""
    look, option = name.partition(" with ")[::2]
    # torch's own systems know nothing of a simulated device.
    is_torch = look.partition(":")[2].startswith(TORCH)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "OMP_NUM_THREADS": str(1 if place.accelerator == "sim" else min(8, os.cpu_count() or 1)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(place.ranks),
        "DS_ACCELERATOR": "cpu" if is_torch and place.accelerator == "sim" else place.accelerator,
    }
    if option:
        for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            environment[variable] = "expandable_segments:True"
    command = [sys.executable, str(HERE / "first_worker.py"), look]
    command += ["--workload", json.dumps(workload), "--backend", place.backend]
    command += ["--steps", str(steps)]
    begin, result = time.monotonic(), Look(name)
    with tempfile.TemporaryFile("w+") as said:
        processes = [
            subprocess.Popen(
                command,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                cwd=tempfile.gettempdir(),
            )
            for rank in range(place.ranks)
        ]
        try:
            output = processes[0].communicate(timeout=LOOK_SECONDS)[0]
            codes = [process.wait(timeout=10) for process in processes]
            result.clean = not any(codes)
            result.found = json.loads(output) if output else {}
        except subprocess.TimeoutExpired:
            result.found = {"gave up after s": LOOK_SECONDS}
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said.seek(0)
        result.said = "" if result.clean else said.read()[-2000:]
    result.seconds = time.monotonic() - begin
    return result


def number(value: Any) -> str:
    """A value as a page shows it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {number(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(number, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def page(looks: list[Look], head: str) -> str:
    """All looks as Markdown, the comparable ones in one table."""
    lines = ["# First look at a device", "", head, ""]
    keys = ("step ms", "allocated MiB", "reserved MiB", "formula MiB")
    compared = [look for look in looks if look.name.startswith(("system:", "units:"))]
    if compared:
        lines += ["| | " + " | ".join(keys) + " |", "|---|" + "---:|" * len(keys)]
        for look in compared:
            cells = (number(look.found.get(key, "-")) for key in keys)
            lines.append(f"| {look.name.partition(':')[2]} | " + " | ".join(cells) + " |")
        lines += ["", "The formula counts no activations.", ""]
    for look in looks:
        lines.append(f"## {look.name}: {look.seconds:.0f} s{'' if look.clean else ', FAILED'}\n")
        lines += [f"- {key}: {number(value)}" for key, value in look.found.items()]
        lines += ["", "```", look.said.strip(), "```"] if look.said else []
        lines.append("")
    return "\n".join(lines)


def run(
    place: Any, workload: Mapping[str, Any], steps: int, record: Path, names: Sequence[str] = LOOKS
) -> int:
    """Take all looks, write `record` and the page beside it; the exit code."""
    begin, looks = time.monotonic(), []
    for name in names:
        if time.monotonic() - begin > SECONDS - LOOK_SECONDS:
            looks.append(Look(name, found={"not begun": "out of time"}))
        else:
            looks.append(take(name, place, workload, steps))
        state = "ok" if looks[-1].clean else "FAILED"
        print(f"{name}: {state} in {looks[-1].seconds:.0f} s", file=sys.stderr, flush=True)
        # Written each time: a machine that is taken away leaves what there was.
        told = {"workload": dict(workload), "looks": [asdict(look) for look in looks]}
        record.write_text(json.dumps(told, indent=1) + "\n")
        head = f"{json.dumps(dict(workload))}, {place.ranks} ranks, {place.backend}"
        record.with_suffix(".md").write_text(page(looks, head))
    print(f"{record} and {record.with_suffix('.md')}")
    return int(not all(look.clean for look in looks))
