"""Two ranks that save into a folder whose disk is full, then read-only; `test_crashes` starts them.

Run as ``python disk_run.py FOLDER``: mounts a small file system there, which only the two see.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.checkpointing.background_save import finish_saves, in_flight
from unit.v1.checkpoint import runs
from unit.v1.checkpoint.runs import contents, differences, on_rank_0, start, train

MOUNT = ("mount", "-t", "tmpfs", "-o", "size=1m", "none")
NEW_MOUNTS = 0x20000  # CLONE_NEWNS of Linux
ROOM_BYTES = 16384  # less than a rank's files


def run(*command: Any) -> None:
    subprocess.run(command, check=True)


def fill(path: Path) -> None:
    """Leave `ROOM_BYTES` of the disk."""
    disk = os.statvfs(path.parent)
    path.write_bytes(bytes(disk.f_bavail * disk.f_frsize - ROOM_BYTES))


def fails(engine: Any, folder: Path, reason: str) -> None:
    """Save, which fails on every rank with a reason of this pattern, maybe at the next step."""
    with runs.refused(reason):
        engine.save_checkpoint(folder, tag="next")
        for save in in_flight:
            save.join()
        train(engine, 1)


def main(folder: Path) -> None:
    deepspeed.init_distributed()
    for writer in ({"type": "torch"}, {"type": "fast", "decoupled": True}, {"type": "dcp"}):
        keys = {**runs.zero(1), "checkpoint": {"writer": writer}}
        unbroken = train(start(**keys), 4)
        engine = runs.saved(folder, tag="good", **keys)
        finish_saves(engine.device)
        dist.barrier()
        before = contents(folder)
        on_rank_0(lambda: fill(folder / "filler"))
        fails(engine, folder, r"No space left on device: [\d,]+ bytes .* free: '\S+next\S+'")
        on_rank_0((folder / "filler").unlink)
        assert contents(folder) == before, writer
        on_rank_0(lambda: run("mount", "-o", "remount,ro", folder))
        fails(engine, folder, "Read-only file system")
        on_rank_0(lambda: run("mount", "-o", "remount,rw", folder))
        assert contents(folder) == before, writer
        train(engine, 4 - engine.global_steps)
        now = runs.look(engine)
        assert differences({key: unbroken[-1][key] for key in now}, now) == [], writer
        engine.save_checkpoint(folder, tag="next")
        other = runs.loaded(folder, tag="good", **keys)
        assert differences(unbroken[1:2], train(other, 1)) == [], writer
        on_rank_0(lambda: run("rm", "-r", *folder.iterdir()))
    print("all held")


if __name__ == "__main__":
    if ctypes.CDLL(None).unshare(NEW_MOUNTS):
        raise OSError("unshare: no mounts of its own")
    run("mount", "--make-rprivate", "/")
    run(*MOUNT, sys.argv[1])
    other = os.fork()
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(int(other == 0))))
    main(Path(sys.argv[1]))
    if other and os.waitpid(other, 0)[1]:
        sys.exit("rank 1 has failed")
