"""The scripts of the docs' pages train on two processes and leave a checkpoint."""

import re
from pathlib import Path

import pytest
from unit.clients.launching import run_ranks

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "launcher", "tag", "files"),
    [
        ("../README.md", "torchrun", "global_step160", ["mp_rank_00_model_states.pt"]),
        ("getting-started.md", None, "global_step96", ["mp_rank_00_model_states.pt"]),
        (
            "pipeline.md",
            None,
            "global_step96",
            ["layer_00-model_states.pt", "layer_04-model_states.pt", "mp_rank_01_model_states.pt"],
        ),
        (
            "moe.md",
            None,
            "global_step48",
            [
                "layer_0_expert_0_mp_rank_00_model_states.pt",
                "layer_0_expert_3_mp_rank_00_model_states.pt",
            ],
        ),
    ],
)
def test_the_script_trains(
    tmp_path: Path, page: str, launcher: str | None, tag: str, files: list[str]
) -> None:
    # Kills: a page whose script no longer runs, or (as a pipeline's first and last stage with
    # different data would) does not learn.
    script = tmp_path / "train.py"
    script.write_text(
        re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)[0]
    )
    said = run_ranks(script, tmp_path, launcher=launcher)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) >= 3 and losses[-1] < losses[0] / 2
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == tag
    assert all((tmp_path / "checkpoints" / tag / name).is_file() for name in files)
