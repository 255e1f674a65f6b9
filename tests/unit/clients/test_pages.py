"""The program of each page of docs/clients trains on two processes, learns, leaves a checkpoint."""

import re
from pathlib import Path

import pytest

from .launching import ROOT, need, run_ranks

DOCS = ROOT / "docs" / "clients"
# What a page's program imports, and what it must leave.
OF_TRAINER = ("accelerate", "transformers")
NEEDS = {"accelerate": ("accelerate",), "lightning": ("lightning",), "transformers": OF_TRAINER}
NEEDS |= {name: (*OF_TRAINER, name) for name in ("trl", "peft")}
SHARD = "zero_pp_rank_1_mp_rank_00_model_states.pt"
LEFT = {
    "accelerate": ("out/latest", "out/pytorch_model/mp_rank_00_model_states.pt"),
    "transformers": ("out/checkpoint-16/latest", "out/checkpoint-16/model.safetensors"),
    "lightning": (f"out/last.ckpt/checkpoint/{SHARD}", "out/last.ckpt/zero_to_fp32.py"),
    "trl": ("out/checkpoint-16/latest", f"out/checkpoint-16/global_step16/{SHARD}"),
    "peft": ("out/checkpoint-32/latest", "adapter/adapter_model.safetensors"),
}


@pytest.mark.parametrize("page", NEEDS)
def test_the_program_of_the_page_trains(tmp_path: Path, page: str) -> None:
    # Kills: a page whose program no longer runs, does not learn, or saves nothing.
    need(*NEEDS[page])
    script = tmp_path / "train.py"
    (first, *_) = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    script.write_text(first)
    said = run_ranks(script, tmp_path)
    losses = [float(loss) for loss in re.findall(r"\bloss'?:? '?([\d.]+)", said)]
    assert len(losses) >= 4 and losses[-1] < losses[0]
    assert [name for name in LEFT[page] if not (tmp_path / name).is_file()] == []


def test_every_page_is_run() -> None:
    assert {path.stem for path in DOCS.glob("*.md")} - {"README"} == NEEDS.keys() == LEFT.keys()
