"""The campaign `starts`: a share of what it does, and that it sees what it looks for."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unit.comm.starts import verdict

ROOT = Path(__file__).resolve().parents[3]


def test_forked_and_spawned_ranks_start_and_end() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "unit.comm.starts", "--rounds", "2", "--load", "0", "--seed", "4"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "seed 4\n2 of 2 ended well\n", done.stdout + done.stderr


ENDS = {
    "": "",
    "codes [3, 0]": "import sys; sys.exit(3)",
    "terminate called": "print('terminate called without an active exception')",
    # Kills: stacks that nobody takes, or that of a rank that is given up only.
    "File": "import faulthandler, time; from signal import *; faulthandler.register(SIGUSR1); "
    "pthread_sigmask(SIG_UNBLOCK, {SIGUSR1}); time.sleep(600)",
}


@pytest.mark.parametrize("told", ENDS)
def test_what_is_not_well_is_told(tmp_path: Path, told: str) -> None:
    pids = []
    for rank, code in enumerate((ENDS[told], "")):
        output = os.open(tmp_path / f"rank{rank}.out", os.O_WRONLY | os.O_CREAT)
        both = [(os.POSIX_SPAWN_DUP2, output, descriptor) for descriptor in (1, 2)]
        words = [sys.executable, "-c", code]
        # Blocked until it is registered.
        pids.append(
            os.posix_spawn(
                sys.executable, words, os.environ, file_actions=both, setsigmask=[signal.SIGUSR1]
            )
        )
        os.close(output)
    said = verdict(pids, tmp_path, limit_s=0.3 if told == "File" else 60.0)
    assert told in said and bool(said) is bool(told)
