"""Runs a client's script in processes: by this launcher, torchrun, or forked from the template."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from deepspeed.accelerator import real_accelerator
from unit.common import get_master_port, python_path, report, server
from unit.launcher import forked
from unit.rank_server import Job

ROOT = Path(__file__).resolve().parents[3]
COMMAND = "-m deepspeed.launcher.runner --num_gpus {processes} --master_port {port}".split()
LAUNCHERS = {
    "deepspeed": COMMAND,
    "elastic": [*COMMAND, *"--elastic_training --master_addr 127.0.0.1".split()],
    "torchrun": "-m torch.distributed.run --standalone --nproc_per_node {processes}".split(),
}


def need(*modules: str) -> None:
    """Skip the test unless all client libraries are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            f"not installed: {', '.join(missing)} (requirements/requirements-dev.txt has "
            "accelerate, transformers and peft; make campaign NAME=clients installs and tries all)"
        )


def launch(script: str, out: Path, *args: str, **how: Any) -> Any:
    """Run a script of this folder as `run_ranks`; returns the JSON that rank 0 wrote."""
    result = out / "result.json"
    result.unlink(missing_ok=True)
    run_ranks(Path(__file__).parent / script, out, str(out), *args, **how)
    return json.loads(result.read_text())


def straight_and_resumed(script: str, out: Path, runs: Sequence[str]) -> dict[str, Any]:
    """What runs tell straight through, and again from their middle in new processes."""
    straight = launch(script, out, *runs)
    return {"straight": straight, "resumed": launch(script, out, *runs, "--resume")}


def on_each_number_of_ranks(
    script: str, out: Path, runs: Sequence[str], equal: Sequence[str]
) -> list[Any]:
    """What runs tell on 1, 2 and 3 ranks, one on each; what they tell under `equal` is so."""
    told = [
        launch(script, out, run, processes=ranks)[run] for ranks, run in enumerate(runs, start=1)
    ]
    for key in equal:
        assert all(one[key] == told[0][key] for one in told), key
    return told


def assert_alike(steps: int, one: Any, two: Any, three: Any) -> None:
    """Stages 1, 2 and 3 have trained alike. bf16 gradients are summed over micro-batches before the
    reduction at stage 1 and after it at stages 2 and 3. Those two sum the norm in another order.
    """
    for step in map(str, range(1, steps + 1)):
        assert one["loss"][step] == pytest.approx(two["loss"][step], rel=2e-3)
        assert one["grad_norm"][step] == pytest.approx(two["grad_norm"][step], rel=2e-2)
        assert three["loss"][step] == pytest.approx(two["loss"][step], rel=1e-4)
        assert three["grad_norm"][step] == pytest.approx(two["grad_norm"][step], rel=1e-3)


def attempt(
    label: str, trials: int, run: Callable[[Path], tuple[list[list[str]], str]]
) -> list[list[str]]:
    """Run ``trials`` in an empty folder, print what they tell; returns what is wrong of each."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            bad, told = run(Path(folder))
        except (AssertionError, subprocess.TimeoutExpired) as error:
            bad, told = [[str(error)[-3000:]]] * trials, "nothing"
    verdict = "FAIL" if any(bad) else "PASS"
    print(f"{label:20} {verdict}  {told}  {time.monotonic() - began:5.0f} s", flush=True)
    for line in (line for one in bad for line in one):
        print(f"    {line}", flush=True)
    return bad


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
    port, given = get_master_port(), {**environment(), **variables}
    if launcher is None:
        command, body, forks = [str(program), *args], "run_program", processes
        sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        given = {**given, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
    else:
        before = [word.format(processes=processes, port=port) for word in LAUNCHERS[launcher]]
        command, body, forks = [*before, str(program), *args], "run_launcher", 1
    call = {"argv": command, "cwd": cwd, "environment": given}
    results = server.run(Job((__name__, body), call, forks, timeout))
    report(results, timeout)
    return "".join(result.output for result in results)


def run_program(rank: int, call: dict[str, Any]) -> None:
    """Run a program on this rank as Python does; `rank_server` calls it in the rank's process."""
    call["environment"].update(RANK=str(rank), LOCAL_RANK=str(rank))
    run_launcher(rank, call)


def run_launcher(rank: int, call: dict[str, Any]) -> None:
    """Run one that starts ranks, which are forked from this process."""
    os.environ.clear()
    os.environ.update(call["environment"])
    real_accelerator.ds_accelerator = None  # the tests' own may be another
    os.chdir(call["cwd"])
    forked.fork_ranks()
    try:
        forked.run_python([sys.executable, *call["argv"]])
    except SystemExit as end:
        if end.code:
            raise


def environment() -> dict[str, str]:
    """A user's environment, on the host, without network and another test's process group."""
    others = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    ours = {name: value for name, value in os.environ.items() if name not in others}
    return {
        **ours,
        "PYTHONPATH": python_path(ROOT),
        **{"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        **{"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    }
