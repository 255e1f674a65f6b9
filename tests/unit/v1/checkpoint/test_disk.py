"""A full disk and a read-only one, for real: a small file system mounted where only the test sees
it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unit.common import get_master_port

MOUNT = "mount -t tmpfs -o size=1m none {folder}"


def unshared(script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a mount namespace of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["unshare", "-m", "sh", "-ec", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)


def test_full_and_read_only_disks(tmp_path: Path) -> None:
    """Kills: a rank that goes on alone, an older checkpoint or `latest` that is changed, state that
    a failed save changes.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        possible = unshared(MOUNT.format(folder=folder)).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("nothing can be mounted here: it takes unshare, and to be root")
    ranks = " ".join(
        f"RANK={rank} LOCAL_RANK={rank} {sys.executable} {Path(__file__).with_name('disk_run.py')} "
        f"{folder} & pid{rank}=$!;"
        for rank in range(2)
    )
    run = (
        f"export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={get_master_port()}; {ranks} wait "
        "$pid0; wait $pid1"
    )
    done = unshared(f"{MOUNT.format(folder=folder)}; {run}")
    assert (done.returncode, done.stdout.count("all held")) == (0, 2), done.stdout + done.stderr
