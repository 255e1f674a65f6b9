"""A kill of any rank at any instant of a save costs at most that save; a share of the campaign."""

from pathlib import Path

import pytest

from unit.common import DistributedTest

from .kills import CASES, Campaign

NAMES = [case.name for case in CASES]


class TestKills(DistributedTest):
    """Kills: `latest` before the rename (found by the campaign after 32 kills), an old folder of
    the same tag that is not put back (after 2). It found dropout that repeated itself in a resumed
    pipeline, and `destroy()` waiting for a dead rank.
    """

    world_size = 1
    init_distributed = False
    set_dist_env = False

    @pytest.mark.parametrize("name", NAMES)
    def test_the_next_run_goes_on(self, name: str, tmp_path: Path) -> None:
        campaign = Campaign(CASES[NAMES.index(name)], tmp_path, seed=1)
        campaign.run(kills=1)
        assert campaign.kills == 1
        assert campaign.problems == []
