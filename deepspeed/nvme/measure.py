"""The `ds_io` command: how fast tensors go to files of a folder, or come from there.

Owns: its options (upstream's), one measurement by several processes, and what is said of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.io.fast_file_writer import FastFileWriter, FastFileWriterConfig
from deepspeed.ops.aio.engines import ENGINES
from deepspeed.ops.aio.handle import AsyncIOHandle

WAYS = ("aio_handle", "aio_basic", "torch_io", "torch_fastio")
GB = 1 << 30
_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Task(NamedTuple):
    """What each process does: upstream's options, with sizes in bytes."""

    folders: tuple[str, ...]
    io_size: int
    read: bool = False
    block_size: int = 1 << 20
    queue_depth: int = 32
    single_submit: bool = False
    sequential_requests: bool = False
    io_parallel: int = 1
    loops: int = 3
    warmup_loops: int = 1
    engine: str = "aio_handle"
    io_engine: str | None = None
    fast_io_size: int = 64 << 20
    validate: bool = False
    gpu: bool = False
    devices: tuple[int, ...] = ()
    use_accelerator_pin_memory: bool = False
    torch_legacy_save: bool = False
    different_file_each_iteration: bool = False
    include_warmup_time: bool = False

    @property
    def verb(self) -> str:
        return "Read" if self.read else "Write"


class Speed(NamedTuple):
    """Of all processes together: bytes per second of the slowest, and from first to last."""

    task: float
    end_to_end: float
    engine: str


def size_of(text: str) -> int:
    """Read a size as `1048576`, `1024K`, `1M` or `1G`.

    Raises:
        argparse.ArgumentTypeError: it is none, or not above 0.
    """
    number, factor = text.strip().upper().removesuffix("B"), 1
    if number[-1:] in _SUFFIXES:
        number, factor = number[:-1], _SUFFIXES[number[-1]]
    if not number.isdigit() or not int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; use e.g. 1048576, 512K, 1M or 1G")
    return int(number) * factor


def measure(task: Task) -> Speed:
    """Run the task in one process for each folder, side by side, and remove its files.

    Raises:
        OSError: of the disk, with the file named.
    """
    if len(task.folders) == 1:
        seconds, begin, end, engine = _run(task, 0, lambda: None)
        spans, slowest = [(begin, end)], seconds
    else:
        # A device does not outlive a fork.
        context = multiprocessing.get_context("spawn" if task.gpu else "fork")
        barrier = context.Barrier(len(task.folders))
        with ProcessPoolExecutor(len(task.folders), context, _keep, (barrier,)) as processes:
            each = [processes.submit(_run_beside, task, tid) for tid in range(len(task.folders))]
            runs = [one.result() for one in each]
        spans, slowest = [(run[1], run[2]) for run in runs], max(run[0] for run in runs)
        engine = runs[0][3]
    moved = task.io_size * len(task.folders) * (task.loops + task.include_warmup_time)
    elapsed = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return Speed(moved / slowest, moved / elapsed, engine)


_barrier: Any = None


def _keep(barrier: Any) -> None:
    global _barrier
    _barrier = barrier
    torch.set_num_threads(1)  # OpenMP's others do not outlive a fork either


def _run_beside(task: Task, tid: int) -> tuple[float, float, float, str]:
    try:
        return _run(task, tid, lambda: _barrier.wait(600))
    except BaseException:
        _barrier.abort()  # nobody waits for this one
        raise


def _run(task: Task, tid: int, meet: Callable[[], object]) -> tuple[float, float, float, str]:
    """Return seconds of work, when it began and ended, and what moved the bytes."""
    verb = task.verb.lower()
    stem = os.path.join(task.folders[tid], f"_aio_{verb}_{task.io_size}.pt.{tid}_")
    rounds = task.loops + task.warmup_loops
    paths = [f"{stem}{turn * task.different_file_each_iteration}" for turn in range(rounds)]
    overlap = not task.sequential_requests
    handle = AsyncIOHandle(
        *(task.block_size, task.queue_depth, task.single_submit, overlap, task.io_parallel),
        engine=task.io_engine,
    )
    buffer = _buffer(task, tid, handle)
    move = _mover(task, handle, buffer)
    try:
        if task.read:
            for path in dict.fromkeys(paths):
                _mover(task._replace(read=False), handle, buffer)(path)
        seconds, began = 0.0, 0.0
        for turn, path in enumerate(paths):
            meet()
            start = time.monotonic()
            move(path)
            ended = time.monotonic()
            if turn >= task.warmup_loops or task.include_warmup_time:
                seconds, began = seconds + ended - start, began or start
        return seconds, began, ended, handle.get_engine()
    finally:
        for path in set(paths):
            if os.path.exists(path):
                os.remove(path)


def _buffer(task: Task, tid: int, handle: AsyncIOHandle) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8)
    if task.gpu:
        device = get_accelerator().device_name(task.devices[tid] if task.devices else tid)
        return torch.ones(task.io_size, dtype=torch.uint8, device=device)
    if task.use_accelerator_pin_memory:
        return get_accelerator().pin_memory(torch.ones(task.io_size, dtype=torch.uint8))
    return handle.new_cpu_locked_tensor(task.io_size, empty).fill_(1)


def _mover(task: Task, handle: AsyncIOHandle, buffer: torch.Tensor) -> Callable[[str], object]:
    def save(path: str, file: Any) -> None:
        with file:
            torch.save(buffer, file, _use_new_zipfile_serialization=not task.torch_legacy_save)
            if task.engine == "torch_io":
                file.flush()
                os.fsync(file.fileno())

    if task.engine.startswith("torch"):
        if task.read:
            return lambda path: torch.load(path, map_location=buffer.device, weights_only=True)
        if task.engine == "torch_io":
            return lambda path: save(path, open(path, "wb"))
        staging = handle.new_cpu_locked_tensor(task.fast_io_size, torch.empty(0, dtype=torch.uint8))
        config = FastFileWriterConfig(handle, staging)
        return lambda path: save(path, FastFileWriter(path, config))
    if task.engine == "aio_basic":
        call = handle.read if task.read else handle.write
        return lambda path: call(buffer, path, task.validate)
    parallel = handle.pread if task.read else handle.pwrite
    return lambda path: parallel(buffer, path, task.validate, False)


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `ds_io` and `ds_nvme_tune` have in common."""
    parser.add_argument("--gpu", action="store_true", help="to and from the device's memory")
    text = f"what moves the bytes: {', '.join(ENGINES)} (default: the first that works here)"
    parser.add_argument("--io_engine", choices=ENGINES, help=text)


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = argparse.ArgumentParser(prog="ds_io", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--folder", help="folder for the files, which are removed")
    text = "FOLDER:DEVICE of each process, in place of --folder and --multi_process"
    add("--folder_to_device_mapping", nargs="+", default=[], help=text)
    add("--io_size", type=size_of, required=True, help="bytes of a file (K, M, G)")
    add("--fast_io_size", type=size_of, default=64 << 20, help="buffer of torch_fastio")
    add("--read", action="store_true", help="read (default: write)")
    add("--multi_process", type=int, default=1, help="processes side by side")
    add("--block_size", type=size_of, default=1 << 20, help="bytes of one request (1M)")
    add("--queue_depth", type=int, default=32, help="requests in flight")
    add("--single_submit", action="store_true", help="hand requests over one by one")
    text = "begin no request before the batch before it is complete"
    add("--sequential_requests", action="store_true", help=text)
    add("--validate", action="store_true", help="compare what was moved, in the time measured")
    add("--engine", choices=WAYS, default=WAYS[0], help="what is called")
    add("--loops", type=int, default=3, help="how often it is measured")
    add("--io_parallel", type=int, default=1, help="threads that share a transfer")
    add("--torch_legacy_save", action="store_true", help="torch's format of before 1.6")
    add("--use_accelerator_pin_memory", action="store_true", help="memory by the accelerator")
    add("--warmup_loops", type=int, default=1, help="how often before that")
    add("--include_warmup_time", action="store_true", help="count those too")
    add("--different_file_each_iteration", action="store_true", help="a file for each time")
    add("--use_gds", action="store_true", help="refused: not in this release")
    add("--slow_bounce_buffer", action="store_true", help="refused: what --gpu does anyway")
    add_shared_options(parser)
    return parser


def _task_of(options: argparse.Namespace) -> Task:
    """Raises ValueError for what does not fit together."""
    if options.use_gds:
        raise ValueError("--use_gds: GPUDirect Storage is not in this release; leave it out")
    if options.slow_bounce_buffer:
        raise ValueError("--slow_bounce_buffer: --gpu goes by fresh host memory; leave it out")
    if bool(options.folder) == bool(options.folder_to_device_mapping):
        raise ValueError("give --folder or --folder_to_device_mapping")
    pairs = [pair.rpartition(":") for pair in options.folder_to_device_mapping]
    wrong = [pair for pair in pairs if not pair[0] or not pair[2].isdigit()]
    if wrong:
        given = "".join(wrong[0])
        raise ValueError(f"--folder_to_device_mapping {given}: use FOLDER:DEVICE, e.g. /nvme0:0")
    folders = [pair[0] for pair in pairs] or [options.folder] * options.multi_process
    missing = [folder for folder in folders if not os.path.isdir(folder)]
    if missing:
        raise ValueError(f"there is no folder {missing[0]}")
    counts = {name: getattr(options, name) for name in ("loops", "multi_process", "warmup_loops")}
    low = [name for name, count in counts.items() if count < (name != "warmup_loops")]
    if low:
        raise ValueError(f"--{low[0]} {counts[low[0]]} is too few")
    own = {name: getattr(options, name) for name in Task._fields if hasattr(options, name)}
    return Task(folders=tuple(folders), devices=tuple(int(pair[2]) for pair in pairs), **own)


def ds_io_main(args: Sequence[str] | None = None) -> int:
    """Run the command; return 2, with one line on stderr, if it cannot be measured."""
    try:
        task = _task_of(parser().parse_args(args))
        speed = measure(task)
    except (BrokenProcessPool, OSError, ValueError) as error:
        sys.stderr.write(f"ds_io: error: {error}\n")
        return 2
    moved = task.io_size * len(task.folders) * (task.loops + task.include_warmup_time)
    lines = [f"{task.engine} by {speed.engine}, {len(task.folders)} process(es)"]
    for name, rate in (("Task", speed.task), ("E2E", speed.end_to_end)):
        lines.append(f"{name} {task.verb} Latency = {moved / rate} sec")
        lines.append(f"{name} {task.verb} Speed = {rate / GB} GB/sec")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
