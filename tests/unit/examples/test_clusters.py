"""The recipes for Ray and Kubernetes, as far as they run without a cluster of many machines."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.common import get_master_port, python_path
from unit.one_process import OneProcess

ROOT = Path(__file__).resolve().parents[3]
OURS = {"PYTHONPATH": python_path(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
ENVIRONMENT = {**os.environ, **OURS}
FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
POD = """
import json, os, torch, deepspeed
deepspeed.init_distributed()
total = torch.ones(())
deepspeed.comm.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE")
print("seen " + json.dumps([int(total)] + [int(os.environ[name]) for name in names]))
"""


def plain_losses(steps: int) -> list[float]:
    """What examples/ray_train.py trains, in plain torch and one process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)

    def loss_of(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))

    # 1.0 is what gradient_clipping is unless it is given.
    alone = OneProcess(model, optimizer, loss_of, clip=1.0)
    return [alone.step([torch.randn(16, 8, generator=generator)]) for _ in range(steps)]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install ray")
def test_ray_trains_as_one_process_does(tmp_path: Path) -> None:
    # Kills: workers that each train alone (a batch of 16 per worker gives other losses from the
    # second step on).
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), "--workers", "2"]
    environment = {**ENVIRONMENT, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert len(result["losses"]) == 2 and result["losses"][0] == result["losses"][1]
    torch.testing.assert_close(result["losses"][0], plain_losses(5), rtol=1e-5, atol=1e-5)


def manifest() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    file = ROOT / "examples" / "kubernetes" / "indexed_job.yaml"
    return list(yaml.safe_load_all(file.read_text()))


def test_manifest_fits_together() -> None:
    service, job = manifest()
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completionMode"] == "Indexed"
    nodes = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == nodes and f"--num_nodes={nodes}" in container["args"]
    environment = {entry["name"]: entry for entry in container["env"]}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) <= environment.keys()
    # An Indexed Job names its pods after itself and their index.
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert environment["MASTER_ADDR"]["value"] == first
    assert environment["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == FIELD
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}


def test_pods_of_the_manifest_find_each_other(tmp_path: Path) -> None:
    """Its very command and variables; only address, port and script are this machine's."""
    _, job = manifest()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (tmp_path / "train.py").write_text(POD)
    port = get_master_port()
    here = {"MASTER_ADDR": "127.0.0.1", "PROCESSES": "1"}
    pods = []
    for index in range(job["spec"]["completions"]):
        told = {entry["name"]: entry.get("value", str(index)) for entry in container["env"]}
        variables = told | {name: here[name] for name in told if name in here}
        args = [arg.replace("29500", port) for arg in container["args"]]
        for name, value in variables.items():
            args = [arg.replace(f"$({name})", value) for arg in args]
        script = next(number for number, arg in enumerate(args) if arg.endswith(".py"))
        command = [sys.executable, "-m", "deepspeed.launcher.runner", *args[:script], "train.py"]
        how = {"cwd": tmp_path, "env": {**ENVIRONMENT, **variables}, "text": True}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        pods.append(subprocess.Popen(command, **how, **pipes))
    outputs = [pod.communicate(timeout=240) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    seen = [json.loads(out.partition("seen ")[2].splitlines()[0]) for out, _ in outputs]
    assert seen == [[2, 0, 2, 0, 0, 2], [2, 1, 2, 0, 1, 2]]
