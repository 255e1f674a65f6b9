"""The logger, its levels, and messages on chosen ranks."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed import comm as dist
from deepspeed.utils import logging as ds_logging
from deepspeed.utils.logging import (
    LoggerFactory,
    get_current_level,
    get_dist_msg,
    get_log_level_from_string,
    log_dist,
    log_dist_once,
    log_once,
    logger,
    print_configuration,
    print_dist,
    print_json_dist,
    set_log_level_from_string,
    should_log_le,
    warning_once,
)
from unit.common import DistributedTest


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(before)


@pytest.fixture
def rank_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")


def test_messages_carry_level_place_and_rank(
    rank_one: None, capsys: pytest.CaptureFixture[str]
) -> None:
    log_dist("hello", ranks=[1])
    text = capsys.readouterr().out
    assert "[INFO]" in text and "[Rank 1] hello" in text
    assert "test_logging.py" in text and "test_messages_carry_level_place_and_rank" in text


def test_once_helpers_name_their_callers(
    rank_one: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        log_dist_once("dist once", ranks=[1])
        log_once("plain once")
        warning_once("warned once")
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("test_once_helpers_name_their_callers") for line in lines] == [1, 1, 1], (
        lines
    )
    assert ["[INFO]" in lines[0], "[WARNING]" in lines[1], "[WARNING]" in lines[2]] == [True] * 3


@pytest.mark.parametrize(
    "ranks, spoken", [(None, True), ([], True), ([-1], True), ([1, 3], True), ([0], False)]
)
def test_chosen_ranks(rank_one: None, ranks: list[int] | None, spoken: bool) -> None:
    assert (get_dist_msg("text", ranks) is not None) == spoken


def test_a_process_of_no_job_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert get_dist_msg("text", [0]) is not None


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    assert [get_log_level_from_string(name) for name in ("debug", "INFO", "Critical")] == [
        10,
        20,
        50,
    ]
    with pytest.raises(ValueError, match="log level 'loud' is unknown; use one of debug"):
        get_log_level_from_string("loud")
    set_log_level_from_string("error")
    assert get_current_level() == logging.ERROR
    log_dist("too low")
    assert capsys.readouterr().out == ""
    assert should_log_le("critical") and should_log_le("error") and not should_log_le("warning")
    other = LoggerFactory.create_logger("other")
    set_log_level_from_string("debug", other)
    assert other.level == logging.DEBUG and get_current_level() == logging.ERROR


def test_factory_makes_one_handler() -> None:
    made = [LoggerFactory.create_logger("repeated", level=logging.INFO) for _ in range(2)]
    assert made[0] is made[1] and len(made[0].handlers) == 1 and not made[0].propagate
    with pytest.raises(ValueError, match="needs a name"):
        LoggerFactory.create_logger()
    assert logger.name == "DeepSpeed"


def test_default_level_and_environment() -> None:
    script = "from deepspeed.utils.logging import logger; print(logger.level)"

    def level_with(**env: str) -> subprocess.CompletedProcess[str]:
        environment = {
            name: value for name, value in os.environ.items() if name != "DS_LOG_LEVEL"
        } | env
        return subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert level_with().stdout.strip() == "30"
    assert level_with(DS_LOG_LEVEL="debug").stdout.strip() == "10"
    assert (
        "DS_LOG_LEVEL=loud: log level 'loud' is unknown" in level_with(DS_LOG_LEVEL="loud").stderr
    )


def test_json_on_chosen_ranks(rank_one: None, tmp_path: Path) -> None:
    print_json_dist({"a": 1}, ranks=[0], path=tmp_path / "no")
    print_json_dist({"a": 1}, ranks=[1], path=tmp_path / "yes")
    assert not (tmp_path / "no").exists()
    assert json.loads((tmp_path / "yes").read_text()) == {"a": 1, "rank": 1}
    with pytest.raises(ValueError, match="needs a path"):
        print_json_dist({})


def test_prints(rank_one: None, capsys: pytest.CaptureFixture[str]) -> None:
    logger.setLevel(logging.ERROR)
    print_dist("whatever the level", ranks=[1])
    print_dist("not mine", ranks=[0])
    assert capsys.readouterr().out == "[Rank 1] whatever the level\n"
    logger.setLevel(logging.INFO)
    print_configuration(SimpleNamespace(beta=2, alpha=1), "things")
    text = capsys.readouterr().out
    assert "things:" in text and text.index("alpha ...") < text.index("beta ...")


def test_logging_loads_no_communication() -> None:
    script = "import sys; import deepspeed.utils.logging; print('deepspeed.comm' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "False"


class TestRanks(DistributedTest):
    world_size = 2

    def test_rank_is_the_process_groups(self) -> None:
        os.environ["RANK"] = "7"  # the group knows better
        assert get_dist_msg("x") == f"[Rank {dist.get_rank()}] x"
        assert (get_dist_msg("x", [1]) is not None) == (dist.get_rank() == 1)
        assert ds_logging._rank() == dist.get_rank()
