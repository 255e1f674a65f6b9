"""Two ranks that save into a folder whose disk is full, then read-only; `test_crashes` starts them.

Run as ``python disk_run.py FOLDER``: mounts a small file system there, which only the two see.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.runtime.checkpointing.background_save import finish_saves, in_flight
from unit.v1.checkpoint.runs import config, differences, look, start, train

MOUNT = ("mount", "-t", "tmpfs", "-o", "size=1m", "none")
NEW_MOUNTS = 0x20000  # CLONE_NEWNS of Linux
ROOM_BYTES = 16384  # less than a rank's files


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def on_first(action: Any) -> None:
    """Do it on rank 0, between two barriers."""
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def fill(path: Path) -> None:
    """Leave `ROOM_BYTES` of the disk."""
    disk = os.statvfs(path.parent)
    path.write_bytes(bytes(disk.f_bavail * disk.f_frsize - ROOM_BYTES))


def refused(engine: Any, folder: Path, reason: str) -> list[dict[str, Any]]:
    """Save, which fails on every rank with a reason of this pattern; returns what was seen."""
    seen: list[dict[str, Any]] = []
    try:
        engine.save_checkpoint(str(folder), tag="next")
        for save in in_flight:
            save.join()
        seen = train(engine, 1)
    except CheckpointError as error:
        assert re.search(reason, str(error)), error
        return seen or [look(engine)]
    raise AssertionError("the save has not failed")


def main(folder: Path) -> None:
    deepspeed.init_distributed()
    for writer in ({"type": "torch"}, {"type": "fast", "decoupled": True}, {"type": "dcp"}):
        keys = {"zero_optimization": {"stage": 1}, "checkpoint": {"writer": writer}}
        unbroken = train(start(config(**keys)), 4)
        engine = start(config(**keys))
        train(engine, 1)
        engine.save_checkpoint(str(folder), tag="good")
        finish_saves(engine.device)
        dist.barrier()
        before = contents(folder)
        on_first(lambda: fill(folder / "filler"))
        refused(engine, folder, r"No space left on device: [\d,]+ bytes .* free: '\S+next\S+'")
        on_first((folder / "filler").unlink)
        assert contents(folder) == before, writer
        on_first(lambda: subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True))
        refused(engine, folder, "Read-only file system")
        on_first(lambda: subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True))
        assert contents(folder) == before, writer
        train(engine, 4 - engine.global_steps)
        last = {
            key: value for key, value in unbroken[-1].items() if key not in ("losses", "norm", "lr")
        }
        assert differences(last, look(engine)) == [], writer
        engine.save_checkpoint(str(folder), tag="next")
        other = start(config(**keys), seed=2)
        other.load_checkpoint(str(folder), tag="good")
        assert differences(unbroken[1:2], train(other, 1)) == [], writer
        on_first(
            lambda: [
                subprocess.run(["rm", "-r", str(folder / name)], check=True)
                for name in os.listdir(folder)
            ]
        )
    print("all held")


if __name__ == "__main__":
    if ctypes.CDLL(None).unshare(NEW_MOUNTS):
        raise OSError("unshare: no mounts of its own")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run([*MOUNT, sys.argv[1]], check=True)
    other = os.fork()
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(int(other == 0))))
    main(Path(sys.argv[1]))
    if other and os.waitpid(other, 0)[1]:
        sys.exit("rank 1 has failed")
