"""The configuration reference is what the models say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_current():
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate_config_reference.py"), "--check"],
        cwd=ROOT,
        capture_output=True,
    )
    assert done.returncode == 0, (
        "docs/config-reference.md is not current; run: python "
        f"docs/generate_config_reference.py\n{done.stderr.decode()}"
    )


def test_the_page_lists_every_key_of_the_most_used_blocks():
    page = (ROOT / "docs" / "config-reference.md").read_text(encoding="utf-8")
    for key in (
        "train_batch_size",
        "reduce_bucket_size",
        "loss_scale_window",
        "immediate_grad_update",
        "grad_accum_dtype",
    ):
        assert f"| `{key}` |" in page
    assert "| `reduce_bucket_size` | size | `500000000` |" in page
