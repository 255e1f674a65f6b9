"""The stream checker and files: what is a race with a read or write under way, and what is none."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from deepspeed.accelerator import file_trace, get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.ops.aio.handle import AsyncIOHandle
from deepspeed.verify import check_streams

NUMEL = 2048


class Script:
    """What scripts have: two handles, two page-locked buffers, a tensor of the device, a file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.io, self.other = (AsyncIOHandle(4096, 4, engine="python") for _ in range(2))
        like = torch.empty(0)
        self.a, self.b = (self.io.new_cpu_locked_tensor(NUMEL, like).zero_() for _ in range(2))
        self.on_device = torch.zeros(NUMEL)
        self.io.sync_pwrite(self.a, file)
        get_accelerator().synchronize()


class Case(NamedTuple):
    """A script, and what the checker says of it; nothing if it is right."""

    run: Callable[[Script], object]
    says: str = ""


def steps(*calls: Callable[[Script], object]) -> Callable[[Script], object]:
    return lambda script: [call(script) for call in calls]


def read(script: Script) -> object:
    return script.io.async_pread(script.a, script.file)


def write(script: Script) -> object:
    return script.io.async_pwrite(script.a, script.file)


def wait(script: Script) -> object:
    return script.io.wait()


def to_device(script: Script) -> object:
    return script.on_device.copy_(script.a, non_blocking=True)


def from_device(script: Script) -> object:
    return script.a.copy_(script.on_device, non_blocking=True)


def by_descriptor(script: Script) -> object:
    opened = os.open(script.file, os.O_RDONLY)
    return script.other.async_pread(script.b, opened), os.close(opened)


HOST = r"the host never waits for <file lane \d+>, which {} bytes 0..8192 of storage"
FILE = r"<file lane \d+> never waits for <file lane \d+>, which {} bytes {}..8192 of file .*/file"
CASES = {
    "the host looks at a buffer that is being read": Case(
        steps(read, lambda s: s.a.sum()), HOST.format("wrote")
    ),
    "the host fills a buffer that is being written": Case(
        steps(write, lambda s: s.a.fill_(1.0)), HOST.format("read")
    ),
    "the host looks at a buffer that is being written": Case(steps(write, lambda s: s.a.sum())),
    "a buffer goes to the device while it is being read": Case(
        steps(read, to_device), "<default stream> never waits for <file lane"
    ),
    "it goes when it is read": Case(steps(read, wait, to_device)),
    "a buffer is written that the device has not filled": Case(
        steps(from_device, write), "<file lane .* never waits for <default stream>, which wrote"
    ),
    "the device fills a buffer that is being written": Case(
        steps(write, from_device), "<default stream> never waits for <file lane.*which read"
    ),
    "a wait for the whole device is none for a file": Case(
        steps(write, lambda s: get_accelerator().synchronize(), from_device),
        "<default stream> never waits for <file lane.*which read",
    ),
    "a wait for the device, and then a write": Case(
        steps(from_device, lambda s: get_accelerator().synchronize(), write)
    ),
    "a file is read whose write is under way": Case(
        steps(write, lambda s: s.other.async_pread(s.b, s.file, 0)), FILE.format("wrote", 0)
    ),
    "the same file by a descriptor": Case(steps(write, by_descriptor), FILE.format("wrote", 0)),
    "parts of writes overlap": Case(
        steps(write, lambda s: s.other.async_pwrite(s.b, s.file, 4096)), FILE.format("wrote", 4096)
    ),
    "a file is written whose read is under way": Case(
        steps(read, lambda s: s.other.async_pwrite(s.b, s.file)), FILE.format("read", 0)
    ),
    "parts of writes lie beside each other": Case(
        steps(write, lambda s: s.other.async_pwrite(s.b, s.file, 8192))
    ),
    "a wait of another handle is none": Case(
        steps(write, lambda s: s.other.wait(), lambda s: s.a.fill_(1.0)), HOST.format("read")
    ),
    "two reads need no order": Case(steps(read, lambda s: s.other.async_pread(s.b, s.file))),
}


def test_files_and_buffers(tmp_path: Path) -> None:
    wrong = []
    for number, (name, case) in enumerate(CASES.items()):
        os.mkdir(tmp_path / str(number))
        with simulate(seed=0):
            script = Script(str(tmp_path / str(number) / "file"))
            with check_streams(raises=False) as found:
                case.run(script)
                script.io.wait(), script.other.wait()
        said = found.report()
        right = re.search(case.says, said) and __file__ in said if case.says else not found.findings
        wrong += [] if right else [f"{name}: {said}"]
    assert not wrong, "\n\n".join(wrong)
    assert file_trace.active is None
