"""The program of each page of docs/clients, as it stands there, trains on two processes, learns and
leaves a checkpoint.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from .launching import launch, need
from .run_pages import DOCS, program

# What a page's program imports, and what it must leave.
NEEDS = {
    "accelerate": ("accelerate",),
    "transformers": ("accelerate", "transformers"),
    "lightning": ("lightning",),
    "trl": ("accelerate", "transformers", "trl"),
    "peft": ("accelerate", "transformers", "peft"),
}
SHARD = "zero_pp_rank_1_mp_rank_00_model_states.pt"
LEFT = {
    "accelerate": ("out/latest", "out/pytorch_model/mp_rank_00_model_states.pt"),
    "transformers": ("out/checkpoint-16/latest", "out/checkpoint-16/model.safetensors"),
    "lightning": (f"out/last.ckpt/checkpoint/{SHARD}", "out/last.ckpt/zero_to_fp32.py"),
    "trl": ("out/checkpoint-16/latest", f"out/checkpoint-16/global_step16/{SHARD}"),
    "peft": ("out/checkpoint-32/latest", "adapter/adapter_model.safetensors"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where the programs that can run here ran, and the losses that each printed."""
    out = tmp_path_factory.mktemp("pages")
    pages = [page for page, names in NEEDS.items() if all(map(importlib.util.find_spec, names))]
    if not pages:
        need(*NEEDS["accelerate"])
    for page in pages:
        (out / page).mkdir()
        (out / page / "train.py").write_text(program(page))
    return out, launch("run_pages.py", out, *pages)


@pytest.mark.parametrize("page", NEEDS)
def test_the_program_of_the_page_trains(runs: tuple[Path, dict[str, Any]], page: str) -> None:
    # Kills: a page whose program no longer runs, does not learn, or saves nothing.
    need(*NEEDS[page])
    out, losses = runs
    assert len(losses[page]) >= 4 and losses[page][-1] < losses[page][0]
    assert [name for name in LEFT[page] if not (out / page / name).is_file()] == []


def test_every_page_is_run() -> None:
    assert {path.stem for path in DOCS.glob("*.md")} - {"README"} == NEEDS.keys() == LEFT.keys()
