"""Command-line arguments that describe a learning-rate schedule, and what they make."""

from __future__ import annotations

import argparse
from typing import Any

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1")


# name -> (type, default, help)
Arguments = dict[str, tuple[Any, Any, str]]

RANGE_TEST_ARGUMENTS: Arguments = {
    LR_RANGE_TEST_MIN_LR: (float, 0.001, "LRRangeTest: first rate"),
    "lr_range_test_step_rate": (float, 1.0, "LRRangeTest: growth per step size"),
    "lr_range_test_step_size": (int, 1000, "LRRangeTest: steps per growth"),
    "lr_range_test_staircase": (_boolean, False, "LRRangeTest: grow in stairs"),
}
ONE_CYCLE_ARGUMENTS: Arguments = {
    "cycle_first_step_size": (int, 1000, "OneCycle: steps up"),
    "cycle_first_stair_count": (int, -1, "OneCycle: stairs up"),
    "cycle_second_step_size": (int, -1, "OneCycle: steps down; -1: as up"),
    "cycle_second_stair_count": (int, -1, "OneCycle: stairs down; -1: as up"),
    "decay_step_size": (int, 1000, "OneCycle: steps of one decay after the cycle"),
    "cycle_min_lr": (float, 0.01, "OneCycle: lowest rate"),
    CYCLE_MAX_LR: (float, 0.1, "OneCycle: highest rate"),
    "decay_lr_rate": (float, 0.0, "OneCycle: decay of the rate"),
    "cycle_min_mom": (float, 0.8, "OneCycle: lowest momentum"),
    "cycle_max_mom": (float, 0.9, "OneCycle: highest momentum"),
    "decay_mom_rate": (float, 0.0, "OneCycle: decay of the momentum"),
}
WARMUP_ARGUMENTS: Arguments = {
    WARMUP_MIN_LR: (float, 0.0, "WarmupLR: first rate"),
    WARMUP_MAX_LR: (float, 0.001, "WarmupLR: last rate"),
    WARMUP_NUM_STEPS: (int, 1000, "WarmupLR: steps"),
    WARMUP_TYPE: (str, WARMUP_LOG_RATE, "WarmupLR: log or linear"),
}
COSINE_ARGUMENTS: Arguments = {
    WARMUP_MIN_RATIO: (float, 0.01, "WarmupCosineLR: ratio at the first step"),
    COS_MIN_RATIO: (float, 0.01, "WarmupCosineLR: ratio at the end"),
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments of all schedules to ``parser`` and return it."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument(
        "--lr_schedule", type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}"
    )
    arguments = RANGE_TEST_ARGUMENTS | ONE_CYCLE_ARGUMENTS | WARMUP_ARGUMENTS | COSINE_ARGUMENTS
    for name, (kind, default, text) in arguments.items():
        group.add_argument(f"--{name}", type=kind, default=default, help=text)
    text = "OneCycle: cycle momentum (its default anyway)"
    group.add_argument("--cycle_momentum", action="store_true", help=text)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the tuning arguments of the command line, and the rest of it."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _override(args: argparse.Namespace, params: dict[str, Any], names: Arguments) -> None:
    for name in names:
        value = getattr(args, name, None)
        if value is not None:
            params[name] = value


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write the arguments of LRRangeTest into ``params``."""
    _override(args, params, RANGE_TEST_ARGUMENTS)


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write the arguments of OneCycle into ``params``."""
    _override(args, params, ONE_CYCLE_ARGUMENTS)


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:  # noqa: N802 - upstream's name
    """Write the arguments of WarmupLR into ``params``."""
    _override(args, params, WARMUP_ARGUMENTS)


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write the arguments of all three into ``params``."""
    override_lr_range_test_params(args, params)
    override_1cycle_params(args, params)
    override_warmupLR_params(args, params)


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return the ``scheduler`` block that the arguments describe, or None and why there is none."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    params: dict[str, Any] = {}
    if name == LR_RANGE_TEST:
        override_lr_range_test_params(args, params)
    elif name == ONE_CYCLE:
        override_1cycle_params(args, params)
    elif name == WARMUP_COSINE_LR:
        # This schedule takes ratios to the optimizer's rate instead of rates.
        ratios = {key: WARMUP_ARGUMENTS[key] for key in (WARMUP_NUM_STEPS, WARMUP_TYPE)}
        _override(args, params, {**ratios, **COSINE_ARGUMENTS})
    else:
        override_warmupLR_params(args, params)
    return {"type": name, "params": params}, None


_RATE_OF = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """Return the rate that a ``scheduler`` block stands for, or None and what is missing."""
    if "type" not in config:
        return None, "LR schedule type not defined in config"
    if "params" not in config:
        return None, "LR schedule params not defined in config"
    name = config["type"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a valid LR schedule"
    key = _RATE_OF.get(name, WARMUP_MAX_LR)
    if key not in config["params"]:
        return None, f"{key} not defined in the params of {name}"
    return config["params"][key], ""
