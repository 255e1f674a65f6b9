"""Saved inputs in files: gradients, few buffers, reads ahead, errors that name the file."""

import errno
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.runtime.activation_checkpointing.test_in_engine import (
    INPUT,
    KINDS,
    LAYERS,
    NUMEL,
    TORCHS,
    direct,
    sines,
)
from unit.v1.offload.test_nvme_offload import files_of_at_most, open_below

from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.ops import state_files
from deepspeed.ops.state_files import place_in_file
from deepspeed.runtime.activation_checkpointing import checkpointing, saved_inputs, settings
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.zero.gathering import shard_files
from deepspeed.verify import check_streams

CALLS = {**KINDS, **TORCHS}


def to_files(folder: Path, **more: Any) -> None:
    block = {"cpu_checkpointing": True, "nvme_path": str(folder), **more}
    checkpointing.configure(None, {"train_batch_size": 1, "activation_checkpointing": block})


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = settings._current, settings._is_configured
    yield
    settings._current, settings._is_configured = before


def gradient(call: Callable[..., Any]) -> torch.Tensor:
    """Of two passes, a graph dropped while its inputs come back, and one that is retained."""
    x = torch.linspace(1, 2, NUMEL).requires_grad_()
    for _ in range(2):
        sines(x, call).sum().backward()
    dropped, kept = sines(x * 3, call), sines(x * 2, call)
    kept.sum().backward()
    del dropped, kept
    again = (sines(x, call) + sines(x * 5, call)).sum()  # in all places there are
    again.backward(retain_graph=True)
    again.backward()
    assert x.grad is not None
    return x.grad.clone()


@pytest.mark.parametrize("kind", CALLS)
def test_on_a_simulated_device(kind: str, tmp_path: Path) -> None:
    # Kills: a buffer that is written before it is filled or filled before it is written; a file
    # that is read before it is written, or written while it is read for a graph that is gone;
    # inputs that stay in memory, here or there; reads that begin when they are waited for.
    wanted, clock = gradient(direct), itertools.count()
    begun: list[int] = []
    waits: list[int] = []
    wanted_at: list[int] = []

    def noted(method: Any, when: list[int]) -> Any:
        return lambda *args: (when.append(next(clock)), method(*args))[1]

    with simulate() as device, check_streams(), pytest.MonkeyPatch.context() as patch:
        to_files(tmp_path)
        found = gradient(CALLS[kind])
        for name, when in (("begin", begun), ("wait", waits)):
            patch.setattr(shard_files._Slot, name, noted(getattr(shard_files._Slot, name), when))
        unpack = saved_inputs.InputStore.unpack
        patch.setattr(saved_inputs.InputStore, "unpack", noted(unpack, wanted_at))
        x = torch.ones(NUMEL, requires_grad=True)
        gc.collect()
        device.reset_peak_memory_stats()
        before = device.memory_allocated()
        with device.count_host_waits() as forward:
            y = sines(x, CALLS[kind])
        assert (device.max_memory_allocated() - before) / INPUT <= 5
        with device.count_host_waits() as backward:
            y.sum().backward()
        locked = device.simulator.allocator.host.nbytes
        is_equal = torch.equal(found, wanted)
    assert is_equal
    # Each for a copy of two functions ago.
    assert forward.total <= LAYERS and backward.total <= LAYERS
    # Four buffers are filled and written, three are read into.
    assert locked <= 7 * (INPUT + 2 * state_files.BLOCK)
    # The two newest are in their buffers yet.
    assert len(begun) == len(waits) == LAYERS - 2
    for begin, wait in zip(begun, waits, strict=True):
        assert any(begin < other < wait for other in wanted_at)
    assert os.listdir(tmp_path) == []


def test_reset_gives_files_back(tmp_path: Path) -> None:
    to_files(tmp_path)
    x = torch.ones(NUMEL, requires_grad=True)
    sines(x, CALLS["non_reentrant"]).sum().backward()
    assert open_below(tmp_path) > 0
    checkpointing.reset()
    gc.collect()
    assert open_below(tmp_path) == 0


def test_errors_and_refusals(tmp_path: Path) -> None:
    # On a host that computes by itself. Kills: a disk that is full, or a file that somebody cut,
    # and a backward that goes on with whatever is there; an error that is told to the next graph.
    to_files(tmp_path)
    x, call = torch.linspace(1, 2, NUMEL).requires_grad_(), CALLS["torch's, non_reentrant"]
    y = sines(x, call)
    files = saved_inputs.store(whole=True)._files
    assert files is not None
    for write in files._under_way:
        write.synchronize()  # or it makes the file as long as it was
    for mapping in list(state_files._mappings.values()):
        if mapping.files is files._files:
            os.truncate(mapping.file.fileno(), state_files.BLOCK)
    with pytest.raises(OSError, match=f"the file ends at byte .*{tmp_path}/") as caught:
        y.sum().backward()
    assert caught.value.errno == errno.ENODATA
    del y, caught
    gc.collect()  # what was cut
    with files_of_at_most(2 * INPUT):
        y = sines(x, call).sum()
        moved = list(saved_inputs.store(whole=True)._moved.values())
        written = [one for one in moved if one.file.last_use is not None]
        for one in written:  # the oldest first, which are waited for again
            one.file.last_use.synchronize()
    with pytest.raises(OSError, match=f"File too large: .*to be written.*{tmp_path}/"):
        y.backward()
    starts = {one: place_in_file(one.content).start for one in written}
    failed = [starts[one] for one in written if one.file.last_use._failure is not None]
    assert set(failed) == {start for start in starts.values() if start >= 2 * INPUT}
    assert len(written) == LAYERS - 2
    del y, moved, written, starts, one
    gc.collect()  # what was not written
    x.grad = None
    sines(x, call).sum().backward()
    plain = torch.linspace(1, 2, NUMEL).requires_grad_()
    sines(plain).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, plain.grad)
    for more in ({"cpu_checkpointing": False}, {"contiguous_memory_optimization": True}):
        with pytest.raises(DeepSpeedConfigError, match="nvme_path: .* set cpu_checkpointing: true"):
            to_files(tmp_path, **more)
