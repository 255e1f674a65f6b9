"""The LoRA example as users run it: what it saves at stage 3 is what one process loads."""

import re
from pathlib import Path

import pytest
from unit.clients.launching import run_ranks

pytest.importorskip("peft")
pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_adapters_are_whole(tmp_path: Path) -> None:
    # Kills: adapters saved as shards or from one rank's copy, a base that was trained too.
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
