"""Trains a model whose optimizer state is so many times what the process may have of memory, with
the state and the parameters in files, and compares what it had with the formula of docs/offload.md.

    python benchmarks/offload_memory.py --folder FOLDER [--units 96] [--times 4]

The limit is RLIMIT_DATA (what is private and may be written; no cache of files), above what the
process has when it has trained a small model. Set MALLOC_MMAP_THRESHOLD_=1048576, or glibc keeps
what was freed.
"""

from __future__ import annotations

import argparse
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sharding.publisher import UPDATE_NUMEL
from deepspeed.runtime.zero.estimates.kept_state import KeptState, staged
from deepspeed.runtime.zero.estimates.stage3 import ModelShape, plan_sharded_parameters

MIB = 1 << 20
ADAM_TENSORS = 3  # masters and two moments, fp32
ROWS = 4


def status(key: str) -> int:
    """Bytes of a line of the kernel's account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


class Peak(threading.Thread):
    """Samples anonymous memory in use."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.base = self.most = status("RssAnon")
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            self.most = max(self.most, status("RssAnon"))
            time.sleep(0.005)


class Unit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def config_of(folder: str, unit: int) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": unit,
            "stage3_max_live_parameters": 2 * unit,
            "stage3_max_reuse_distance": 0,
            "reduce_bucket_size": unit,
            "offload_param": {**nvme, "buffer_count": 3, "max_in_cpu": 0},
            "offload_optimizer": nvme,
        },
    }


def formula(engine: Any) -> tuple[int, int]:
    """Bytes of the host's part, and of what a device would have of the model."""
    offload = engine.parameter_offload
    shape = ModelShape.of(engine.module, offload.resources.settings)
    shard = max(unit.shard.nbytes for unit in offload.units)
    state = KeptState(grad=2, in_files=True).host(shape.trained, ADAM_TENSORS - 1)
    host = state + staged(0, UPDATE_NUMEL, 2) + 3 * shard
    device = plan_sharded_parameters(shape, 1, offload.resources.settings, offload_ratio=1.0).device
    return host, device


def train(folder: str, units: int, width: int, steps: int) -> Any:
    config = config_of(folder, 8 * width**2)
    with deepspeed.zero.Init(remote_device="nvme", config_dict_or_path=config):
        model = nn.Sequential(*(Unit(width) for _ in range(units)))
    params = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    for step in range(steps):
        begin = time.perf_counter()
        x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(step))
        loss = (engine(x.to(torch.bfloat16)) - 1.0).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        took = time.perf_counter() - begin
        print(f"step {step}: loss {loss.item():.4f}, {took:.1f} s", flush=True)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--units", type=int, default=96)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--times", type=float, default=4.0, help="state by limit")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    threading.stack_size(MIB)  # the limit counts stacks that nobody uses
    deepspeed.init_distributed()
    train(options.folder, 2, 32, 1).destroy()
    unit = 8 * options.width**2
    state = 4 * ADAM_TENSORS * unit * options.units
    limit = round(state / options.times)
    peak = Peak()
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + limit, hard))
    peak.start()
    engine = train(options.folder, options.units, options.width, options.steps)
    peak.is_over = True
    used, (host, device) = peak.most - peak.base, formula(engine)
    name = get_accelerator().device_name()
    print(f"{unit * options.units / 1e6:.0f}M parameters, optimizer state {state / MIB:.0f} MiB")
    print(f"limit {limit / MIB:.0f} MiB, used {used / MIB:.0f} MiB on {name}")
    print(f"formula: host {host / MIB:.0f} + device {device / MIB:.0f} MiB")
    print(f"used / formula: {used / (host + device):.3f}")


if __name__ == "__main__":
    main()
