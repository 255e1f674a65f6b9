"""The device benchmark: how overlap is computed, what is refused, a whole run without a device."""

import json
from pathlib import Path

import device
import device_worker
import pytest
import turns
from unit.launcher import forked


def test_hidden_is_what_the_busiest_stream_covers() -> None:
    # 10 to 60 beside two others: of 5-15, 50-70 and 55-65 together 25 long, 15 lie under it.
    main, first, second = [(10, 40), (30, 60)], [(5, 15), (50, 70)], [(55, 65)]
    assert device_worker.hidden_part([first, main, second]) == pytest.approx(15 / 30)
    assert device_worker.hidden_part([main]) is None


def test_a_process_that_sees_one_device_takes_it() -> None:
    class Devices:
        def __init__(self, count: int) -> None:
            self.device_count = lambda: count

    assert device_worker.choose(3, Devices(1)) == 0
    assert device_worker.choose(3, Devices(4)) == 3


def test_without_a_device_it_says_how_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device.main([]) == 2
    assert "DS_ACCELERATOR=sim" in capsys.readouterr().err


def test_an_unknown_system_is_named() -> None:
    with pytest.raises(ValueError, match="--systems zero9: choose from torch, ddp"):
        device.chosen_systems(device.parse_arguments(["--systems", "zero9"]))


@pytest.mark.slow
def test_it_runs_to_the_end_on_the_simulated_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "sim")
    monkeypatch.setattr(turns, "subprocess", forked.replacement)
    record = tmp_path / "record.json"
    flags = "--no-tests --systems zero2-overlap --rounds 1 --steps 2".split()
    assert device.main([*flags, "--json", str(record)]) == 0
    assert "| zero2-overlap |" in capsys.readouterr().out
    results = {result["system"]: result for result in json.loads(record.read_text())}
    assert results.keys() == {"ddp", "zero2-overlap"}
    assert results["zero2-overlap"]["peak_mib"] > 0 and results["ddp"]["peak_mib"] is None
