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
from deepspeed.utils.logging import LoggerFactory, get_dist_msg, log_dist, logger, print_json_dist
from deepspeed.utils.logging import get_log_level_from_string as level_of
from deepspeed.utils.logging import set_log_level_from_string as set_level
from unit.common import DistributedTest

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(before)


@pytest.fixture
def rank_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")


def test_messages_carry_level_place_and_rank(rank_one: None, capsys: Capture) -> None:
    log_dist("hello", ranks=[1])
    text = capsys.readouterr().out
    assert "[INFO]" in text and "[Rank 1] hello" in text
    assert "test_logging.py" in text and "test_messages_carry_level_place_and_rank" in text


def test_once_helpers_name_their_callers(rank_one: None, capsys: Capture) -> None:
    for _ in range(3):
        ds_logging.log_dist_once("dist once", ranks=[1])
        ds_logging.log_once("plain once")
        ds_logging.warning_once("warned once")
    lines = capsys.readouterr().out.splitlines()
    named = [line.count("test_once_helpers_name_their_callers") for line in lines]
    assert named == [1, 1, 1], lines
    assert ["[INFO]" in lines[0], "[WARNING]" in lines[1], "[WARNING]" in lines[2]] == [True] * 3


def test_chosen_ranks(rank_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (None, [], [-1], [1, 3]):
        assert get_dist_msg("text", ranks) is not None
    assert get_dist_msg("text", [0]) is None
    monkeypatch.delenv("RANK")  # a process of no job speaks for all
    assert get_dist_msg("text", [0]) is not None


def test_levels(capsys: Capture) -> None:
    assert [level_of(name) for name in ("debug", "INFO", "Critical")] == [10, 20, 50]
    with pytest.raises(ValueError, match="log level 'loud' is unknown; use one of debug"):
        level_of("loud")
    set_level("error")
    assert ds_logging.get_current_level() == logging.ERROR
    log_dist("too low")
    assert capsys.readouterr().out == ""
    logged = [ds_logging.should_log_le(name) for name in ("critical", "error", "warning")]
    assert logged == [True, True, False]
    other = LoggerFactory.create_logger("other")
    set_level("debug", other)
    assert other.level == logging.DEBUG and ds_logging.get_current_level() == logging.ERROR


def test_factory_makes_one_handler() -> None:
    made = [LoggerFactory.create_logger("repeated", level=logging.INFO) for _ in range(2)]
    assert made[0] is made[1] and len(made[0].handlers) == 1 and not made[0].propagate
    with pytest.raises(ValueError, match="needs a name"):
        LoggerFactory.create_logger()
    assert logger.name == "DeepSpeed"


def test_default_level_and_environment() -> None:
    # Logging loads no communication.
    script = "import sys; from deepspeed.utils.logging import logger; print(logger.level); "
    command = [sys.executable, "-c", script + "print('deepspeed.comm' in sys.modules)"]
    environment = {name: value for name, value in os.environ.items() if name != "DS_LOG_LEVEL"}
    for given, level, error in (
        ({}, ["30", "False"], ""),
        ({"DS_LOG_LEVEL": "debug"}, ["10", "False"], ""),
        ({"DS_LOG_LEVEL": "loud"}, [], "DS_LOG_LEVEL=loud: log level 'loud' is unknown"),
    ):
        ran = subprocess.run(command, env=environment | given, capture_output=True, text=True)
        assert ran.stdout.split() == level and error in ran.stderr


def test_json_on_chosen_ranks(rank_one: None, tmp_path: Path) -> None:
    print_json_dist({"a": 1}, ranks=[0], path=tmp_path / "no")
    print_json_dist({"a": 1}, ranks=[1], path=tmp_path / "yes")
    assert not (tmp_path / "no").exists()
    assert json.loads((tmp_path / "yes").read_text()) == {"a": 1, "rank": 1}
    with pytest.raises(ValueError, match="needs a path"):
        print_json_dist({})


def test_prints(rank_one: None, capsys: Capture) -> None:
    logger.setLevel(logging.ERROR)
    ds_logging.print_dist("whatever the level", ranks=[1])
    ds_logging.print_dist("not mine", ranks=[0])
    assert capsys.readouterr().out == "[Rank 1] whatever the level\n"
    logger.setLevel(logging.INFO)
    ds_logging.print_configuration(SimpleNamespace(beta=2, alpha=1), "things")
    text = capsys.readouterr().out
    assert "things:" in text and text.index("alpha ...") < text.index("beta ...")


class TestRanks(DistributedTest):
    world_size = 2

    def test_rank_is_the_process_groups(self) -> None:
        os.environ["RANK"] = "7"  # the group knows better
        assert get_dist_msg("x") == f"[Rank {dist.get_rank()}] x"
        assert (get_dist_msg("x", [1]) is not None) == (dist.get_rank() == 1)
        assert ds_logging._rank() == dist.get_rank()
