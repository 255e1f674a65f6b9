"""Runs a client's script in processes: by this launcher, torchrun, or forked from the template."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed.accelerator import real_accelerator
from unit.common import get_master_port, report, server
from unit.rank_server import Job

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
    launcher: str | None = None,
    timeout: float = 180.0,
) -> Any:
    """Run a script of this folder; returns the JSON that rank 0 wrote to `out/result.json`."""
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
    launcher: str | None = None,
    timeout: float = 180.0,
    **variables: str,
) -> str:
    """Run `program` on ranks in the folder `cwd`, with more `variables`; returns their stdout."""
    if launcher is None:
        call = {
            "argv": [str(program), *args],
            "cwd": cwd,
            "environment": {
                **environment(),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": get_master_port(),
                **variables,
            },
        }
        results = server.run(Job((__name__, "run_program"), call, processes, timeout))
        report(results, timeout)
        return "".join(result.output for result in results)
    before = [
        word.format(processes=processes, port=get_master_port()) for word in LAUNCHERS[launcher]
    ]
    run = subprocess.run(
        [sys.executable, *before, str(program), *args],
        cwd=cwd,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert run.returncode == 0, (
        f"{program.name} exited with {run.returncode}\n{run.stdout[-4000:]}\n{run.stderr[-6000:]}"
    )
    return run.stdout


def run_program(rank: int, call: dict[str, Any]) -> None:
    """Run a program on this rank as Python does; `rank_server` calls it in the rank's process."""
    os.environ.clear()
    os.environ.update(call["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    real_accelerator.ds_accelerator = None  # the tests' own may be another
    os.chdir(call["cwd"])
    sys.argv = call["argv"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def environment() -> dict[str, str]:
    """A user's environment, on the host, without network and another test's process group."""
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
