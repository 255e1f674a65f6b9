"""The benchmark: ratios are paired within rounds, and systems take turns in one call."""

import json
import sys
from pathlib import Path

import pytest
import train_step
import turns
from unit.launcher import forked


def test_ratios_are_taken_within_a_round() -> None:
    # The machine is three times slower in the second round; that must not show in a ratio.
    wall = {
        "ddp": [[1.0, 1.0], [3.0, 3.0]],
        "ddp-fused": [[0.5, 0.5], [1.5, 1.5]],
        "zero1": [[2.0, 2.0], [6.0, 6.0]],
    }
    cpu = {"ddp": [[1.0], [1.0]], "ddp-fused": [[1.0], [1.0]], "zero1": [[0.5], [0.5]]}
    results = train_step.summarize(wall, cpu)
    ratios = {result.system: (result.ratio, result.ratio_fused) for result in results}
    assert ratios == {"ddp": (1.0, 2.0), "ddp-fused": (0.5, 1.0), "zero1": (2.0, 4.0)}
    assert "| zero1 | 4000.00 | 2.00 | 2.00-2.00 | 4.00 | 500.00 | 0.50 |" in train_step.table(
        results
    )


def test_upstream_needs_its_interpreter() -> None:
    arguments = train_step.parse_arguments(["--systems", "upstream-zero1"])
    with pytest.raises(ValueError, match="--upstream-python"):
        train_step.chosen_systems(arguments)


def test_baseline_is_always_run() -> None:
    arguments = train_step.parse_arguments(["--systems", "zero2,fsdp2"])
    assert train_step.chosen_systems(arguments) == ["ddp", "zero2", "fsdp2"]


@pytest.mark.slow
def test_systems_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    flags = (
        "--model tiny --layers 3 --systems zero2 --rounds 2 --steps 3 --warmup 1 --clip 1".split()
    )
    assert train_step.main([*flags, "--json", str(record)]) == 0
    seconds = json.loads(record.read_text())["seconds"]
    assert {name: [len(block) for block in rounds] for name, rounds in seconds.items()} == {
        "ddp": [3, 3],
        "zero2": [3, 3],
    }
    captured = capsys.readouterr()
    assert "| zero2 |" in captured.out and sys.executable not in captured.out


def test_a_system_that_fails_is_named_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(turns, "subprocess", forked.replacement)
    workload = train_step.workload(train_step.parse_arguments(["--model", "tiny", "--layers", "1"]))
    with open(tmp_path / "stderr", "w") as stderr:
        pair = train_step.Pair("nonsense", sys.executable, workload, False, stderr)
        with pytest.raises(RuntimeError, match=r"nonsense: rank 0 ended \(exit code 1\)"):
            pair.wait_until_ready()
        pair.close()
    assert all(process.returncode is not None for process in pair._processes)
    assert (
        "system 'nonsense' is unknown; use one of torch, ddp, fsdp2"
        in (tmp_path / "stderr").read_text()
    )
