"""A disk that is full: ext4 of a few MiB, which a loop device has."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import deepspeed
from deepspeed.checkpoint.files import CheckpointError
from unit.common import DistributedTest
from unit.v1.offload.test_nvme_offload import same, start, state_of, step

SIZE = 16 << 20
# A rank's masters and moments are some 113,000 bytes.
ROOM_FOR_ONE = 170_000


def run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """Mounts a new one, on rank 0 for all."""
    image, at = folder / "image", folder / "disk"
    if deepspeed.comm.get_rank() == 0:
        image.write_bytes(b"")
        os.truncate(image, SIZE)
        at.mkdir()
        if not run("mkfs.ext4", "-q", "-m", "0", str(image)) or not run(
            "mount", "-o", "loop", str(image), str(at)
        ):
            at.rmdir()
    deepspeed.comm.barrier()
    if not at.exists():
        pytest.skip("needs to mount a file system: mkfs.ext4, and root with loop devices")
    try:
        yield at
    finally:
        deepspeed.comm.barrier()
        if deepspeed.comm.get_rank() == 0:
            run("umount", "--lazy", str(at))


def fill(at: Path, left: int) -> None:
    """Leave so many bytes of the disk; on rank 0 for all."""
    if deepspeed.comm.get_rank() == 0:
        (at / "ballast").unlink(missing_ok=True)
        room = os.statvfs(at)
        with open(at / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(room.f_bavail * room.f_frsize - left, 1))
    deepspeed.comm.barrier()


class TestFullDisk(DistributedTest):
    world_size = 2

    def test_all_ranks_hear_of_it(self, tmp_path: Path) -> None:
        # Kills: a rank that had room and waits for the other; a page without room, which ends the
        # process; a save that is taken for one, or that spoils the last.
        with disk(tmp_path) as at:
            offload: dict[str, Any] = {"device": "nvme", "nvme_path": str(at / "swap")}
            fill(at, ROOM_FOR_ONE)
            with pytest.raises(OSError, match=f"No space left.*bytes.*{at}") as caught:
                step(start(2, "bf16", offload), 0)
            assert caught.value.errno == errno.ENOSPC
            del caught
            fill(at, SIZE)
            engine = start(2, "bf16", offload)
            step(engine, 0)
            engine.save_checkpoint(str(at / "saved"), tag="first")
            wanted = state_of(engine)
            fill(at, 50_000)
            with pytest.raises((OSError, CheckpointError), match=f"No space left.*{at}"):
                engine.save_checkpoint(str(at / "saved"), tag="second")
            step(engine, 3)  # what it has, it has room for
            assert not same(state_of(engine), wanted)
            path, _ = engine.load_checkpoint(str(at / "saved"))
            assert path is not None and "first" in path
            assert same(state_of(engine), wanted)
            engine.destroy()
