"""The command `ds_diff`: runs by their records, and checkpoints by their tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.monitor.watch import cli
from deepspeed.verify import diff
from unit.common import DistributedTest
from unit.v1.reproducibility.cases import Case
from unit.v1.reproducibility.runs import engine_of, train


def record(folder: Path, loss: float, losses: int, differs_at: int | None = None) -> Path:
    """A record of three steps of which the first has no digest; `losses`: of how many `loss` is the
    mean.
    """
    folder.mkdir()
    lines: list[dict[str, Any]] = [{"watch": 1}]
    for step in (1, 2, 3):
        lines.append({"step": step, "loss": loss, "norm": 2.0})
        if losses:
            lines[-1]["losses"] = losses
        if step > 1:
            digests = {"a.weight": "aa" * 32, "b.weight": "bb" * 32}
            if differs_at is not None and step >= differs_at:
                digests["b.weight"] = "cc" * 32
            lines[-1] |= {"digests": digests, "digest": digests["b.weight"]}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "run-0001.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, part, rounded = (
        record(tmp_path / str(losses), 1.0 + losses, losses) for losses in (12, 8, 0)
    )
    other = record(tmp_path / "other", 2.0, 0, differs_at=3)
    # A window that was resumed knows some of its losses, of some a script has divided them.
    for two in (one, part, rounded):
        assert diff.main([str(one), str(two)]) == diff.EQUAL
        assert "equal" in capsys.readouterr().out
    assert diff.main([str(one), str(record(tmp_path / "loss", 13.5, 12))]) == diff.DIFFERENT
    told = capsys.readouterr().out
    assert "different in step 2" in told and "loss (loss): 13.0 and 13.5" in told
    files = {name: tmp_path / name for name in ("json", "page")}
    told = [f"--{name}={path}" for name, path in files.items()]
    assert diff.main([str(one), str(other), *told]) == diff.DIFFERENT
    text = capsys.readouterr().out
    assert "different in step 3" in text and "b.weight" in text
    # Kills: all parameters named, or the loss of rank 0, which has other micro-batches.
    assert "a.weight" not in text and "loss" not in text
    found = json.loads(files["json"].read_text(encoding="utf-8"))
    assert (found["step"], found["equal"], found["steps"]) == (3, False, [[2, True], [3, False]])
    assert [each["name"] for each in found["differences"]] == ["b.weight"]
    page = files["page"].read_text(encoding="utf-8")
    assert page.count("<rect") == 2 and "<title>step 3</title>" in page and "b.weight" in page
    assert page.count("var(--bad)") >= 1 and "http" not in page
    assert diff.main([str(one), str(tmp_path / "none")]) == diff.MISUSED
    assert "neither a record" in capsys.readouterr().err

    assert cli.main([str(other), "--before", str(one)]) == 0
    page = (other / "watch.html").read_text(encoding="utf-8")
    assert "<h2>Digests</h2>" in page and "<td class=n>cccccccccccccccc</td>" in page
    assert "<b>bbbbbbbbbbbbbbbb</b>" in page and "<td class=n>equal</td>" in page


class TestCheckpoints(DistributedTest):
    world_size = 1

    def test_a_bit(self, tmpdir: Any) -> None:
        engine = engine_of(Case(2))
        train(engine, steps=1)
        engine.save_checkpoint(str(tmpdir), tag="before")
        state = engine._sequence.state[engine._sequence.masters.groups[0].masters[0]]
        digest = engine.state_digest(per_parameter=True)
        state["exp_avg_sq"].view(torch.int32)[3] ^= 4
        changed = [n for n, d in engine.state_digest(per_parameter=True).items() if d != digest[n]]
        engine.save_checkpoint(str(tmpdir), tag="after")
        folders = [str(Path(tmpdir, tag)) for tag in ("before", "after")]
        assert diff.main([folders[0], folders[0]]) == diff.EQUAL
        page = Path(tmpdir, "page")
        assert diff.main([*folders, f"--page={page}"]) == diff.DIFFERENT
        told = diff.text_of(diff.compare(*map(Path, folders)))
        assert f"{changed[0]} (exp_avg_sq): 1 of" in told and "up to 4 units" in told, told
        assert "first element 3" in told and told.count("units") == len(changed) == 1
        assert page.read_text(encoding="utf-8").count("<rect") == 1
        engine.destroy()
