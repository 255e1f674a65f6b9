"""`CurriculumScheduler`: how difficult the data of a step may be, the length of sequences say.

[Note: a function of the step]
The difficulty follows from the number of the step and nothing else. So all ranks have the same one
without asking each other, whatever they have skipped or loaded, and a run that goes on from a
checkpoint has the one that it would have had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepspeed.runtime.config_utils import DeepSpeedConfigError

FIXED_LINEAR = "fixed_linear"
FIXED_ROOT = "fixed_root"
FIXED_DISCRETE = "fixed_discrete"
CUSTOM = "custom"
BLOCK = "curriculum_learning"

Schedule = Callable[[int], int]


class CurriculumScheduler:
    """Difficulty over steps, which count from 1.

    Args:
        config: `min_difficulty`, `max_difficulty`, `schedule_type` and `schedule_config`:

            fixed_linear    total_curriculum_step, difficulty_step: from the least to the largest in
                            so many steps, rounded down to multiples
            fixed_root      the same and root_degree: as the root of the step
            fixed_discrete  difficulty, max_step: each difficulty up to its step, the last from then
                            on
            custom          nothing: what `set_custom_get_difficulty` is given

    Attributes:
        custom_get_difficulty: The function of a custom schedule; None before it is set.

    Raises:
        DeepSpeedConfigError: For a key that is missing, unknown, or makes no sense.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.custom_get_difficulty: Schedule | None = None
        self._follow(config)
        self._current = self._min

    def _follow(self, config: Mapping[str, Any]) -> None:
        self._type: str = _given(config, "schedule_type")
        self._min = _whole(_given(config, "min_difficulty"), "min_difficulty", 1)
        self._max = _whole(_given(config, "max_difficulty"), "max_difficulty", self._min)
        schedule = dict(config.get("schedule_config") or {})
        keys = _KEYS.get(self._type)
        if keys is None:
            raise _wrong("schedule_type", self._type, "one of " + ", ".join(_KEYS))
        for key in keys:
            _given(schedule, key, "schedule_config.")
        unknown = sorted(schedule.keys() - set(keys))
        if unknown:
            known = ", ".join(keys) or "none"
            raise _wrong(f"schedule_config.{unknown[0]}", schedule[unknown[0]], f"no key: {known}")
        self._schedule = _checked(schedule)

    def get_current_difficulty(self) -> int:
        """That of the last `update_difficulty`; the least before."""
        return self._current

    def set_current_difficulty(self, difficulty: int) -> None:
        """Set it until the next `update_difficulty`."""
        self._current = difficulty

    def set_custom_get_difficulty(self, schedule_function: Schedule) -> None:
        """Give a custom schedule its function of the step, the same on all ranks."""
        self.custom_get_difficulty = schedule_function

    def update_difficulty(self, global_steps: int) -> int:
        """Go to a step, which counts from 1, and return its difficulty."""
        self._current = self.get_difficulty(global_steps)
        return self._current

    def get_difficulty(self, global_steps: int) -> int:
        """The difficulty of a step, which counts from 1.

        Raises:
            DeepSpeedConfigError: If the schedule is custom and has no function yet.
            ValueError: If that function returns no positive whole number.
        """
        if self._type == CUSTOM:
            return self._custom(global_steps)
        if self._type == FIXED_DISCRETE:
            levels: Sequence[int] = self._schedule["difficulty"]
            ends: Sequence[int] = self._schedule["max_step"]
            reached = (
                level for level, end in zip(levels, ends, strict=False) if global_steps <= end
            )
            return next(reached, levels[-1])
        share = global_steps / self._schedule["total_curriculum_step"]
        grown = share ** (1.0 / self._schedule.get("root_degree", 1))
        difficulty = math.floor(grown * (self._max - self._min) + self._min)
        difficulty -= difficulty % self._schedule["difficulty_step"]
        return min(max(difficulty, self._min), self._max)

    def _custom(self, global_steps: int) -> int:
        if self.custom_get_difficulty is None:
            raise DeepSpeedConfigError(
                f'{BLOCK}.schedule_type: "custom" needs a function: before the first step, also of '
                "a run that goes on, call engine.set_custom_curriculum_learning_schedule("
                '{"seqlen": function of the step}), or use another schedule_type'
            )
        difficulty = self.custom_get_difficulty(global_steps)
        if isinstance(difficulty, bool) or difficulty != int(difficulty) or difficulty < 1:
            raise ValueError(
                f"the custom schedule of {BLOCK} returned {difficulty!r} for step {global_steps}; "
                "a difficulty is a positive whole number"
            )
        return int(difficulty)

    def get_state(self) -> dict[str, Any]:
        """Plain data: the schedule and the current difficulty."""
        return {
            "min_difficulty": self._min,
            "max_difficulty": self._max,
            "schedule_type": self._type,
            "schedule": dict(self._schedule),
            "current_difficulty": self._current,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Become what `get_state` told; a custom function stays."""
        self._follow({**state, "schedule_config": state["schedule"]})
        self._current = state["current_difficulty"]


_KEYS = {
    FIXED_LINEAR: ("total_curriculum_step", "difficulty_step"),
    FIXED_ROOT: ("total_curriculum_step", "difficulty_step", "root_degree"),
    FIXED_DISCRETE: ("difficulty", "max_step"),
    CUSTOM: (),
}


def _wrong(key: str, value: Any, expected: str) -> DeepSpeedConfigError:
    return DeepSpeedConfigError(f"{BLOCK}.{key}: {value!r}: expected {expected}")


def _given(config: Mapping[str, Any], key: str, block: str = "") -> Any:
    if config.get(key) is None:
        raise DeepSpeedConfigError(f"{BLOCK}.{block}{key} is missing; the schedule needs it")
    return config[key]


def _whole(value: Any, key: str, least: int) -> int:
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    if number is None or number != int(number) or number < least:
        raise _wrong(key, value, f"a whole number of at least {least}")
    return int(number)


def _checked(schedule: dict[str, Any]) -> dict[str, Any]:
    """The `schedule_config`, its numbers as integers."""
    checked: dict[str, Any] = {}
    for key, value in schedule.items():
        path = f"schedule_config.{key}"
        if key in ("difficulty", "max_step"):
            if not isinstance(value, Sequence) or isinstance(value, str) or not value:
                raise _wrong(path, value, "a list of whole numbers")
            checked[key] = [_whole(each, path, 1) for each in value]
        else:
            checked[key] = _whole(value, path, 1)
    steps = checked.get("max_step")
    if steps is not None:
        if len(checked["difficulty"]) != len(steps) + 1:
            raise _wrong(
                "schedule_config.max_step",
                steps,
                "one entry less than difficulty, whose last stays",
            )
        if steps != sorted(steps):
            raise _wrong("schedule_config.max_step", steps, "steps in their order")
    return checked
