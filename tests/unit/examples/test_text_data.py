"""The example's text: every byte in a window, training and validation apart, telling errors."""

from pathlib import Path

import pytest
import torch
from text_data import Windows, load_text


def test_windows_cover_the_text_and_overlap_by_one() -> None:
    windows = Windows(torch.arange(22, dtype=torch.uint8), context=7)
    assert len(windows) == 3
    assert [window.tolist() for window in (windows[0], windows[1], windows[2])] == [
        list(range(8)),
        list(range(7, 15)),
        list(range(14, 22)),
    ]
    assert windows[0].dtype == torch.int64


def test_text_shorter_than_a_window() -> None:
    with pytest.raises(ValueError, match="7 bytes; one window of context 7 needs 8"):
        Windows(torch.zeros(7, dtype=torch.uint8), context=7)


def test_standard_library_without_tests_and_packages() -> None:
    split = load_text(None)
    assert len(split.train) > 10 * len(split.validation) > 1_000_000
    assert b"class OrderedDict" in bytes(split.train.numpy()) + bytes(split.validation.numpy())


def test_folder_holds_whole_files_out(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"<{number}>" * 5)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_text("no")
    (tmp_path / "b.bin").write_text("no")
    split = load_text(str(tmp_path))
    assert bytes(split.validation.numpy()) == b"<0>" * 5 + b"\n" + b"<20>" * 5
    assert (
        b"no" not in bytes(split.train.numpy()) and bytes(split.train.numpy()).count(b"<") == 38 * 5
    )


def test_single_file_is_split_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)))
    split = load_text(str(file))
    assert split.train.tolist() == list(range(190)) and split.validation.tolist() == list(
        range(190, 200)
    )
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes, too few"):
        load_text(str(file))


def test_path_without_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--data {tmp_path}/nothing: no such file"):
        load_text(str(tmp_path / "nothing"))
