"""The launcher names the rank that ended, not the peer that noticed: a share of the campaign's."""

from pathlib import Path

import pytest
from unit.launcher.blame import Round, hearing_hangups, play

ROUNDS = {
    "killed": Round("SIGKILL", 1, 0.1, is_light=True),
    "terminated from outside": Round("SIGTERM", 1, 0.1),
    "crashes": Round("crash", 0, 0.1, is_light=True),
    "aborts on one of two nodes": Round("abort", 1, 0.1, nodes=2, is_light=True),
    "raises": Round("raise", 1, 0.1, is_light=True),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_the_one_that_ended_is_named(name: str, tmp_path: Path) -> None:
    with hearing_hangups():
        assert play(ROUNDS[name], tmp_path) == ""
