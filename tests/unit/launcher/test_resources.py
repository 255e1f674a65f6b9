"""The hostfile and slot-filter language, and core lists: pure functions."""

import pytest

from deepspeed.launcher.resources import (
    fetch_hostfile,
    parse_core_list,
    parse_inclusion_exclusion,
    parse_node_config,
    parse_node_config_list,
    parse_num_nodes,
    parse_resource_filter,
    split_cores,
)

HOSTS = {"a": [0, 1, 2], "b": [0, 1]}


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [
        ("", "", HOSTS),
        ("a@b:1", "", {"a": [0, 1, 2], "b": [1]}),
        ("b:1@a:2,0", "", {"a": [0, 2], "b": [1]}),
        ("a:0,0", "", {"a": [0]}),
        ("", "a:0@b", {"a": [1, 2]}),
        ("", "a", {"b": [0, 1]}),
        ("", "a:0,1,2", {"b": [0, 1]}),
        ("a:1@a:0,1", "", {"a": [0, 1]}),
        ("a:1@a", "", {"a": [0, 1, 2]}),
        ("", "a:1@a:0", {"a": [2], "b": [0, 1]}),
    ],
)
def test_filter_keeps_what_upstream_keeps(
    include: str, exclude: str, kept: dict[str, list[int]]
) -> None:
    assert parse_resource_filter(HOSTS, include, exclude) == kept


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", "mutually exclusive"),
        ("c:1", "", "Hostname 'c' not found"),
        ("", "a:7", "No slot '7' specified on host 'a'"),
        ("a:0-1", "", "bad node specification 'a:0-1'"),
        ("a:", "", "bad node specification 'a:'"),
    ],
)
def test_filter_names_the_mistake(include: str, exclude: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_resource_filter(HOSTS, include, exclude)


def test_slot_counts_become_slot_lists() -> None:
    assert parse_inclusion_exclusion({"a": 2, "b": 3}, "", "a:1") == {"a": [0], "b": [0, 1, 2]}


def test_node_config() -> None:
    assert parse_node_config("a") == ("a", [])
    assert parse_node_config("a:0,2") == ("a", [0, 2])
    assert parse_node_config_list("a:0@b") == {"a": [0], "b": []}


def test_num_nodes() -> None:
    assert parse_num_nodes("2", False) == (2, -1)
    assert parse_num_nodes("2:4", True) == (2, 4)
    with pytest.raises(RuntimeError, match="only supported in elastic training"):
        parse_num_nodes("2:4", False)
    with pytest.raises(RuntimeError, match="not in MIN:MAX format"):
        parse_num_nodes("1:2:3", True)


def test_hostfile(tmp_path) -> None:
    path = tmp_path / "hosts"
    path.write_text("w0 slots=4 # first\n\n# comment\nw1 slots=2\n")
    assert fetch_hostfile(str(path)) == {"w0": 4, "w1": 2}
    assert fetch_hostfile(str(tmp_path / "absent")) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w0 slots=4\nw0 slots=2\n", "multiple entries for w0"),
        ("w0 4\n", "bad entry: 'w0 4'"),
        ("w0 slots=x\n", "bad entry"),
        ("# nothing\n", "empty or not formatted"),
    ],
)
def test_bad_hostfile(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        fetch_hostfile(str(path))


def test_core_lists() -> None:
    assert parse_core_list("1,3-5,7") == [1, 3, 4, 5, 7]
    assert split_cores([1, 3, 4, 5, 7], 2) == [[1, 3], [4, 5]]
    for bad in ("5-3", "a", "1,,2", "1,1-2"):
        with pytest.raises(ValueError, match="--bind_core_list"):
            parse_core_list(bad)
    with pytest.raises(ValueError, match="3 ranks cannot be bound to 2 cores"):
        split_cores([0, 1], 3)
