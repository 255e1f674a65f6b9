"""Checkpoint engines: each writes the same checkpoint; a client's own is used for every file."""

import errno
import fcntl
import mmap
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import dcp_files
from deepspeed.checkpoint.file_writer import FileRecord, FileWriter, WriteOptions, file_checksum
from deepspeed.checkpoint.files import CheckpointError, read_file
from deepspeed.checkpoint.torch_files import write_file
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from deepspeed.runtime.checkpoint_engine.dcp_checkpoint_engine import DcpCheckpointEngine
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
    DecoupledCheckpointEngine,
)
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.utils import make_checkpoint_engine
from deepspeed.runtime.config_models.training import CheckpointConfig
from unit.common import DistributedTest

from .runs import config, differences, start, train

CONTENT = {
    "module": {
        "a": torch.arange(30_000).float().view(100, 300),
        "b": torch.ones(3).bfloat16(),
        "empty": torch.empty(0, 2),
    },
    "list": [torch.tensor(3), ("x", 1.5, None)],
    "set": {1, 2},
}


class Pickled(CheckpointEngine):
    """A client's engine with a format of its own, which records who called what."""

    calls: list[str]

    def create(self, info: CheckpointCommitInfo) -> None:
        self.calls = [f"create {info.tag}"]
        assert self.get_commit_info() == info

    def save(self, state_dict: Any, path: str) -> None:
        assert all(
            t.untyped_storage().nbytes() == t.nbytes
            for t in state_dict.values()
            if isinstance(t, torch.Tensor)
        )
        self.calls.append(os.path.basename(path))
        Path(path).write_bytes(b"mine" + pickle.dumps(state_dict))

    def load(self, path: str, map_location: Any = None) -> Any:
        return pickle.loads(Path(path).read_bytes()[4:])

    def commit(self, info: CheckpointCommitInfo) -> bool | None:
        self.calls.append("commit")
        return True


class TestSaving(DistributedTest):
    world_size = 2
    writers: dict[str, Any] = {
        "none": None,
        "torch": {"type": "torch", "io_buffer_size": 4096, "show_statistics": True},
        "fast": {"type": "FAST", "io_buffer_size": 8192, "io_buffer_double": False},
        "dcp": {"type": "dcp"},
        "dcp in the background": {"type": "dcp", "decoupled": True},
    }

    def test_every_writer_and_a_clients_engine_save_the_same(self, tmpdir: Any) -> None:
        """Kills: a file or tensor left out or read by no loader, a file without its checksum."""
        for stage in (0, 1):
            self.save_and_load(Path(str(tmpdir), f"stage{stage}"), stage)

    def save_and_load(self, folder: Path, stage: int) -> None:
        base = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        engine = start(config(**base))
        train(engine, 1)
        for name, writer in {**self.writers, "client": None}.items():
            engine._config.tree.checkpoint = CheckpointConfig(writer=writer)
            engine._checkpoints._writer = None
            if name == "client":
                engine.checkpoint_engine = Pickled()
            engine.save_checkpoint(str(folder), tag=name)
        if dist.get_rank() == 0:
            assert (
                engine.checkpoint_engine.calls[0] == "create client"
                and engine.checkpoint_engine.calls[-1] == "commit"
            )
            assert "mp_rank_00_model_states.pt" in engine.checkpoint_engine.calls
        unbroken = train(engine, 1)
        for name in (*self.writers, "client"):
            other = start(config(**base), seed=2)
            if name == "client":
                with pytest.raises(CheckpointError, match="cannot be read"):
                    other.load_checkpoint(str(folder), tag=name)
                other.checkpoint_engine = Pickled()
            other.load_checkpoint(str(folder), tag=name)
            assert differences(unbroken, train(other, 1)) == [], name
        # At another stage all state is found by name.
        resharded = []
        for name in ("none", "dcp"):
            other = start(config(**{**base, "zero_optimization": {"stage": 1 - stage}}), seed=2)
            other.load_checkpoint(str(folder), tag=name)
            resharded.append(train(other, 1))
        assert differences(*resharded) == []

    def test_an_engine_that_fails_to_commit(self, tmpdir: Any) -> None:
        """Kills: a checkpoint published although the engine says that it is not complete."""

        class Torn(Pickled):
            def commit(self, info: CheckpointCommitInfo) -> bool | None:
                return dist.get_rank() == 0

        engine = start(config())
        engine.checkpoint_engine = Torn()
        with pytest.raises(
            CheckpointError,
            match=r"rank 1: CheckpointError: Torn\.commit\(\) says that .* is not complete",
        ):
            engine.save_checkpoint(str(tmpdir), tag="t")
        dist.barrier()
        assert os.listdir(str(tmpdir)) == []
        with pytest.raises(
            TypeError, match="checkpoint_engine: dict is no .*CheckpointEngine; derive it from that"
        ):
            engine.checkpoint_engine = {}


OPTIONS = [
    WriteOptions(),
    WriteOptions(buffer_bytes=5000),
    WriteOptions(buffer_bytes=4096, num_buffers=1),
    WriteOptions(buffer_bytes=8192, crc32=False),
    WriteOptions(num_buffers=1, crc32=False),
    WriteOptions(num_buffers=1, direct=True),
    WriteOptions(buffer_bytes=5000, num_buffers=1, direct=True, crc32=False),
    WriteOptions(zip_format=False),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_file_and_what_is_known_of_it(tmp_path: Path, options: WriteOptions) -> None:
    """Kills: a checksum of other bytes or order, a tail or buffer not written, buffers of views."""
    path = str(tmp_path / "x.pt")
    flat = torch.arange(100_000).float()
    large = torch.arange(600_000).float()  # of those that are written from where they are
    content = {
        **CONTENT,
        "large": large,
        "view": flat[17:20_017],
        "again": flat[17:20_017],
        "odd": flat.view(100, -1).t(),
    }
    crc = torch.serialization.get_crc32_options()
    assert write_file(path, content, options) == FileRecord(
        os.path.getsize(path), file_checksum(path)
    )
    assert torch.serialization.get_crc32_options() == crc
    loaded = torch.load(path, weights_only=True)
    assert differences(content, loaded) == []
    assert loaded["view"].data_ptr() == loaded["again"].data_ptr()
    assert os.path.getsize(path) < 4 * (30_000 + 600_000 + 20_000 + 100_000) + 10_000
    assert differences(content, read_file(path, mmap=True)) == []
    assert zipfile.is_zipfile(path) == options.zip_format


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_full_device_is_told_as_such(options: WriteOptions) -> None:
    """Kills: torch's zip writer hiding the error, an error of a thread that is lost."""
    with pytest.raises(OSError, match="No space left on device"):
        write_file("/dev/full", CONTENT, options)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
@pytest.mark.parametrize("refused", ["", "open", "write"])
@pytest.mark.parametrize(
    "size", [0, 1, mmap.PAGESIZE - 1, 2 * mmap.PAGESIZE, 5 * mmap.PAGESIZE + 1]
)
def test_a_file_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, refused: str
) -> None:
    """Kills: a tail that no device takes, a system that cannot, a file with an old buffer's end."""
    opened, written, system_open, system_write = [], [], os.open, os.write

    def is_direct(file: int) -> bool:
        return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)

    def seen_open(path: Any, flags: int, *mode: int) -> int:
        opened.append(bool(flags & os.O_DIRECT))
        if opened[-1] and refused == "open":
            raise OSError(errno.EINVAL, "refused")
        return system_open(path, flags, *mode)

    def seen_write(file: int, data: memoryview) -> int:
        written.append((len(data), is_direct(file)))
        if refused == "write" and is_direct(file):
            raise OSError(errno.EINVAL, "refused")
        return system_write(file, data)

    content = bytes(range(256)) * (size // 256 + 1)
    for last in (b"b" * 3 * mmap.PAGESIZE, content[:size]):  # the second has the first's buffer
        monkeypatch.setattr(os, "open", seen_open)
        monkeypatch.setattr(os, "write", seen_write)
        with FileWriter(
            str(tmp_path / "x"), WriteOptions(2 * mmap.PAGESIZE, num_buffers=1, direct=True)
        ) as file:
            half = len(last) // 2
            file.write(last[:half])
            file.write(last[half:])
            record = file.finish()
        monkeypatch.undo()
        assert (tmp_path / "x").read_bytes() == last
        assert record == FileRecord(len(last), file_checksum(str(tmp_path / "x")))
    assert opened[0]
    assert refused == "write" or all(
        count % mmap.PAGESIZE == 0 for count, direct in written if direct
    )


def test_files_past_the_page_cache_share_no_buffer_while_they_are_written(tmp_path: Path) -> None:
    """Kills: one buffer for all files, and one that a process forked later shares."""
    options = WriteOptions(2 * mmap.PAGESIZE, num_buffers=1, direct=True)
    with FileWriter(str(tmp_path / "a"), options) as first:
        first.write(b"a" * 100)
        with FileWriter(str(tmp_path / "b"), options) as second:
            second.write(b"b" * 100)
            second.finish()
        first.finish()
    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(wait, 1)
        with FileWriter(str(tmp_path / "c"), options) as forked:
            forked.write(b"c" * 100)
            os._exit(0)
    with FileWriter(str(tmp_path / "d"), options) as last:
        last.write(b"d" * 100)
        os.write(go, b"!")
        assert os.waitpid(child, 0)[1] == 0
        last.finish()
    os.close(wait)
    os.close(go)
    assert [(tmp_path / name).read_bytes() for name in "abd"] == [
        letter * 100 for letter in (b"a", b"b", b"d")
    ]


def test_the_writer_flushes_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: no fsync."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with FileWriter(str(tmp_path / "x"), WriteOptions()) as file:
        file.write(b"abc")
        file.finish()
        assert synced == [file._file]


def test_the_configuration_chooses() -> None:
    kinds = {
        "torch": TorchCheckpointEngine,
        "python": TorchCheckpointEngine,
        "Fast": FastCheckpointEngine,
        "dcp": DcpCheckpointEngine,
    }
    for name, kind in kinds.items():
        assert type(make_checkpoint_engine(CheckpointConfig(writer={"type": name}))) is kind
    assert type(make_checkpoint_engine(CheckpointConfig())) is TorchCheckpointEngine
    assert type(make_checkpoint_engine(CheckpointConfig(writer={}))) is FastCheckpointEngine
    decoupled = make_checkpoint_engine(
        CheckpointConfig(writer={"decoupled": True, "io_buffer_size": 1e6})
    )
    assert isinstance(decoupled, DecoupledCheckpointEngine) and isinstance(
        decoupled.inner, FastCheckpointEngine
    )
    assert decoupled.inner.options == WriteOptions(
        1_000_000, num_buffers=1, direct=True, crc32=False
    )
    old = make_checkpoint_engine(CheckpointConfig(checkpoint_serialization=False))
    assert isinstance(old, TorchCheckpointEngine) and not old.options.zip_format


def test_the_interface_is_upstreams(tmp_path: Path) -> None:
    """What upstream 0.19.6's TorchCheckpointEngine answers."""
    engine, info = TorchCheckpointEngine(), CheckpointCommitInfo("t", str(tmp_path), True)
    engine.makedirs(str(tmp_path), exist_ok=True)
    assert (
        engine.get_commit_info(),
        engine.is_decoupled(),
        engine.preserves_storage_sharing(),
    ) == (None, False, True)
    assert (engine.is_data_parallel_writer(0), engine.is_data_parallel_writer(1)) == (True, False)
    engine.create(info)
    engine.save({"a": 1}, str(tmp_path / "x.pt"))
    assert engine.load(str(tmp_path / "x.pt")) == {"a": 1}
    assert CheckpointEngine.__abstractmethods__ == {"create", "save", "load", "commit"}


def test_tensors_are_readable_by_dcp_and_tied_ones_stay_tied(tmp_path: Path) -> None:
    path = str(tmp_path / "x.pt")
    tied = torch.randn(2, 3)
    content = {**CONTENT, "tied": [tied, tied]}
    records = dcp_files.write_dcp(path, content)
    assert {os.path.relpath(name, tmp_path) for name in records} == {
        "x.pt",
        "x.dcp/.metadata",
        "x.dcp/__0_0.distcp",
    }
    assert all(
        record == FileRecord(os.path.getsize(name), file_checksum(name))
        for name, record in records.items()
    )
    loaded = read_file(path)
    assert differences(content, loaded) == []
    assert loaded["tied"][0] is loaded["tied"][1]
    whole = {"['module']['a']": torch.empty(100, 300)}
    torch.distributed.checkpoint.load(whole, checkpoint_id=str(tmp_path / "x.dcp"))
    assert torch.equal(whole["['module']['a']"], CONTENT["module"]["a"])


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


class Got:
    """Pickled as Python 3.11.2 pickles a member of an enum."""

    def __init__(self, kind: Any, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> Any:
        return getattr, (self.kind, self.name)


def test_getattr_in_a_folder_of_dcp_is_for_members_of_enums(tmp_path: Path) -> None:
    """Kills: a folder that Python 3.11.2 has written, refused; anything else that getattr gets."""
    formats = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    path = tmp_path / "x.pt"
    dcp_files.write_dcp(str(path), CONTENT)
    metadata = tmp_path / "x.dcp" / ".metadata"
    for got, said in (
        (Got(formats, "TORCH_PRESERVE_FORMAT"), "holds _MEM_FORMAT_ENCODING, no metadata"),
        (Got(formats, "__doc__"), "no member of an enum"),
        (Got(torch.Size, "numel"), "no member of an enum"),
    ):
        metadata.write_bytes(pickle.dumps(got))
        with pytest.raises(CheckpointError, match=said):
            read_file(str(path))


def test_code_in_a_folder_of_dcp_is_refused(tmp_path: Path) -> None:
    """Kills: an unpickler without a list, bytes in a tensor's place, which DCP would unpickle."""
    path, ran = tmp_path / "x.pt", tmp_path / "ran"
    dcp_files.write_dcp(str(path), CONTENT)
    metadata = tmp_path / "x.dcp" / ".metadata"
    good = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps(Evil(ran)))
    with pytest.raises(
        CheckpointError, match=r"x\.pt .*cannot be read: _?io\.open is no class of DCP's metadata"
    ):
        read_file(str(path))
    known = pickle.loads(good)
    known.state_dict_metadata["['module']['a']"] = (
        torch.distributed.checkpoint.metadata.BytesStorageMetadata()
    )
    metadata.write_bytes(pickle.dumps(known))
    part = tmp_path / "x.dcp" / "__0_0.distcp"
    part.write_bytes(pickle.dumps(Evil(ran)))
    with pytest.raises(CheckpointError, match=r"has no tensor \['module'\]\['a'\]"):
        read_file(str(path))
    metadata.write_bytes(good)
    evil = tmp_path / "evil.pt"
    torch.save(Evil(ran), evil)
    part.write_bytes(evil.read_bytes().ljust(200_000, b"\0"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_file(str(path))
    assert not ran.exists()
