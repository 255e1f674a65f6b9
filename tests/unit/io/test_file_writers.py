"""Saving through `deepspeed.io`: the same bytes as a plain file's, or an error with its name."""

import errno
import io
import logging
from pathlib import Path

import pytest
import torch

from deepspeed.io import FastFileWriter, FastFileWriterConfig, MockFileWriter, PyFileWriter
from deepspeed.io.base_file_writer import BaseFileWriter
from deepspeed.ops.aio import aio_handle
from deepspeed.utils.logging import logger


def fast(path: str, double_buffer: bool = True, num: int = 1, rank: int = 0) -> FastFileWriter:
    handle = aio_handle(4096, 2, False, True, 2)
    buffer = handle.new_cpu_locked_tensor(16384 + 100, torch.empty(0, dtype=torch.uint8))
    return FastFileWriter(path, FastFileWriterConfig(handle, buffer, double_buffer, num, rank))


def writer_of(kind: str, path: Path) -> BaseFileWriter:
    return PyFileWriter(str(path)) if kind == "python" else fast(str(path), "one" not in kind)


@pytest.mark.parametrize("kind", ("fast", "fast, one buffer", "python"))
def test_files_have_the_bytes_of_a_plain_one(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"longer than what comes" * 10000)
    state = {"a": torch.arange(10001.0), "b": [torch.zeros(3, dtype=torch.int8), "text"]}
    plain = io.BytesIO()
    torch.save(state, plain, _use_new_zipfile_serialization=False)
    with writer_of(kind, path) as writer:
        torch.save(state, writer, _use_new_zipfile_serialization=False)
    assert path.read_bytes() == plain.getvalue()
    with writer_of(kind, path) as writer:
        torch.save(state, writer)
    assert torch.equal(torch.load(path)["a"], state["a"])
    # Whatever the pieces are, that come in.
    data = torch.randint(0, 256, (70001,), dtype=torch.uint8).numpy().tobytes()
    writer = writer_of(kind, path)
    for begin in range(0, len(data), 3001):
        assert writer.write(data[begin : begin + 3001]) == len(data[begin : begin + 3001])
    writer.flush()
    writer.close()
    writer.close()
    assert path.read_bytes() == data and writer.file_path() == str(path)


@pytest.mark.parametrize("num", (1, 2, 3))
def test_several_writers_share_storages_and_have_what_is_written_whole(
    num: int, tmp_path: Path
) -> None:
    # As upstream's 0.19.6: of 62,032 bytes three writers have 20,678, 20,677 and 20,677.
    values = [torch.arange(50001) % 251, torch.randn(3000), torch.arange(7)]
    tensors = [values[0].to(torch.uint8), values[1], values[2].to(torch.uint8)]
    storages = [(tensor.untyped_storage(), tensor.dtype) for tensor in tensors]
    plain = io.BytesIO()
    torch.save(tensors, plain)
    whole, parts = b"", []
    for tensor in tensors:
        whole += tensor.numel().to_bytes(8, "little") + tensor.numpy().tobytes()
    for rank in range(num):
        with fast(str(tmp_path / "saved"), num=num, rank=rank) as writer:
            torch.save(tensors, writer)
        assert (tmp_path / "saved").read_bytes() == plain.getvalue()
        with fast(str(tmp_path / "share"), num=num, rank=rank) as writer:
            writer.write(b"head")
            share = writer.save_torch_storage_object_list(storages, True)
            writer.write(b"tail")
        found = (tmp_path / "share").read_bytes()
        assert (found[:4], found[-4:], len(found)) == (b"head", b"tail", share + 8)
        parts.append(found[4:-4])
    assert b"".join(parts) == whole
    assert [len(part) for part in parts] == [-(-(62032 - rank) // num) for rank in range(num)]
    with fast(str(tmp_path / "share")) as writer:
        assert writer.save_torch_storage_object_list(storages, False) == 62008
    writer = fast("/dev/full", num=num, rank=num - 1)
    with pytest.raises(OSError, match="/dev/full"):
        writer.save_torch_storage_object_list(storages, True)
        writer.close()


@pytest.mark.parametrize("kind", (fast, PyFileWriter))
def test_a_full_disk_is_told_with_the_file(kind: type[BaseFileWriter]) -> None:
    writer = kind("/dev/full")
    with pytest.raises(OSError, match="/dev/full") as caught:
        for _ in range(3):
            writer.write(bytes(100000))
        writer.close()
    assert caught.value.errno == errno.ENOSPC and "bytes are to be written" in str(caught.value)


def test_what_only_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "file")
    writer = MockFileWriter(path)
    logger.propagate = True
    with caplog.at_level(logging.INFO, logger.name):
        with writer:
            assert writer.write(bytes(100)) == 100 and writer.fileno() == -1
    logger.propagate = False
    assert not Path(path).exists()
    assert f"{path}: " in caplog.text and "'bytes': 100" in caplog.text


def test_what_is_refused(tmp_path: Path) -> None:
    path, handle = str(tmp_path / "file"), aio_handle()
    with pytest.raises(ValueError, match="writer_rank=2 of num_parallel_writers=2: ranks are 0 to"):
        FastFileWriter(path, FastFileWriterConfig(handle, torch.zeros(9999), True, 2, 2))
    with pytest.raises(ValueError, match="pinned_tensor has 5000 bytes; at least 8192"):
        FastFileWriter(path, FastFileWriterConfig(handle, torch.zeros(1250)))
    writer = fast(path)
    writer.close()
    with pytest.raises(ValueError, match="the writer is closed"):
        writer.write(b"1")
