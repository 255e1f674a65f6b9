"""A full disk and a read-only one: a small file system mounted where only the test sees it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unit.common import get_master_port
from unit.launcher import forked

from . import disk_run


def test_full_and_read_only_disks(tmp_path: Path) -> None:
    """Kills: a rank going on alone, an older checkpoint or state changed by a failed save."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        command = ["unshare", "-m", *disk_run.MOUNT, str(folder)]
        possible = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("nothing can be mounted here: it takes unshare, and to be root")
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": get_master_port()}
    ranks = forked.start(
        [sys.executable, disk_run.__file__, str(folder)],
        {**os.environ, **world, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        restore_signals=False,  # as a program of Python begins
    )
    told, _ = ranks.communicate(timeout=150)
    assert (ranks.returncode, told.count("all held")) == (0, 2), told
