"""Files to tensors and back by `deepspeed.ops.aio`: every byte or an error, by each engine."""

import ctypes
import errno
import os
import resource
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from deepspeed.ops import aio
from deepspeed.ops.aio import engines, handle
from deepspeed.ops.aio.engines import DONE, ENGINES, Alignment, How, Transfer, choose_engine
from deepspeed.ops.op_builder import AsyncIOBuilder
from unit.v1.offload.test_nvme_offload import open_below

BLOCK = 8192
SIZES = (0, 1, 511, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 7 * BLOCK, 9 * BLOCK + 4321)
OFFSETS = (0, 1, 512, 4096, BLOCK + 77)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    builder = AsyncIOBuilder()
    if name != "python" and not builder.is_compatible():
        pytest.skip(str(builder.error_log))
    try:
        choose_engine(name)
    except ValueError as error:
        if name != "io_uring":
            raise  # it can be compiled here, so it has to be there
        pytest.skip(str(error))
    return name


def make(engine: str, parallelism: int = 2, overlap: bool = True) -> aio.AsyncIOHandle:
    return aio.aio_handle(BLOCK, 3, not overlap, overlap, parallelism, engine=engine)


def bytes_of(seed: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def in_memory(tensor: torch.Tensor, shift: int) -> torch.Tensor:
    """The same in memory that begins `shift` bytes after a page does; -1: wherever torch has it."""
    if shift < 0:
        return tensor.clone()
    return aio.new_cpu_locked_tensor(tensor.numel() + shift, tensor)[shift:].copy_(tensor)


@pytest.mark.parametrize("parallelism, overlap", [(1, True), (3, False)])
@pytest.mark.parametrize("shift", (0, 1, -1))
def test_all_sizes_and_offsets_come_back_and_nothing_else_changes(
    engine: str, parallelism: int, overlap: bool, shift: int, tmp_path: Path
) -> None:
    io, path = make(engine, parallelism, overlap), tmp_path / "file"
    before = bytes_of(1, 12 * BLOCK)
    for size in SIZES:
        for offset in OFFSETS:
            path.write_bytes(before.numpy().tobytes())
            values = bytes_of(size, size)
            assert io.sync_pwrite(in_memory(values, shift), str(path), offset) == 1
            expected = before.clone()
            expected[offset : offset + size] = values
            assert path.read_bytes() == expected.numpy().tobytes(), (size, offset)
            found = in_memory(torch.zeros_like(values), shift)
            assert io.sync_pread(found, str(path), offset) == 1
            assert torch.equal(found, values), (size, offset)


def test_what_upstreams_calls_return(engine: str, tmp_path: Path) -> None:
    io, path = make(engine), str(tmp_path / "file")
    sizes = (io.get_block_size(), io.get_queue_depth(), io.get_intra_op_parallelism())
    assert sizes == (BLOCK, 3, 2)
    assert (io.get_single_submit(), io.get_overlap_events(), io.get_engine()) == (
        False,
        True,
        engine,
    )
    values = bytes_of(3, 1000).view(torch.bfloat16).view(5, 100)
    found = torch.empty_like(values)
    assert io.write(values, path, True) == io.read(found, path, True, 0) == 0
    assert io.pwrite(values, path, False, False) == io.pread(found, path, True, False, 0) == 1
    assert io.async_pwrite(values, path) == io.async_pwrite(values, path, 5000) == 0
    assert io.wait() == 2 and io.wait() == 0
    with open(path, "r+b") as file:  # by its descriptor, which stays open
        assert io.async_pwrite(values, file.fileno(), 1000) == 0 and io.wait() == 1
        assert io.sync_pread(found, file.fileno(), 1000) == 1
        assert file.read() == Path(path).read_bytes()
    assert torch.equal(found.view(torch.int16), values.view(torch.int16))
    assert aio.aio_write(values, path, BLOCK, 3, False, True, True) == 0
    assert aio.aio_read(found, path, BLOCK, 3, False, True, True) == 0
    with mock.patch.object(handle, "_compare", side_effect=OSError(errno.EIO, "seen")):
        with pytest.raises(OSError, match="seen"):
            io.read(found, path, True)


def refused(call: Callable[[], object], code: int, *said: str) -> None:
    with pytest.raises(OSError) as caught:
        call()
    assert caught.value.errno == code, caught.value
    assert [text for text in said if text not in str(caught.value)] == [], caught.value


def test_no_page_is_written_past_the_cache_and_by_way_of_it(tmp_path: Path) -> None:
    # Kills: the half of a page that the cache has, written over the other half on the disk. Where
    # that may have happened the kernel says so at the next fsync.
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 16))
    handles = [aio.aio_handle(4096, 4, intra_op_parallelism=2) for _ in range(2)]
    pieces = torch.arange(1 << 16, dtype=torch.int32).view(torch.uint8)[: 1 << 16].split(6000)
    with open(path, "r+b") as file:
        for _ in range(20):
            for number, piece in enumerate(pieces):
                handle = handles[number % 2]
                handle.wait()
                handle.async_pwrite(piece, str(path), 6000 * number)
            for handle in handles:
                handle.wait()
            os.fsync(file.fileno())
    assert path.read_bytes() == torch.cat(pieces).numpy().tobytes()


def test_errors_name_the_file_and_come_once(engine: str, tmp_path: Path) -> None:
    io, path = make(engine), str(tmp_path / "file")
    values = bytes_of(4, 5 * BLOCK)
    refused(lambda: io.sync_pread(values, path), errno.ENOENT, path)
    io.sync_pwrite(values[:5000], path)
    # Truncated, between blocks of the disk and behind them.
    told = "the file ends at byte 5,000", "40,960 bytes are to be read from byte 0"
    refused(lambda: io.sync_pread(values.clone(), path), errno.ENODATA, path, *told)
    refused(lambda: io.sync_pread(values.clone(), path, 1 << 20), errno.ENODATA, path)
    # A disk that is full, one that is too small for it, and one that cannot be read.
    told = "40,960 bytes are to be written"
    refused(lambda: io.sync_pwrite(values, "/dev/full"), errno.ENOSPC, "/dev/full", told)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * BLOCK + 100, hard))
    try:
        refused(lambda: io.sync_pwrite(values, path), errno.EFBIG, path, told)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    refused(lambda: io.sync_pread(values.clone(), "/proc/self/mem"), errno.EIO, "/proc/self/mem")
    with open("/proc/self/mem", "rb") as memory:
        call = lambda: io.sync_pread(values.clone(), memory.fileno())  # noqa: E731
        refused(call, errno.EIO, "/proc/", "/mem")
    # Of those under way the first error is raised, when all have ended, and once.
    found = torch.zeros(5000, dtype=torch.uint8)
    io.sync_pwrite(values[:5000], path)
    io.async_pread(values.clone(), path)
    io.async_pwrite(values, "/dev/full")
    io.async_pread(found, path)
    refused(io.wait, errno.ENODATA, path)
    assert torch.equal(found, values[:5000]) and io.wait() == 0
    for _ in range(3):
        refused(lambda: io.sync_pread(values.clone(), path), errno.ENODATA)
    assert open_below(tmp_path) == 0


def test_short_reads_are_completed(engine: str) -> None:
    # A file of the kernel's that gives a page at a time.
    path, size = "/proc/kallsyms", 10 * BLOCK + 100
    expected = Path(path).read_bytes()[:size]
    with open(path, "rb", buffering=0) as file:
        if len(expected) < size or len(file.read(size)) == size:
            pytest.skip("this kernel's file is not read in parts")
    found = torch.zeros(size, dtype=torch.uint8)
    make(engine, 1).sync_pread(found, path)
    assert found.numpy().tobytes() == expected


def test_other_threads_of_python_run_meanwhile(engine: str, tmp_path: Path) -> None:
    path, size = tmp_path / "file", 64 << 20
    path.touch()
    os.truncate(path, size)
    found, ticks, is_over = torch.empty(size, dtype=torch.uint8), 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not is_over.is_set():
            ticks += 1
            time.sleep(0)

    interval, file = sys.getswitchinterval(), os.open(path, os.O_RDONLY)
    # Nobody is interrupted: others run when this thread lets them.
    sys.setswitchinterval(1000)
    counter = threading.Thread(target=tick)
    try:
        counter.start()
        before = ticks
        plain = file, file, False, found.data_ptr(), size, 0, Alignment(1, 1)
        assert choose_engine(engine).run(Transfer(*plain), How(size, 1)) == DONE
        assert ticks > before
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        counter.join()
        os.close(file)


def test_several_handles_in_several_threads(engine: str, tmp_path: Path) -> None:
    shared = make(engine, 2)

    def work(number: int) -> bool:
        io, path = (shared if number % 2 else make(engine)), str(tmp_path / str(number))
        for turn in range(4):
            values = bytes_of(100 * number + turn, (5 + number) * BLOCK + number)
            found = torch.zeros_like(values)
            io.async_pwrite(values, path)
            io.wait()
            while os.path.getsize(path) < values.nbytes:  # of a shared handle others wait too
                time.sleep(0.001)
            io.sync_pread(found, path)
            if io is not shared and not torch.equal(found, values):
                return False
            io.sync_pwrite(values, path)
            io.sync_pread(found, path)
            if not torch.equal(found, values):
                return False
        return True

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))


def forbid_io_uring() -> None:
    """As containers do: its system calls fail in this process, for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[os.uname().machine]
    load, equal, give = 0x20, 0x15, 0x06
    refuse, allow = 0x00050000 | errno.EPERM, 0x7FFF0000
    program = [
        *((load, 0, 0, 4), (equal, 0, 3, architecture), (load, 0, 0, 0)),
        *((equal, 0, 1, 425), (give, 0, 0, refuse), (give, 0, 0, allow)),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
    assert libc.prctl(22, 2, filters, 0, 0) == 0, os.strerror(ctypes.get_errno())


def test_a_forked_process_that_may_not_use_io_uring(engine: str, tmp_path: Path) -> None:
    io, path = make(engine), str(tmp_path / "file")
    values = bytes_of(5, 5 * BLOCK + 5)
    io.sync_pwrite(values, path)
    child = os.fork()
    if not child:
        try:
            forbid_io_uring()
            if engine == "io_uring":
                assert choose_engine().name == "threads", "what is forbidden is chosen"
                with pytest.raises(ValueError, match="Operation not permitted.*use 'threads'"):
                    choose_engine("io_uring")
            # A handle of before has threads and a ring of the parent's.
            found = torch.zeros_like(values)
            io.sync_pread(found, path)
            assert torch.equal(found, values), "other bytes"
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    for _ in range(1000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        status = -1
    assert status == 0
    io.sync_pread(values, path)


@pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="no large pages here"
)
def test_memory_wants_large_pages() -> None:
    # Kills: requests of a thousand pages each, which a disk gets in parts (half the speed).
    tensor = aio.new_cpu_locked_tensor(1 << 22, torch.empty(0, dtype=torch.uint8))
    at, is_inside, flags = tensor.data_ptr(), False, []
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split()[0]
            if "-" in first:
                start, end = (int(address, 16) for address in first.split("-"))
                is_inside = start <= at < end
            elif is_inside and first == "VmFlags:":
                flags = line.split()
    assert "hg" in flags


def test_memory_for_transfers() -> None:
    io = aio.aio_handle()
    tensor = io.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.float16))
    assert (tensor.shape, tensor.dtype) == ((1000,), torch.float16)
    assert tensor.data_ptr() % 4096 == 0 and io.is_pinned(tensor)
    assert io.new_cpu_locked_tensor(0, tensor).numel() == 0
    assert not io.free_cpu_locked_tensor(torch.zeros(3)) and not io.is_pinned(torch.zeros(3))
    assert io.free_cpu_locked_tensor(tensor) and tensor.numel() == 0
    assert not io.free_cpu_locked_tensor(tensor)
    source, copy = torch.arange(9.0), torch.zeros(9)
    assert aio.deepspeed_memcpy(copy, source) == 0 and torch.equal(copy, source)


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    io, path = aio.aio_handle(engine="python"), str(tmp_path / "file")
    with pytest.raises(ValueError, match=r"strides \(1, 3\); call .contiguous"):
        io.sync_pwrite(torch.zeros(3, 3).t(), path)
    with pytest.raises(ValueError, match="file_offset=-1; it is 0 or more"):
        io.sync_pread(torch.zeros(3), path, -1)
    with pytest.raises(ValueError, match="queue_depth=0; it is 1 or more"):
        aio.aio_handle(queue_depth=0)
    with pytest.raises(ValueError, match="engine 'libaio' is unknown; use one of io_uring"):
        aio.aio_handle(engine="libaio")
    with mock.patch.object(engines, "native_op", lambda *_: None):
        assert choose_engine().name == "python"
        with pytest.raises(ValueError, match="needs a C\\+\\+ compiler; use 'python'"):
            choose_engine("threads")
