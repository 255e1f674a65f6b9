"""`CurriculumScheduler`: how difficult the data of a step may be, the length of sequences say.

[Note: a function of the step]
The difficulty follows from the number of the step and nothing else. So all ranks have the same one
without asking each other, whatever they have skipped or loaded, and a run that goes on from a
checkpoint has the one that it would have had.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.runtime.config_utils import DeepSpeedConfigError

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.features import CurriculumConfig


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
        block: Where in the configuration, for errors.
    """

    def __init__(self, config: Mapping[str, Any], block: str = BLOCK) -> None:
        self.custom_get_difficulty: Schedule | None = None
        self._block = block
        self._follow(config)
        self._current = self._min

    def _follow(self, config: Mapping[str, Any]) -> None:
        checks = _Checks(self._block)
        self._type: str = checks.given(config, "schedule_type")
        self._min = checks.whole(checks.given(config, "min_difficulty"), "min_difficulty", 1)
        largest = checks.given(config, "max_difficulty")
        self._max = checks.whole(largest, "max_difficulty", self._min)
        self._schedule = checks.schedule(config, self._type)

    def get_current_difficulty(self) -> int:
        """Return the difficulty of the last `update_difficulty`; the least before."""
        return self._current

    def set_current_difficulty(self, difficulty: int) -> None:
        self._current = difficulty

    def set_custom_get_difficulty(self, schedule_function: Schedule) -> None:
        """Give a custom schedule its function of the step, the same on all ranks."""
        self.custom_get_difficulty = schedule_function

    def update_difficulty(self, global_steps: int) -> int:
        """Go to a step, which counts from 1, and return its difficulty."""
        self._current = self.get_difficulty(global_steps)
        return self._current

    def get_difficulty(self, global_steps: int) -> int:
        """Return the difficulty of a step, which counts from 1."""
        if self._type == CUSTOM:
            return self._custom(global_steps)
        if self._type == FIXED_DISCRETE:
            levels: Sequence[int] = self._schedule["difficulty"]
            ends: Sequence[int] = self._schedule["max_step"]
            reached = (one for one, end in zip(levels, ends, strict=False) if global_steps <= end)
            return next(reached, levels[-1])
        share = global_steps / self._schedule["total_curriculum_step"]
        grown = share ** (1.0 / self._schedule.get("root_degree", 1))
        difficulty = math.floor(grown * (self._max - self._min) + self._min)
        difficulty -= difficulty % self._schedule["difficulty_step"]
        return min(max(difficulty, self._min), self._max)

    def _custom(self, global_steps: int) -> int:
        if self.custom_get_difficulty is None:
            raise DeepSpeedConfigError(
                f'{self._block}.schedule_type: "custom" needs a function: before the first step, '
                "also of a run that goes on, call engine.set_custom_curriculum_learning_schedule("
                "{name: function of the step}) with the curriculum_type, or the metric, as name, "
                "or use another schedule_type"
            )
        difficulty = self.custom_get_difficulty(global_steps)
        if isinstance(difficulty, bool) or difficulty != int(difficulty) or difficulty < 1:
            raise ValueError(
                f"the custom schedule of {self._block} returned {difficulty!r} for step "
                f"{global_steps}; a difficulty is a positive whole number"
            )
        return int(difficulty)

    def get_state(self) -> dict[str, Any]:
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


class _Checks:
    """Reads a schedule's keys, and names them with their block."""

    def __init__(self, block: str) -> None:
        self._block = block

    def wrong(self, key: str, value: object, expected: str) -> DeepSpeedConfigError:
        return DeepSpeedConfigError(f"{self._block}.{key}: {value!r}: expected {expected}")

    def given(self, config: Mapping[str, Any], key: str, block: str = "") -> Any:
        if config.get(key) is None:
            missing = f"{self._block}.{block}{key}"
            raise DeepSpeedConfigError(f"{missing} is missing; the schedule needs it")
        return config[key]

    def whole(self, value: object, key: str, least: int) -> int:
        number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        if number is None or number != int(number) or number < least:
            raise self.wrong(key, value, f"a whole number of at least {least}")
        return int(number)

    def schedule(self, config: Mapping[str, Any], schedule_type: str) -> dict[str, Any]:
        """Read the `schedule_config`, its numbers as integers."""
        keys = _KEYS.get(schedule_type)
        if keys is None:
            raise self.wrong("schedule_type", schedule_type, "one of " + ", ".join(_KEYS))
        schedule = config.get("schedule_config") or {}
        for key in keys:
            self.given(schedule, key, "schedule_config.")
        for key in sorted(schedule.keys() - set(keys)):
            known = ", ".join(keys) or "none"
            raise self.wrong(f"schedule_config.{key}", schedule[key], f"no such key, but {known}")
        checked: dict[str, Any] = {}
        for key, value in schedule.items():
            path = f"schedule_config.{key}"
            if key not in ("difficulty", "max_step"):
                checked[key] = self.whole(value, path, 1)
                continue
            if not isinstance(value, Sequence) or isinstance(value, str) or not value:
                raise self.wrong(path, value, "a list of whole numbers")
            checked[key] = [self.whole(each, path, 1) for each in value]
        if schedule_type == FIXED_DISCRETE:
            self._check_steps(checked["max_step"], checked["difficulty"])
        return checked

    def _check_steps(self, steps: list[int], levels: list[int]) -> None:
        path = "schedule_config.max_step"
        if len(levels) != len(steps) + 1:
            raise self.wrong(path, steps, "one entry less than difficulty, whose last stays")
        if steps != sorted(steps):
            raise self.wrong(path, steps, "steps in their order")


SEQLEN = "seqlen"
ARGUMENT = "curriculum_seqlen"


def make_scheduler(
    block: CurriculumConfig, model: nn.Module, calls_model: bool, num_sequence_ranks: int
) -> CurriculumScheduler | None:
    """Make the scheduler of the configuration's block, if it is on; refuse a model that cannot be
    told the length of sequences, and ranks that share them.

    A pipeline's engine does not call the whole model: its `set_batch_fn` cuts batches.
    """
    if not block.enabled:
        return None
    scheduler = CurriculumScheduler(block.model_dump())
    if block.curriculum_type == SEQLEN and calls_model:
        _check_takes_length(model)
        if num_sequence_ranks > 1:
            raise DeepSpeedConfigError(
                f'curriculum_learning.curriculum_type: "{SEQLEN}" with sequences split over '
                f"{num_sequence_ranks} ranks: each rank's model would cut its own piece; use "
                "another curriculum_type, and cut batches before they are split to "
                "engine.curriculum_scheduler_legacy.update_difficulty(engine.global_steps + 1)"
            )
    return scheduler


def _check_takes_length(model: nn.Module) -> None:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if ARGUMENT not in parameters and not takes_any:
        raise DeepSpeedConfigError(
            f'curriculum_learning.curriculum_type: "{SEQLEN}" calls the model with {ARGUMENT}, '
            f"which {type(model).__name__}.forward does not take: add the argument and cut "
            "sequences to it, or use another curriculum_type and cut batches to "
            "engine.curriculum_scheduler_legacy.update_difficulty(engine.global_steps + 1)"
        )
