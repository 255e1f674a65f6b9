"""Masters and optimizer state in files: the bits of no files, windows that go round, errors."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.ops import state_files
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.aio.engines import How, NativeEngine, Outcome, Transfer
from deepspeed.ops.aio.handle import AsyncIOHandle
from deepspeed.ops.state_files import StateFiles
from deepspeed.runtime.sharding import publisher
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from unit.common import DistributedTest
from unit.models import config_of, drawn
from unit.one_process import mean_square, placed
from unit.v1.gathering import collectives

WIDTH = 96
# A rank's shard has some 9,400 elements: ten windows, and pieces that end in the middle of one.
WINDOW = 1024
PIECE = 1500
AIO = {"block_size": 4096, "queue_depth": 4, "intra_op_parallelism": 2}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(state_files, "WINDOW_NUMEL", WINDOW)
    yield


def start(stage: int, precision: str, offload: dict[str, Any]) -> Any:
    state_files.WINDOW_NUMEL, publisher.UPDATE_NUMEL = WINDOW, PIECE  # in this rank
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH + 1))
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
    zero = {"stage3_param_persistence_threshold": 0, "offload_optimizer": offload}
    more: dict[str, Any] = {"gradient_clipping": 0.05, "aio": AIO, "optimizer": optimizer}
    if precision == "fp16":
        more["fp16"] = {"enabled": True, "initial_scale_power": 8}
    config = config_of(stage, 4, 2, precision, zero_optimization=zero, **more)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine: Any, first: int, steps: int = 3) -> None:
    for index in range(2 * first, 2 * (first + steps)):
        x = placed(engine, drawn(10 * index + deepspeed.comm.get_rank(), 4, WIDTH))
        engine.backward(mean_square(engine, x))
        engine.step()


def state_of(engine: Any) -> list[torch.Tensor]:
    found = []
    for param in engine.module.parameters():
        found += [safe_get_full_fp32_param(param).clone()]
        for slot in ("exp_avg", "exp_avg_sq"):
            found += [safe_get_full_optimizer_state(param, slot).clone()]
    return found


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


class TestSameBits(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage, precision", [(1, "bf16"), (2, "fp16"), (3, "fp32")])
    def test_trained_edited_and_resumed(self, stage: int, precision: str, tmp_path: Path) -> None:
        # Kills: a window that is updated before it is read or goes on before it is written, a piece
        # that takes another's elements, what is edited or loaded and not in the file.
        cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path / "swap")}
        trained, resumed, counts = [], [], []
        for offload in (cpu, nvme):
            engine = start(stage, precision, offload)
            assert engine.optimizer.cpu_offload
            step(engine, 0, 2)
            param = next(engine.module.parameters())
            safe_set_full_fp32_param(param, torch.full((WIDTH, WIDTH), 0.125))
            safe_set_full_optimizer_state(param, torch.full((WIDTH, WIDTH), 0.5), "exp_avg_sq")
            with collectives() as names:
                step(engine, 2, 1)
            counts.append(len(names))
            trained.append(state_of(engine))
            engine.save_checkpoint(str(tmp_path / offload["device"]))
            engine.destroy()
        # One number says whether all disks have done their part.
        assert same(*trained) and counts[1] == counts[0] + 1
        for source, offload in (("cpu", nvme), ("nvme", cpu)):
            engine = start(stage, precision, offload)
            engine.load_checkpoint(str(tmp_path / source))
            step(engine, 3, 1)
            resumed.append(state_of(engine))
            engine.destroy()
        assert same(*resumed) and not same(trained[0], resumed[0])
        # Nothing has a name: nobody trips over it, however this ends.
        assert os.listdir(tmp_path / "swap") == []


@contextmanager
def failing(is_write: bool, skipped: int, is_cut: bool = False) -> Iterator[None]:
    """On rank 1 all transfers of one direction fail after the first `skipped`; or somebody cuts all
    files.
    """

    def run(self: Any, transfer: Transfer, how: How) -> Outcome:
        fails = transfer.is_write == is_write and next(count) >= skipped
        return Outcome(512, errno.EIO) if fails else original(self, transfer, how)

    count, original = itertools.count(), NativeEngine.run
    if deepspeed.comm.get_rank() == 0:
        yield
    elif is_cut:
        for mapping in state_files._mappings.values():
            os.truncate(mapping.file.fileno(), 4096)
        yield
    else:
        with mock.patch.object(NativeEngine, "run", run):
            yield


class TestDiskErrors(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage, precision", [(1, "bf16"), (2, "fp16"), (3, "fp32")])
    def test_all_ranks_raise_and_the_checkpoint_loads(
        self, stage: int, precision: str, tmp_path: Path
    ) -> None:
        # Kills: an error that one rank raises while the other waits for it, and what the failed
        # step leaves behind: gradients, buffers, pages of a file that are not there.
        engine = start(stage, precision, {"device": "nvme", "nvme_path": str(tmp_path / "swap")})
        step(engine, 0, 1)
        engine.save_checkpoint(str(tmp_path / "saved"))
        step(engine, 1, 2)
        wanted = state_of(engine)
        is_mine = deepspeed.comm.get_rank() == 1
        for fault, code, reason in (
            # In the midst of a pass over windows.
            (failing(False, 12), errno.EIO, "Input/output error: .* bytes are to be read from"),
            (failing(False, 0, True), errno.ENODATA, "the file ends at byte 4,096: .* to be read"),
            (files_of_at_most(8192), errno.EFBIG, "File too large: .* to be written"),
        ):
            with fault if is_mine else nullcontext():
                with pytest.raises(OSError, match=f"{reason}.*rank 1.*{tmp_path}/swap") as caught:
                    step(engine, 3, 1)
            assert caught.value.errno == code
            engine.load_checkpoint(str(tmp_path / "saved"))
            step(engine, 1, 2)
            assert same(state_of(engine), wanted), reason
        engine.destroy()
        with files_of_at_most(8192) if is_mine else nullcontext():
            with pytest.raises(OSError, match="File too large: .*rank 1.*swap/state"):
                start(stage, precision, {"device": "nvme", "nvme_path": str(tmp_path / "swap")})


class TestAlone(DistributedTest):
    world_size = 1

    def test_what_is_refused(self, tmpdir: Any) -> None:
        told = r"offload_optimizer.device: 'nvme' needs nvme_path, a folder on the disk: add it"
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=told):
            start(2, "bf16", {"device": "nvme"})
        model = nn.Linear(3, 3)
        offload = {"device": "nvme", "nvme_path": str(tmpdir)}
        config = config_of(2, 4, 2, "bf16", zero_optimization={"offload_optimizer": offload})
        config["zero_force_ds_cpu_optimizer"] = False
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told = (
            'device: "nvme" with SGD, whose state is not updated piece by piece: use "cpu", or Deep'
        )
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=told):
            deepspeed.initialize(model=model, optimizer=optimizer, config=config)


def windows_of(files: StateFiles, numel: int) -> tuple[DeepSpeedCPUAdam, nn.Parameter]:
    param = nn.Parameter(files.zeros(numel, torch.float32))
    param.data.copy_(torch.arange(float(numel)))
    optimizer = DeepSpeedCPUAdam([param], lr=0.1)
    optimizer.state_files = files
    return optimizer, param


def test_state_lies_in_files_and_is_read_ahead(tmp_path: Path) -> None:
    seen: list[str] = []

    class Seen(AsyncIOHandle):
        def async_pread(self, *args: Any) -> int:
            seen.append("read")
            return super().async_pread(*args)

        def async_pwrite(self, *args: Any) -> int:
            seen.append("write")
            return super().async_pwrite(*args)

    files = StateFiles(str(tmp_path / "new"), lambda: Seen(4096, 4))
    optimizer, param = windows_of(files, 3 * WINDOW + 5)
    plain = nn.Parameter(param.detach().clone())
    other = DeepSpeedCPUAdam([plain], lr=0.1)
    for turn in range(3):
        param.grad = torch.randn(3 * WINDOW + 5)
        plain.grad = param.grad.clone()
        optimizer.step()
        other.step()
        assert torch.equal(param, plain), turn
    assert all(files.holds(optimizer.state[param][slot]) for slot in ("exp_avg", "exp_avg_sq"))
    # Of each window but the last, the next is read before it is written; masters through memory.
    reads, writes = ["read"] * 3, ["write"] * 2
    assert seen[: len(seen) // 3] == [
        *reads,
        *reads,
        *writes,
        *reads,
        *writes,
        *reads,
        *writes,
        *writes,
    ]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def open_below(folder: Path) -> int:
    """Descriptors that this process has of files of a folder."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(one).startswith(str(folder)) for one in links if os.path.islink(one))


def test_files_go_with_their_last_tensor(tmp_path: Path) -> None:
    # Kills: files that tensors share and that stay as long as the process, in a circle through
    # their own memory.
    files = StateFiles(str(tmp_path), lambda: AsyncIOHandle(4096, 4))
    one, other = (files.zeros(5000, torch.float32, shares=True) for _ in range(2))
    other.copy_(torch.arange(5000.0))
    assert state_files.file_of(one) == state_files.file_of(other)
    del one, files
    gc.collect()
    assert open_below(tmp_path) > 0
    assert torch.equal(other, torch.arange(5000.0))
    del other
    gc.collect()
    assert open_below(tmp_path) == 0


def test_errors_of_the_disk(tmp_path: Path) -> None:
    files = StateFiles(str(tmp_path), lambda: AsyncIOHandle(4096, 4))
    told = "8,192 bytes are to be written"
    with files_of_at_most(4096), pytest.raises(OSError, match=told) as caught:
        files.zeros(2000, torch.float32)
    assert str(tmp_path) in str(caught.value.filename)
    optimizer, param = windows_of(files, 3 * WINDOW)
    param.grad = torch.ones(3 * WINDOW)
    optimizer.step()
    # A file that somebody cuts, and one that cannot be written.
    state = optimizer.state[param]["exp_avg"]
    os.truncate(state_files._mappings[state.data_ptr()].file.fileno(), 4096)
    with pytest.raises(OSError, match=f"the file ends at byte 4,096.*{tmp_path}"):
        optimizer.step()
    optimizer, param = windows_of(files, 3 * WINDOW)
    param.grad = torch.ones(3 * WINDOW)
    optimizer.step()
    with files_of_at_most(4096), pytest.raises(OSError, match="are to be written") as caught:
        optimizer.step()
    assert caught.value.errno == errno.EFBIG and str(tmp_path) in str(caught.value.filename)
