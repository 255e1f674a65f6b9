"""The configuration reference is what the models say."""

import subprocess
import sys
from pathlib import Path

from deepspeed.runtime.config_models import refusals
from deepspeed.runtime.config_models.reader import all_paths
from deepspeed.runtime.config_models.training import TrainingConfig
from deepspeed.runtime.config_models.zero import OTHER_STAGES, STAGE_3

ROOT = Path(__file__).resolve().parents[3]


def read_page() -> str:
    return (ROOT / "docs" / "config-reference.md").read_text(encoding="utf-8")


def test_the_page_is_current():
    script = str(ROOT / "docs" / "generate_config_reference.py")
    done = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, (
        "docs/config-reference.md is not current; run: python "
        f"docs/generate_config_reference.py\n{done.stderr.decode()}"
    )


def test_the_page_lists_every_key_of_the_most_used_blocks():
    page, keys = read_page(), "train_batch_size reduce_bucket_size loss_scale_window "
    keys += "bf16.immediate_grad_update data_types.grad_accum_dtype"
    assert all(f"| `{key}` |" in page for key in keys.split())
    assert "| `reduce_bucket_size` | size | `500000000` |" in page


def test_the_page_lists_every_key() -> None:
    """Kills: a key that is hidden from the tables and forgotten in the section of the refused."""
    page = read_page()
    renamed = {"tensor_parallel": "tp", "replace_with_kernel_inject": "kernel_inject"}
    for path in all_paths(TrainingConfig):
        name = path.rpartition(".")[2]
        # Of a key with an alias the page shows the alias.
        shown = (name, f"stage3_{name}", renamed.get(name, name))
        spelled = [text for each in shown for text in (f"`{each}`", f".{each}`", f"{each}.")]
        assert any(text in page for text in spelled), path


def test_what_is_not_honoured_stands_apart() -> None:
    tables, refused = read_page().split("## Refused and without effect")
    tables = tables[tables.index("## Top level") :]
    listed: set[str] = set()
    block = ""
    for line in tables.splitlines():
        if line.startswith("## "):
            block = line.split("`")[1] + "." if "`" in line else ""
        elif line.startswith("| `"):
            listed.add(block + line.split("`")[1])
    by_value = refusals.Scope.VALUE
    apart = {row.path for row in refusals.REFUSALS if row.scope is not by_value}
    assert "compile.backend" in listed and "compile.passes" not in listed
    assert "zero_optimization.reduce_bucket_size" in listed
    stages = (STAGE_3, OTHER_STAGES)
    in_vain = {row.path for row in refusals.INERT if row.without not in stages}
    assert in_vain and listed.isdisjoint(apart | in_vain)
    assert not {"nebula", "aio", "zero_optimization.offload_param.max_in_cpu"} & listed
    assert "zero_optimization.stage3_max_live_parameters" in listed
    everything = (*refusals.REFUSALS, *refusals.AT_STAGE_3, *refusals.BELOW_STAGE_3)
    assert all(f"{row.remedy} |" in refused for row in everything)
