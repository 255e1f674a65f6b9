"""The commands `ds_io` and `ds_nvme_tune`: what they measure, say, write and refuse."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed.nvme import ds_io_main, tune
from deepspeed.nvme.measure import WAYS, Speed, Task, size_of
from deepspeed.runtime.config import DeepSpeedConfig


@pytest.mark.parametrize("way", WAYS)
def test_ds_io_measures_and_leaves_nothing(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "--io_size 300K --fast_io_size 64K --block_size 16K --loops 2 --engine".split()
    for more in (
        [],
        ["--read", "--validate"],
        ["--different_file_each_iteration", "--io_parallel=2"],
    ):
        assert ds_io_main(["--folder", str(tmp_path), *own, way, *more]) == 0
        said = capsys.readouterr().out
        verb = "Read" if "--read" in more else "Write"
        assert f"E2E {verb} Speed = " in said and f"Task {verb} Latency = " in said, said
        speed = float(said.rpartition("Speed = ")[2].split()[0])
        assert 0 < speed < 1000 and list(tmp_path.iterdir()) == []


def test_processes_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--folder", str(tmp_path), "--io_size=1M", "--multi_process=2"]
    assert ds_io_main(options) == 0
    assert "2 process(es)" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options, said",
    [
        ("--folder /nothing/there", "there is no folder /nothing/there"),
        ("--folder . --use_gds", "--use_gds: GPUDirect Storage is not in this release"),
        ("--folder . --slow_bounce_buffer", "leave it out"),
        ("--folder . --loops 0", "--loops 0 is too few"),
        ("", "give --folder or --folder_to_device_mapping"),
        ("--folder_to_device_mapping /nvme0", "use FOLDER:DEVICE, e.g. /nvme0:0"),
        ("--folder /proc", "/proc/_aio_write_1024.pt.0_0"),
    ],
)
def test_what_ds_io_refuses(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ds_io_main(["--io_size", "1K", *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ds_io: error: ") and said in error and error.count("\n") == 1


def test_sizes() -> None:
    assert [size_of(text) for text in ("5", "2k", "3M", "1GB")] == [5, 2048, 3 << 20, 1 << 30]
    for text in ("0", "1.5M", "M", ""):
        with pytest.raises(Exception, match="use e.g. 1048576, 512K"):
            size_of(text)


def test_the_best_setting_of_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = {
        "block_size": ["4K", "8K"],
        "queue_depth": [2, 4],
        "sequential_requests": [True, False],
    }
    Path("sweep.json").write_text(json.dumps(sweep))
    options = ["--nvme_dir", str(tmp_path), "--sweep_config=sweep.json", "--io_size=100K"]
    # Really once; then with speeds that are known.
    assert tune.main([*options, "--no_read", "--io_engine=python", "--verbose"]) == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == 8 and "8/8 write block_size=8192 queue_depth=4" in said.err
    assert "by python" in said.err and "Best write: " in said.out

    def known(task: Task) -> Speed:
        speed = task.block_size * (1 if task.read else 3) + task.queue_depth
        speed *= 1 if task.sequential_requests else (3 if task.read else 0.3)
        return Speed(speed, speed, "known")

    monkeypatch.setattr(tune, "measure", known)
    files = ["--json=aio.json", "--log_dir=logs"]
    with mock.patch.object(tune, "draw") as draw:
        assert tune.main([*options, *files, "--report=speeds.png"]) == 0
    written: dict[str, Any] = json.loads(Path("aio.json").read_text())
    # Reading is three times slower than it could be in the setting that writes best, and so on.
    best = {"block_size": 8192, "queue_depth": 4, "intra_op_parallelism": 1}
    expected = {**best, "single_submit": False, "overlap_events": False, "use_gds": False}
    assert written == {"aio": expected}
    assert capsys.readouterr().out.endswith(json.dumps(written, indent=4) + "\n")
    (results, path), _ = draw.call_args
    assert results == json.loads(Path("logs/results.json").read_text()) and len(results) == 16
    pytest.importorskip("matplotlib")
    tune.draw(results, path)
    assert Path(path).read_bytes().startswith(b"\x89PNG")
    DeepSpeedConfig({"train_batch_size": 1, **written})


@pytest.mark.parametrize(
    "options, said",
    [
        ("--nvme_dir /nothing/there", "there is no folder /nothing/there"),
        ("--nvme_dir . --no_read --no_write", "leaves nothing to measure"),
        ("--nvme_dir . --gds", "--gds: GPUDirect Storage is not in this release"),
        ("--nvme_dir . --flush_page_cache", "leave it out"),
        ("--nvme_dir . --loops 0", "--loops 0 is too few"),
        ("--nvme_dir . --report x.gif", "the file must end in .png"),
        ("--nvme_dir . --sweep_config /proc/nothing", "/proc/nothing"),
        ("--nvme_dir . --sweep_config sweep.json", "depth is unknown; use block_size, queue_depth"),
    ],
)
def test_what_ds_nvme_tune_refuses(
    options: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.json").write_text('{"depth": [1]}')
    assert tune.main(options.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("ds_nvme_tune: error: ") and said in error and error.count("\n") == 1
