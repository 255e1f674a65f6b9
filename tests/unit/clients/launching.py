"""Runs a client's training script in processes of its own, as a user does, with this project's
launcher or torchrun.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unit.common import get_master_port

ROOT = Path(__file__).resolve().parents[3]
LAUNCHERS = {
    "deepspeed": [
        "-m",
        "deepspeed.launcher.runner",
        "--num_gpus",
        "{processes}",
        "--master_port",
        "{port}",
    ],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "{processes}"],
}


def need(*modules: str) -> None:
    """Skip the test unless all client libraries are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            f"not installed: {', '.join(missing)} (requirements/requirements-dev.txt has "
            "accelerate, transformers and peft; make campaign NAME=clients installs and tries all)"
        )


def launch(
    script: str,
    out: Path,
    *args: str,
    processes: int = 2,
    launcher: str = "deepspeed",
    timeout: float = 180.0,
) -> Any:
    """Run `script` of this folder on `processes` ranks and return the JSON that its rank 0 wrote to
    `out/result.json`.

    Args:
        script: File name.
        out: Folder that the script writes to; its first argument.
        args: The script's other arguments.
        processes: Ranks.
        launcher: "deepspeed" or "torchrun".
        timeout: Seconds after which the test fails.
    """
    result = out / "result.json"
    result.unlink(missing_ok=True)
    program = Path(__file__).parent / script
    run_ranks(
        program, out, str(out), *args, processes=processes, launcher=launcher, timeout=timeout
    )
    return json.loads(result.read_text())


def run_ranks(
    program: Path,
    cwd: Path,
    *args: str,
    processes: int = 2,
    launcher: str = "deepspeed",
    timeout: float = 180.0,
) -> str:
    """Run `program` on `processes` ranks in the folder `cwd`; returns what they wrote to stdout.
    The rest is as in `launch`.
    """
    before = [
        word.format(processes=processes, port=get_master_port()) for word in LAUNCHERS[launcher]
    ]
    run = subprocess.run(
        [sys.executable, *before, str(program), *args],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert run.returncode == 0, (
        f"{program.name} exited with {run.returncode}\n{run.stdout[-4000:]}\n{run.stderr[-6000:]}"
    )
    return run.stdout


def environment() -> dict[str, str]:
    """A user's environment, on the host, without network and without what another test's process
    group left behind.
    """
    ours = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **ours,
        "PYTHONPATH": os.pathsep.join(paths),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
