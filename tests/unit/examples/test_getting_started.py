"""The script of docs/getting-started.md, as it stands there, trains on two processes and leaves a checkpoint."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT = 120


@pytest.mark.slow
def test_the_script_trains(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "getting-started.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3 and losses[-1] < losses[0] / 2
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step96"
