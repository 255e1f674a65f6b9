"""Core lists, the machine's topology and numactl's command."""

from pathlib import Path

import pytest

from deepspeed.utils import numa
from deepspeed.utils.numa import get_numa_cores, get_numactl_cmd, parse_range, parse_range_list


def test_ranges() -> None:
    assert parse_range("5") == range(5, 6) and parse_range("0-3") == range(0, 4)
    assert parse_range_list("0-3,7") == [0, 1, 2, 3, 7]
    wrong = {"5-3": "must larger", "a": "neither a number", "7,0-3": "must not overlap"}
    for text, match in {**wrong, "1,1": "overlap"}.items():
        with pytest.raises(ValueError, match=match):
            parse_range_list(text)


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, cores in ((0, "0-3"), (1, "4-7")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores + "\n")
    assert get_numa_cores(tmp_path) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    monkeypatch.setattr(numa, "get_numa_cores", lambda: get_numa_cores(tmp_path))
    monkeypatch.delenv("KMP_AFFINITY", raising=False)


def test_ranks_share_cores_equally_and_stay_near_their_memory(two_nodes: None) -> None:
    assert get_numactl_cmd("0-7", 2, 1) == (4, ["numactl", "-C", "4,5,6,7", "-m", "1"])
    assert get_numactl_cmd("0-6", 3, 0) == (2, ["numactl", "-C", "0,1", "-m", "0"])
    # Both nodes: nothing to prefer.
    assert get_numactl_cmd("2-5", 1, 0) == (4, ["numactl", "-C", "2,3,4,5"])


def test_default_is_every_usable_core(two_nodes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda pid: {6, 2}, raising=False)
    assert get_numactl_cmd(None, 2, 1)[1][:3] == ["numactl", "-C", "6"]


def test_refusals(two_nodes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="2 ranks cannot share 1 cores"):
        get_numactl_cmd("0", 2, 0)
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    with pytest.raises(ValueError, match="KMP_AFFINITY"):
        get_numactl_cmd("0-1", 2, 0)
