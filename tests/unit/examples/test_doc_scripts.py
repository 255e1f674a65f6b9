"""The docs' scripts and the LoRA example train on two processes and leave what one loads."""

import re
from pathlib import Path

import pytest
from unit.clients.launching import need, run_ranks

ROOT = Path(__file__).resolve().parents[3]


STATES = "mp_rank_00_model_states.pt"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "launcher", "tag", "files"),
    [
        ("../README.md", "torchrun", "global_step160", [STATES]),
        ("getting-started.md", None, "global_step96", [STATES]),
        (
            "pipeline.md",
            None,
            "global_step96",
            [*(f"layer_0{n}-model_states.pt" for n in (0, 4)), "mp_rank_01_model_states.pt"],
        ),
        ("moe.md", None, "global_step48", [f"layer_0_expert_{n}_{STATES}" for n in (0, 3)]),
    ],
)
def test_the_script_trains(
    tmp_path: Path, page: str, launcher: str | None, tag: str, files: list[str]
) -> None:
    # Kills: a page whose script no longer runs, or (as a pipeline's first and last stage with
    # different data would) does not learn.
    script = tmp_path / "train.py"
    text = (ROOT / "docs" / page).read_text()
    script.write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    said = run_ranks(script, tmp_path, launcher=launcher)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) >= 3 and losses[-1] < losses[0] / 2
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == tag
    assert all((tmp_path / "checkpoints" / tag / name).is_file() for name in files)


@pytest.mark.slow
def test_the_adapters_are_whole(tmp_path: Path) -> None:
    # Kills: adapters saved as shards or from one rank's copy, a base that was trained too.
    need("peft", "transformers")
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 400)
    wanted = ("--data", str(text), "--out", "adapters", "--steps", "4")
    said = run_ranks(ROOT / "examples" / "lora_gpt.py", tmp_path, *wanted, launcher="deepspeed")
    found = re.search(r"windows: (.*) before, (.*) after, (.*) in one process", said)
    assert found is not None, said
    before, after, alone = map(float, found.groups())
    assert after < before - 0.1
    assert alone == pytest.approx(after, abs=2e-4)  # printed with four digits
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()
