"""The scripts of the docs' pages, as they stand there, train on two processes and leave a
checkpoint.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT = 120


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "tag", "files"),
    [
        ("../README.md", "global_step160", ["mp_rank_00_model_states.pt"]),
        ("getting-started.md", "global_step96", ["mp_rank_00_model_states.pt"]),
        (
            "pipeline.md",
            "global_step96",
            ["layer_00-model_states.pt", "layer_04-model_states.pt", "mp_rank_01_model_states.pt"],
        ),
        (
            "moe.md",
            "global_step48",
            [
                "layer_0_expert_0_mp_rank_00_model_states.pt",
                "layer_0_expert_3_mp_rank_00_model_states.pt",
            ],
        ),
    ],
)
def test_the_script_trains(tmp_path: Path, page: str, tag: str, files: list[str]) -> None:
    # Kills: a page whose script no longer runs, or (as a pipeline's first and last stage with
    # different data would) does not learn.
    script = tmp_path / "train.py"
    script.write_text(
        re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)[0]
    )
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", str(script)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) >= 3 and losses[-1] < losses[0] / 2
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == tag
    assert all((tmp_path / "checkpoints" / tag / name).is_file() for name in files)
