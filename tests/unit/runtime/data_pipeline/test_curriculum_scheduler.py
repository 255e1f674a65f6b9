"""The difficulty of every step, by schedules written out here a second time."""

from typing import Any

import pytest

from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler


def block(schedule_type: str, least: int, largest: int, **schedule: Any) -> dict[str, Any]:
    return {
        "min_difficulty": least,
        "max_difficulty": largest,
        "schedule_type": schedule_type,
        "schedule_config": schedule,
    }


LINEAR = block("fixed_linear", 8, 64, total_curriculum_step=10, difficulty_step=8)
ROOT = block("fixed_root", 8, 64, total_curriculum_step=100, difficulty_step=8, root_degree=2)
DISCRETE = block("fixed_discrete", 1, 9, difficulty=[1, 4, 9], max_step=[2, 5])


@pytest.mark.parametrize(
    ("config", "steps", "difficulties"),
    [
        # 8 + 56 x t / 10, rounded down to eights.
        (LINEAR, range(1, 13), [8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64, 64]),
        # 8 + 56 x sqrt(t / 100): 13.6, 19.2, 36, 58.4, 64
        (ROOT, (1, 4, 25, 81, 100, 400), [8, 16, 32, 56, 64, 64]),
        (DISCRETE, range(1, 8), [1, 1, 4, 4, 4, 9, 9]),
        # Never less than the least, also where that is no multiple: upstream begins with 0 here.
        (
            block("fixed_linear", 5, 20, total_curriculum_step=4, difficulty_step=8),
            range(1, 7),
            [8, 8, 16, 16, 16, 20],
        ),
        (
            block("fixed_linear", 5, 20, total_curriculum_step=40, difficulty_step=8),
            (1, 7, 8, 41),
            [5, 5, 8, 16],
        ),
    ],
)
def test_difficulties(config: dict[str, Any], steps: Any, difficulties: list[int]) -> None:
    # Kills: steps counted from 0, rounding to the nearest, another root, an end that is not the
    # largest.
    scheduler = CurriculumScheduler(config)
    assert scheduler.get_current_difficulty() == config["min_difficulty"]
    assert [scheduler.update_difficulty(step) for step in steps] == difficulties
    assert scheduler.get_current_difficulty() == difficulties[-1]
    # Of any step at any time: a run may go back to a checkpoint.
    assert [scheduler.get_difficulty(step) for step in steps] == difficulties


def test_a_custom_schedule() -> None:
    # Kills: a schedule that stays at the largest difficulty once it was there.
    scheduler = CurriculumScheduler(block("custom", 1, 100))
    with pytest.raises(DeepSpeedConfigError, match="set_custom_curriculum_learning_schedule"):
        scheduler.update_difficulty(1)
    scheduler.set_custom_get_difficulty(lambda step: 101 - step)
    assert [scheduler.update_difficulty(step) for step in (1, 2, 90)] == [100, 99, 11]
    for wrong in (0, 2.5, True):
        scheduler.set_custom_get_difficulty(lambda step, wrong=wrong: wrong)  # type: ignore[misc]  # that is the point
        with pytest.raises(ValueError, match="positive whole number"):
            scheduler.update_difficulty(1)


def test_state() -> None:
    scheduler, other = CurriculumScheduler(LINEAR), CurriculumScheduler(ROOT)
    scheduler.update_difficulty(5)
    other.set_state(scheduler.get_state())
    assert other.get_state() == scheduler.get_state()
    assert other.get_current_difficulty() == 32 and other.update_difficulty(9) == 56
    other.set_current_difficulty(3)
    assert other.get_current_difficulty() == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"min_difficulty": None}, "min_difficulty is missing"),
        ({"max_difficulty": 4}, "max_difficulty: 4: expected a whole number of at least 8"),
        ({"schedule_type": "linear"}, "schedule_type: 'linear': expected one of fixed_linear"),
        ({"schedule_config": {"difficulty_step": 8}}, "total_curriculum_step is missing"),
        (
            {"schedule_config": {"difficulty_step": 0, "total_curriculum_step": 5}},
            "difficulty_step: 0: expected a whole number of at least 1",
        ),
        (
            {"schedule_config": {**LINEAR["schedule_config"], "root_degree": 2}},
            "root_degree: 2: expected no such key, but total_curriculum_step",
        ),
        (
            {**DISCRETE, "schedule_config": {"difficulty": [1, 2], "max_step": [3, 4]}},
            "one entry less than difficulty",
        ),
        (
            {**DISCRETE, "schedule_config": {"difficulty": [1, 2, 3], "max_step": [4, 3]}},
            "steps in their order",
        ),
        (
            {**DISCRETE, "schedule_config": {"difficulty": 5, "max_step": [4]}},
            "a list of whole numbers",
        ),
    ],
)
def test_what_makes_no_sense(change: dict[str, Any], said: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=said):
        CurriculumScheduler({**LINEAR, **change})
