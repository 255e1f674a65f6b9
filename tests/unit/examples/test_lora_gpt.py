"""The LoRA example as users run it: what it saves at stage 3 is what one process loads."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_adapters_are_whole(tmp_path: Path) -> None:
    # Kills: adapters saved as shards or from one rank's copy, a base that was trained too.
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 400)
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
        + [str(ROOT / "examples" / "lora_gpt.py"), "--data", str(text)]
        + ["--out", "adapters", "--steps", "4"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"windows: (.*) before, (.*) after, (.*) in one process", done.stdout)
    assert found is not None, done.stdout
    before, after, alone = map(float, found.groups())
    assert after < before - 0.1
    assert alone == pytest.approx(after, abs=2e-4)  # printed with four digits
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()
