"""Files read and written beside the program, under the stream checker: state of an optimizer in
files, and a script's own handles. See `scenarios`, which lists them with its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial

import torch

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.io import FastFileWriter, FastFileWriterConfig
from deepspeed.ops import state_files
from deepspeed.ops.aio.handle import AsyncIOHandle
from deepspeed.runtime.sharding import publisher
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from unit.models import config_of, drawn, linears
from unit.one_process import mean_square, placed
from unit.verify.guards import watched

ROWS, WIDTH = 2, 50
# Five windows of the model, and pieces that end in the midst of one.
WINDOW, PIECE = 1024, 1500
NUMEL = 4096


def state_in_files(
    stage: int, precision: str, batches: int = 2, is_early: bool = False
) -> list[str]:
    """What is found in a training that looks at its state after each step; two batches are of small
    sizes.
    """
    with watched(in_pieces=False) as found, tempfile.TemporaryDirectory() as folder:
        deepspeed.init_distributed(dist_backend="gloo")
        if batches == 2:
            state_files.WINDOW_NUMEL, publisher.UPDATE_NUMEL = WINDOW, PIECE  # in this rank
        offload = {"device": "nvme", "nvme_path": folder, "speculative_update": is_early}
        zero = {"offload_optimizer": offload}
        adam = {"type": "AdamW", "params": {"lr": 0.01}}
        config = config_of(stage, ROWS, 1, precision, optimizer=adam, zero_optimization=zero)
        model = linears(2, WIDTH)
        params = model.parameters()
        engine = deepspeed.initialize(model=model, model_parameters=params, config=config)[0]
        for step in range(batches):
            engine.backward(mean_square(engine, placed(engine, drawn(step, ROWS, WIDTH))))
            engine.step()
            for param in list(engine.module.parameters())[-2:]:
                safe_get_full_fp32_param(param)
                safe_get_full_optimizer_state(param, "exp_avg")
        get_accelerator().synchronize()
        engine.destroy()
    return found


def default_sizes() -> list[str]:
    """What is found in trainings of every stage with sizes as they are."""
    found: list[str] = []
    for stage, precision in ((1, "bf16"), (2, "fp32"), (3, "bf16")):
        found += state_in_files(stage, precision, batches=4)
    return found


def by_handles() -> list[str]:
    """What is found of a script that writes and reads tensors, to and from the device too."""
    with watched(in_pieces=False) as found, tempfile.TemporaryDirectory() as folder:
        accelerator = get_accelerator()
        like = torch.empty(0)
        handle = AsyncIOHandle(4096, 4, engine="python")
        one, other, back = (handle.new_cpu_locked_tensor(NUMEL, like) for _ in range(3))
        one.fill_(1.0)
        handle.sync_pwrite(one, f"{folder}/one")
        one.copy_(torch.full((NUMEL,), 2.0), non_blocking=True)
        accelerator.current_stream().synchronize()
        other.fill_(3.0)
        handle.async_pwrite(one, f"{folder}/one")
        handle.async_pwrite(other, f"{folder}/other")
        handle.wait()
        handle.async_pread(back, f"{folder}/one")
        handle.async_pread(one, f"{folder}/other")
        handle.wait()
        torch.empty(NUMEL).copy_(back, non_blocking=True)
        with FastFileWriter(f"{folder}/two", FastFileWriterConfig(handle, other)) as writer:
            writer.write(bytes(5 * NUMEL))
        accelerator.current_stream().synchronize()
        handle.sync_pread(back, f"{folder}/two", NUMEL)
    return found


SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "streams: state in files, 1 rank": partial(state_in_files, 2, "bf16"),
    "streams: fp32 state in files, 1 rank": partial(state_in_files, 3, "fp32"),
    "streams: state in files ahead, 1 rank": partial(state_in_files, 2, "bf16", is_early=True),
    "streams: fp32 state in files ahead, 1 rank": partial(state_in_files, 3, "fp32", is_early=True),
    "streams: state in files, sizes as they are": default_sizes,
    "streams: files by handles, 1 rank": by_handles,
}
