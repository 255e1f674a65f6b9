"""The `ds_report` command."""

import pytest

from deepspeed import __version__, env_report


def test_sizes_are_readable() -> None:
    assert env_report.human_readable_size(123456789) == "117.74 MB"
    assert env_report.human_readable_size(0) == "0.00 B"
    assert env_report.human_readable_size(5 * 2**50) == "5120.00 TB"


def test_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_BUILD_AIO", "0")
    env_report.main()
    text = capsys.readouterr().out
    told = ("DS_BUILD_AIO=0", "torch version", "deepspeed version", __version__, "/dev/shm")
    assert [word for word in told if word not in text] == []
    # Kills: a line that bug reports about monitors, offload or launching are asked for anyway.
    monitors = [f"{name} version" for name in ("tensorboard", "wandb", "comet-ml")]
    asked = ["cpu", "host memory", *monitors, "launchers found"]
    assert [word for word in asked if f"{word} ..." not in text] == []


def test_parts_can_be_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_BUILD_AIO", "0")
    env_report.main(hide_errors_and_warnings=True)
    assert "DS_BUILD_AIO" not in capsys.readouterr().out
    env_report.main(hide_operator_status=True)
    assert "async_io" not in capsys.readouterr().out


def test_small_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_report, "SHM_WARNING_BYTES", 2**62)
    (warning,) = env_report.get_shm_size()[1]
    assert "--shm-size" in warning
    monkeypatch.setattr(env_report, "SHM_PATH", "/nonexistent")
    assert env_report.get_shm_size()[0] == "UNKNOWN"
