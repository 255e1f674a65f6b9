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
from deepspeed.checkpoint.files import read_file
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

from .runs import BF16, Call, differences, loaded, refused, start, train, zero

PAGE = mmap.PAGESIZE
DIRECT = WriteOptions(2 * PAGE, num_buffers=1, direct=True)

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
        tensors = [value for value in state_dict.values() if isinstance(value, torch.Tensor)]
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
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

    def test_every_writer_and_a_clients_engine_save_the_same(self, tmp_path: Path) -> None:
        """Kills: a file or tensor left out or read by no loader, a file without its checksum."""
        for stage in (0, 1):
            self.save_and_load(tmp_path / f"stage{stage}", stage)

    def save_and_load(self, folder: Path, stage: int) -> None:
        base = {**BF16, **zero(stage)}
        engine = start(**base)
        train(engine, 1)
        for name, writer in {**self.writers, "client": None}.items():
            engine._config.tree.checkpoint = CheckpointConfig(writer=writer)
            engine._checkpoints._writer = None
            if name == "client":
                engine.checkpoint_engine = Pickled()
            engine.save_checkpoint(folder, tag=name)
        if dist.get_rank() == 0:
            calls = engine.checkpoint_engine.calls
            assert (calls[0], calls[-1]) == ("create client", "commit")
            assert "mp_rank_00_model_states.pt" in calls
        unbroken = train(engine, 1)
        for name in (*self.writers, "client"):
            other = start(seed=2, **base)
            if name == "client":
                with refused("cannot be read"):
                    other.load_checkpoint(folder, tag=name)
                other.checkpoint_engine = Pickled()
            other.load_checkpoint(folder, tag=name)
            assert differences(unbroken, train(other, 1)) == [], name
        # At another stage all state is found by name.
        others = (loaded(folder, tag=name, **BF16, **zero(1 - stage)) for name in ("none", "dcp"))
        assert differences(*(train(other, 1) for other in others)) == []

    def test_an_engine_that_fails_to_commit(self, tmp_path: Path) -> None:
        """Kills: a checkpoint published although the engine says that it is not complete."""

        class Torn(Pickled):
            def commit(self, info: CheckpointCommitInfo) -> bool | None:
                return dist.get_rank() == 0

        engine = start()
        engine.checkpoint_engine = Torn()
        with refused(r"rank 1: CheckpointError: Torn\.commit\(\) says that .* is not complete"):
            engine.save_checkpoint(tmp_path, tag="t")
        dist.barrier()
        assert os.listdir(tmp_path) == []
        kind = "checkpoint_engine: dict is no .*CheckpointEngine; derive it from that"
        with pytest.raises(TypeError, match=kind):
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
    some = flat[17:20_017]
    odd = flat.view(100, -1).t()
    content = {**CONTENT, "large": large, "view": some, "again": some.view(-1), "odd": odd}
    crc = torch.serialization.get_crc32_options()
    record = write_file(path, content, options)
    assert record == FileRecord(os.path.getsize(path), file_checksum(path))
    assert torch.serialization.get_crc32_options() == crc
    found = torch.load(path, weights_only=True)
    assert differences(content, found) == []
    assert found["view"].data_ptr() == found["again"].data_ptr()
    assert os.path.getsize(path) < 4 * (30_000 + 600_000 + 20_000 + 100_000) + 10_000
    assert differences(content, read_file(path, mmap=True)) == []
    assert zipfile.is_zipfile(path) == options.zip_format


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_full_device_is_told_as_such(options: WriteOptions) -> None:
    """Kills: torch's zip writer hiding the error, an error of a thread that is lost."""
    with pytest.raises(OSError, match="No space left on device"):
        write_file("/dev/full", CONTENT, options)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
@pytest.mark.parametrize("no_system", ["", "open", "write"])
@pytest.mark.parametrize("size", [0, 1, PAGE - 1, 2 * PAGE, 5 * PAGE + 1])
def test_a_file_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, no_system: str
) -> None:
    """Kills: a tail that no device takes, a system that cannot, a file with an old buffer's end."""
    opened, written, system_open, system_write = [], [], os.open, os.write

    def is_direct(file: int) -> bool:
        return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)

    def seen_open(path: Any, flags: int, *mode: int) -> int:
        opened.append(bool(flags & os.O_DIRECT))
        if opened[-1] and no_system == "open":
            raise OSError(errno.EINVAL, "refused")
        return system_open(path, flags, *mode)

    def seen_write(file: int, data: memoryview) -> int:
        written.append((len(data), is_direct(file)))
        if no_system == "write" and is_direct(file):
            raise OSError(errno.EINVAL, "refused")
        return system_write(file, data)

    content = bytes(range(256)) * (size // 256 + 1)
    for last in (b"b" * 3 * PAGE, content[:size]):  # the second has the first's buffer
        monkeypatch.setattr(os, "open", seen_open)
        monkeypatch.setattr(os, "write", seen_write)
        with FileWriter(str(tmp_path / "x"), DIRECT) as file:
            half = len(last) // 2
            file.write(last[:half])
            file.write(last[half:])
            record = file.finish()
        monkeypatch.undo()
        assert (tmp_path / "x").read_bytes() == last
        assert record == FileRecord(len(last), file_checksum(str(tmp_path / "x")))
    assert opened[0]
    assert no_system == "write" or all(count % PAGE == 0 for count, direct in written if direct)


def test_files_past_the_page_cache_share_no_buffer_while_they_are_written(tmp_path: Path) -> None:
    """Kills: one buffer for all files, and one that a process forked later shares."""
    with FileWriter(str(tmp_path / "a"), DIRECT) as first:
        first.write(b"a" * 100)
        with FileWriter(str(tmp_path / "b"), DIRECT) as second:
            second.write(b"b" * 100)
            second.finish()
        first.finish()
    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(wait, 1)
        with FileWriter(str(tmp_path / "c"), DIRECT) as forked:
            forked.write(b"c" * 100)
            os._exit(0)
    with FileWriter(str(tmp_path / "d"), DIRECT) as last:
        last.write(b"d" * 100)
        os.write(go, b"!")
        assert os.waitpid(child, 0)[1] == 0
        last.finish()
    os.close(wait)
    os.close(go)
    assert all((tmp_path / name).read_text() == name * 100 for name in "abd")


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
    writer = {"decoupled": True, "io_buffer_size": 1e6}
    decoupled = make_checkpoint_engine(CheckpointConfig(writer=writer))
    assert isinstance(decoupled, DecoupledCheckpointEngine)
    assert isinstance(decoupled.inner, FastCheckpointEngine)
    options = WriteOptions(1_000_000, num_buffers=1, direct=True, crc32=False)
    assert decoupled.inner.options == options
    old = make_checkpoint_engine(CheckpointConfig(checkpoint_serialization=False))
    assert isinstance(old, TorchCheckpointEngine) and not old.options.zip_format


def test_the_interface_is_upstreams(tmp_path: Path) -> None:
    """What upstream 0.19.6's TorchCheckpointEngine answers."""
    engine, info = TorchCheckpointEngine(), CheckpointCommitInfo("t", str(tmp_path), True)
    engine.makedirs(str(tmp_path), exist_ok=True)
    assert engine.get_commit_info() is None
    assert engine.preserves_storage_sharing() and not engine.is_decoupled()
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
    files = {"x.pt", "x.dcp/.metadata", "x.dcp/__0_0.distcp"}
    assert {os.path.relpath(name, tmp_path) for name in records} == files
    for name, record in records.items():
        assert record == FileRecord(os.path.getsize(name), file_checksum(name))
    found = read_file(path)
    assert differences(content, found) == []
    assert found["tied"][0] is found["tied"][1]
    whole = {"['module']['a']": torch.empty(100, 300)}
    torch.distributed.checkpoint.load(whole, checkpoint_id=str(tmp_path / "x.dcp"))
    assert torch.equal(whole["['module']['a']"], CONTENT["module"]["a"])


def test_getattr_and_code_in_a_folder_of_dcp(tmp_path: Path) -> None:
    """Kills: a folder of Python 3.11.2, which gets members of enums, or of 3.13, whose paths have
    another name, refused; what else getattr gets; an unpickler without a list, bytes in a tensor's
    place, which DCP would unpickle.
    """
    path, ran = str(tmp_path / "x.pt"), tmp_path / "ran"
    dcp_files.write_dcp(path, CONTENT)
    metadata, part = (tmp_path / "x.dcp" / name for name in (".metadata", "__0_0.distcp"))
    good, evil = metadata.read_bytes(), Call(open, str(ran), "w")
    known, kinds = pickle.loads(good), torch.distributed.checkpoint.metadata
    enum = kinds._MEM_FORMAT_ENCODING
    named = pickle.dumps(known, 2).replace(b"cpathlib\n", b"cpathlib._local\n")
    assert b"cpathlib._local\n" in named
    metadata.write_bytes(named)
    assert str(read_file(path)) == str(CONTENT)
    for called, said in (
        (Call(getattr, enum, "TORCH_PRESERVE_FORMAT"), f"holds {enum.__name__}, no metadata"),
        (Call(getattr, enum, "__doc__"), "no member of an enum"),
        (Call(getattr, torch.Size, "numel"), "no member of an enum"),
        (evil, r"x\.pt .*cannot be read: _?io\.open is no class of DCP's metadata"),
    ):
        metadata.write_bytes(pickle.dumps(called))
        with refused(said):
            read_file(path)
    known.state_dict_metadata["['module']['a']"] = kinds.BytesStorageMetadata()
    metadata.write_bytes(pickle.dumps(known))
    part.write_bytes(pickle.dumps(evil))
    with refused(r"has no tensor \['module'\]\['a'\]"):
        read_file(path)
    metadata.write_bytes(good)
    torch.save(evil, tmp_path / "evil.pt")
    part.write_bytes((tmp_path / "evil.pt").read_bytes().ljust(200_000, b"\0"))
    with refused("cannot be read"):
        read_file(path)
    assert not ran.exists()
