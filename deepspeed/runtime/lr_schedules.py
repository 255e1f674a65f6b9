"""Learning-rate schedules: LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR and WarmupCosineLR. Each
is a pure function of ``last_batch_iteration`` (steps taken minus one; -1 before the first), which
is all its state, written into the optimizer's groups by ``step()``, which the engine calls after
its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from deepspeed._lazy import lazy_attributes
from deepspeed.runtime.optimizers.lr_tuning import (
    TOTAL_NUM_STEPS,
    WARMUP_LINEAR_RATE,
    WARMUP_LOG_RATE,
    WARMUP_MAX_LR,
    WARMUP_MIN_LR,
    WARMUP_NUM_STEPS,
    WARMUP_TYPE,
)
from deepspeed.utils.logging import warn_once

# Further names of schedules and parameters, and the command-line helpers.
__getattr__ = lazy_attributes(__name__, tables=("deepspeed.runtime.optimizers.lr_tuning:__dict__",))


def get_torch_optimizer(optimizer: object) -> Any:
    """Return the object whose parameter groups a schedule writes: a torch optimizer, the one of a
    wrapper, or anything with ``param_groups``. TypeError for others.
    """
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, torch.optim.Optimizer):
            return found
    if hasattr(optimizer, "param_groups"):
        return optimizer
    raise TypeError(
        f"{type(optimizer).__name__} is not a subclass of torch.optim.Optimizer and has no "
        "param_groups"
    )


def update_lr(param_groups: Iterable[dict[str, Any]], lrs: Iterable[float]) -> list[float]:
    """Write one learning rate into each group and return them."""
    written = []
    for group, lr in zip(param_groups, lrs, strict=True):
        # A recorded graph reads a capturable optimizer's rate from a tensor: not to be replaced.
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
        written.append(lr)
    return written


def _per_group(optimizer: Any, value: float | Sequence[float], name: str) -> list[float]:
    count = len(optimizer.param_groups)
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise ValueError(f"expected {count} {name}, got {len(value)}: one per parameter group")
        return list(value)
    return [value] * count  # type: ignore[list-item]  # not a sequence, by the check above


class _Schedule:
    """What the schedules share: the counter, and writing rates into groups, the first at once."""

    def __init__(self, optimizer: object, last_batch_iteration: int) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to ``last_batch_iteration``."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        update_lr(self.optimizer.param_groups, self.get_lr())

    def _start(self) -> None:
        """Write the first rate, unless it is resumed: the optimizer's state holds it then."""
        if self.last_batch_iteration == -1:
            update_lr(self.optimizer.param_groups, self.get_lr())

    def get_lr(self) -> list[float]:
        """Return the rate of each group at ``last_batch_iteration``."""
        raise NotImplementedError(f"{type(self).__name__} must define get_lr()")

    def get_last_lr(self) -> list[float]:
        """Return the rate each group has now; before the first ``step()`` too: clients log it."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Restore the counter. The rates themselves come back with the optimizer's state."""
        self.last_batch_iteration = sd["last_batch_iteration"]


class LRRangeTest(_Schedule):
    """Grow the rate linearly (or in stairs) without bound, to find the largest one that trains.

    With ``t = last_batch_iteration + 1`` the rate is ``min_lr * (1 + step_rate * t / step_size)``;
    the fraction is rounded down for stairs. The first rate may be one per group.
    """

    def __init__(
        self,
        optimizer: object,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if lr_range_test_step_size < 1:
            raise ValueError(
                f"lr_range_test_step_size must be a positive integer, got {lr_range_test_step_size}"
            )
        self.min_lr = _per_group(self.optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._start()

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [rate * (1 + self.step_rate * interval) for rate in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)


class OneCycle(_Schedule):
    """Raise the rate to a maximum, lower it again, then decay it; momentum goes the other way.

    With ``t = last_batch_iteration + 1``, a height ``h`` rises from 0 to 1 over the first steps,
    falls to 0 over the second (as many unless given), in stairs if asked (rounded down); ``lr = min
    + (max - min) * h``, ``momentum = max - (max - min) * h``. After the cycle, with ``d`` further
    steps, ``lr = min / (1 + decay_lr_rate * d / decay_step_size)`` and ``momentum = max * (1 +
    decay_mom_rate * d / decay_step_size)``; nothing decays when ``decay_step_size`` is 0. Rates and
    momenta may be one per group. Momentum, the first beta, is not cycled, with a warning, if the
    optimizer has none.
    """

    def __init__(
        self,
        optimizer: object,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if cycle_first_step_size < 1:
            raise ValueError(
                f"cycle_first_step_size must be a positive integer, got {cycle_first_step_size}"
            )
        self.first_size = cycle_first_step_size
        self.second_size = _second(cycle_second_step_size, cycle_first_step_size)
        self.first_stairs = max(0, cycle_first_stair_count)
        self.second_stairs = _second(cycle_second_stair_count, self.first_stairs)
        self.total_size = self.first_size + self.second_size
        self.decay_step_size = decay_step_size
        self.min_lrs = _per_group(self.optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _per_group(self.optimizer, cycle_max_lr, "cycle_max_lr")
        self.decay_lr_rate = decay_lr_rate
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and any("betas" not in group for group in self.optimizer.param_groups):
            warn_once(f"cycle_momentum is disabled: {type(self.optimizer).__name__} has no betas")
            self.cycle_momentum = False
        self.min_moms = _per_group(self.optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_moms = _per_group(self.optimizer, cycle_max_mom, "cycle_max_mom")
        self.decay_mom_rate = decay_mom_rate
        self._start()
        if last_batch_iteration == -1:
            self._write_momentum()

    def _height(self) -> float:
        taken = self.last_batch_iteration + 1
        if taken <= self.first_size:
            return _stairs(taken, self.first_size, self.first_stairs)
        return _stairs(max(0, self.total_size - taken), self.second_size, self.second_stairs)

    def _decay(self) -> float:
        passed = self.last_batch_iteration + 1 - self.total_size
        return passed / self.decay_step_size if passed > 0 and self.decay_step_size > 0 else 0.0

    def get_lr(self) -> list[float]:
        height, divisor = self._height(), 1 + self.decay_lr_rate * self._decay()
        return [
            (low + (high - low) * height) / divisor
            for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group, None when momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        height, factor = self._height(), 1 + self.decay_mom_rate * self._decay()
        firsts = [
            (high - (high - low) * height) * factor
            for low, high in zip(self.min_moms, self.max_moms, strict=True)
        ]
        groups = self.optimizer.param_groups
        return [(first, group["betas"][1]) for first, group in zip(firsts, groups, strict=True)]

    def _write_momentum(self) -> None:
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)
        self._write_momentum()


def _second(value: int | None, first: int) -> int:
    """Return a setting of the second half; None and negative mean as in the first."""
    return first if value is None or value < 0 else value


def _stairs(position: int, size: int, stairs: int) -> float:
    """Return ``position / size``, rounded down to a stair if there are any."""
    if size == 0:
        return 0.0
    # In integers, so that a stair is never missed by a rounding error.
    return (position * stairs // size) / stairs if stairs else position / size


class WarmupLR(_Schedule):
    """Raise the rate from a minimum to a maximum (None: the group's rate), then keep it.

    With ``i = last_batch_iteration`` and ``n = max(2, warmup_num_steps)`` the rate is ``min + (max
    - min) * g`` where ``g`` is ``log(i + 1) / log(n)`` or, linear, ``i / n``, and 1 from ``i = n``
    on. Before the first step it is ``min``. ``warmup_num_steps=0`` means no warmup: upstream
    refuses it, but clients pass it (accelerate's default), and what they mean is clear. A
    ``warmup_type`` but ``"log"`` and ``"linear"`` is read as ``"log"``, with a warning.
    """

    def __init__(
        self,
        optimizer: object,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: float = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = self.get_last_lr()
        self.min_lrs = _per_group(self.optimizer, warmup_min_lr, WARMUP_MIN_LR)
        self.max_lrs = _per_group(self.optimizer, warmup_max_lr, WARMUP_MAX_LR)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self._start()

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return _warmup_fraction(
                self.last_batch_iteration, self.warmup_num_steps, self.warmup_type
            )
        return self._after_warmup()

    def _after_warmup(self) -> float:
        return 1.0

    def get_lr(self) -> list[float]:
        gamma = self._gamma()
        return [
            low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]


def _warmup_steps(given: float) -> float:
    """Return the warmup steps that are reckoned with; log(1) is 0, so one counts as two."""
    if given < 0:
        raise ValueError(f"{WARMUP_NUM_STEPS} must not be negative, got {given}; 0 is no warmup")
    # Iteration -1, before the first step, must count as warmed up when there is no warmup.
    return max(2, given) if given else -1


def _warmup_type(given: str) -> str:
    if given in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
        return given
    warn_once(f'{WARMUP_TYPE}: {given!r} is neither "log" nor "linear"; "log" is used')
    return WARMUP_LOG_RATE


def _warmup_fraction(iteration: int, steps: float, kind: str) -> float:
    if iteration < 0:
        return 0.0
    return (
        math.log(iteration + 1) / math.log(steps) if kind == WARMUP_LOG_RATE else iteration / steps
    )


class WarmupDecayLR(WarmupLR):
    """Warm up as ``WarmupLR``, then lower the rate linearly to the minimum at the last step."""

    def __init__(
        self,
        optimizer: object,
        total_num_steps: float,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: float = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        warmup = (warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
        super().__init__(optimizer, *warmup, last_batch_iteration)
        _warn_if_short(total_num_steps, warmup_num_steps)

    def _after_warmup(self) -> float:
        # Without warmup the counter starts at -1, but the decay starts at 0.
        start, now = max(0, self.warmup_num_steps), max(0, self.last_batch_iteration)
        return max(0.0, (self.total_num_steps - now) / max(1, self.total_num_steps - start))


class WarmupCosineLR(_Schedule):
    """Warm up to the rate each group was made with, then follow half a cosine to a share of it.

    With ``i = last_batch_iteration``, ``n = max(2, warmup_num_steps)`` and ``T = total_num_steps``
    the ratio to the group's rate is ``min_ratio + (1 - min_ratio) * g`` during warmup (``g`` as in
    ``WarmupLR``), then ``c + (1 - c) * (1 + cos(pi * (i - n + 1) / (T - n))) / 2`` with ``c =
    cos_min_ratio``, and ``c`` from the end on. It is 0 before the first step.
    ``warmup_num_steps=0`` means no warmup, as in ``WarmupLR``.
    """

    def __init__(
        self,
        optimizer: object,
        total_num_steps: float,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: float = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = _warmup_type(warmup_type)
        self.org_lrs = self.get_last_lr()
        _warn_if_short(total_num_steps, warmup_num_steps)
        self._start()

    def get_lr_ratio(self) -> float:
        """Return the ratio to the rate that the groups were made with."""
        iteration, steps = self.last_batch_iteration, self.warmup_num_steps
        if iteration < 0 and steps > 0:
            return 0.0
        if iteration < steps:
            fraction = _warmup_fraction(iteration, steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * fraction
        steps = max(0, steps)
        length = self.total_num_steps - steps
        progress = min(1.0, (iteration - steps + 1) / length) if length > 0 else 1.0
        wave = 1 + math.cos(math.pi * progress)
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * wave / 2)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


def _warn_if_short(total: float, warmup: float) -> None:
    if total < warmup:
        warn_once(f"{TOTAL_NUM_STEPS} {total:g} is less than {WARMUP_NUM_STEPS} {warmup:g}")
