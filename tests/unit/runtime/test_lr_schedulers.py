"""The schedules against closed formulas and against values recorded from DeepSpeed 0.19.6 (CPU)."""

import argparse
import functools
import math
from types import SimpleNamespace

import pytest
import torch

from deepspeed.runtime import lr_schedules
from deepspeed.runtime.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
)


def adam(*rates, kind=torch.optim.Adam, **kwargs):
    rates, weights = rates or (0.1,), torch.nn.Parameter
    return kind([{"params": [weights(torch.zeros(1))], "lr": rate} for rate in rates], **kwargs)


def rates_over(schedule, steps):
    """Return the first group's rate after each step."""
    rates = []
    for _ in range(steps):
        schedule.step()
        rates.append(schedule.optimizer.param_groups[0]["lr"])
    return rates


RANGE = dict(lr_range_test_min_lr=0.01, lr_range_test_step_size=3, lr_range_test_step_rate=2.0)
CYCLE = dict(cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=4)
STAIRS = dict(cycle_first_stair_count=2, cycle_second_step_size=6, cycle_second_stair_count=3)
LOG = dict(warmup_max_lr=0.1, warmup_num_steps=5)
LINEAR = dict(**LOG, warmup_min_lr=0.01, warmup_type="linear")
COSINE = dict(total_num_steps=10, warmup_num_steps=4)
COSINE_LINEAR = dict(**COSINE, warmup_min_ratio=0.1, cos_min_ratio=0.2, warmup_type="linear")
LOGARITHMS = [0.0, 0.04306765580733931, 0.06826061944859854, 0.08613531161467862, 0.1, 0.1]
RISE = [0.0325, 0.055, 0.0775, 0.1]
# name, settings, rate at construction, recorded rates after each step
RECORDED = [
    ("LRRangeTest", RANGE, 0.01, [
        0.016666666666666666, 0.02333333333333333, 0.03, 0.03666666666666667, 0.04333333333333334,
        0.05,
    ]),
    ("LRRangeTest", dict(**RANGE, lr_range_test_staircase=True), 0.01, [
        0.01, 0.01, 0.03, 0.03, 0.03, 0.05, 0.05, 0.05, 0.07,
    ]),
    ("OneCycle", CYCLE, 0.01, [*RISE, 0.0775, 0.055, 0.0325, 0.01, 0.01, 0.01]),
    ("OneCycle", dict(**CYCLE, cycle_second_step_size=2, decay_step_size=2, decay_lr_rate=0.5),
     0.01, [*RISE, 0.055, 0.01, 0.008, 0.006666666666666667, 0.005714285714285714, 0.005]),
    ("OneCycle", dict(**CYCLE, cycle_first_stair_count=2), 0.01, [
        0.01, 0.055, 0.055, 0.1, 0.055, 0.055, 0.01, 0.01, 0.01,
    ]),
    ("OneCycle", dict(**CYCLE, **STAIRS, decay_step_size=3, decay_lr_rate=0.3), 0.01, [
        0.01, 0.055, 0.055, 0.1, 0.07, 0.07, 0.04, 0.04, 0.01, 0.01, 0.00909090909090909,
        0.008333333333333333,
    ]),
    ("WarmupLR", LOG, 0.0, [*LOGARITHMS, 0.1]),
    ("WarmupLR", LINEAR, 0.01, [0.01, 0.028, 0.046, 0.064, 0.082, 0.1, 0.1]),
    ("WarmupLR", dict(warmup_max_lr=0.1, warmup_num_steps=1), 0.0, [0.0, 0.1, 0.1]),
    ("WarmupLR", dict(warmup_max_lr=0.1, warmup_num_steps=1, warmup_type="linear"), 0.0, [
        0.0, 0.05, 0.1,
    ]),
    ("WarmupDecayLR", dict(**LOG, total_num_steps=10), 0.0, [
        *LOGARITHMS, 0.08, 0.06, 0.04, 0.02, 0.0, 0.0,
    ]),
    ("WarmupDecayLR", dict(**LINEAR, total_num_steps=3), 0.01, [
        0.01, 0.028, 0.046, 0.064, 0.082, 0.01, 0.01,
    ]),
    ("WarmupCosineLR", COSINE, 0.0, [
        0.0, 0.05, 0.07924812503605783, 0.1, 0.09330194006220302, 0.0750025, 0.050005, 0.0250075,
        0.006708059937796987, 1e-05, 1e-05, 1e-05,
    ]),
    ("WarmupCosineLR", COSINE_LINEAR, 0.0, [
        0.01, 0.0325, 0.055, 0.0775, 0.09464101615137757, 0.08, 0.06, 0.04, 0.02535898384862245,
        0.02, 0.02,
    ]),
    ("WarmupCosineLR", dict(total_num_steps=3, warmup_num_steps=4), 0.0, [
        0.0, 0.05, 0.07924812503605783, 0.1, 1e-05,
    ]),
]  # fmt: skip


@pytest.mark.parametrize("name, settings, first, recorded", RECORDED)
def test_rates_are_the_recorded_ones(name, settings, first, recorded):
    optimizer = adam(0.1)
    schedule = getattr(lr_schedules, name)(optimizer, **settings)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(first, abs=1e-15)
    assert rates_over(schedule, len(recorded)) == pytest.approx(recorded, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("steps", [3, 10, 100])
def test_warmup_and_cosine_follow_their_formulas(steps):
    total = 3 * steps
    warm = rates_over(WarmupLR(adam(), 0.001, 0.5, steps), total)
    cosine = rates_over(WarmupCosineLR(adam(0.2), total, 0.3, steps, 0.1), total)
    for i in range(total):
        gain = math.log(i + 1) / math.log(steps) if i < steps else 1.0
        assert warm[i] == pytest.approx(0.001 + 0.499 * gain, rel=1e-12)
        ratio = 0.3 + 0.7 * gain
        if i >= steps:
            ratio = 0.1 + 0.9 * (1 + math.cos(math.pi * (i - steps + 1) / (total - steps))) / 2
        assert cosine[i] == pytest.approx(0.2 * ratio, rel=1e-12)


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
@pytest.mark.parametrize("stop_at", [0, 3, 9])
def test_resuming_gives_the_rates_of_not_having_stopped(name, stop_at):
    settings = {
        "LRRangeTest": dict(lr_range_test_step_size=4),
        "OneCycle": dict(**CYCLE, decay_step_size=2, decay_lr_rate=1),
        "WarmupLR": dict(warmup_num_steps=5),
        "WarmupDecayLR": dict(total_num_steps=11, warmup_num_steps=5),
        "WarmupCosineLR": dict(total_num_steps=11, warmup_num_steps=5),
    }[name]
    make = functools.partial(getattr(lr_schedules, name), **settings)
    expected = rates_over(make(adam(0.1)), 14)
    first = make(adam(0.1))
    rates_over(first, stop_at)
    resumed = make(adam(0.1))
    resumed.optimizer.load_state_dict(first.optimizer.state_dict())
    resumed.load_state_dict(first.state_dict())
    assert first.state_dict() == {"last_batch_iteration": stop_at - 1}
    assert resumed.get_last_lr() == first.get_last_lr()
    assert rates_over(resumed, 14 - stop_at) == expected[stop_at:]
    # The last rate is known before the first step.
    schedule = make(adam(0.1, 0.2))
    assert schedule.get_last_lr() == schedule.get_lr()
    assert len(schedule.get_last_lr()) == 2


@pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_zero_warmup_steps_mean_no_warmup(kind):
    settings = {} if kind is WarmupLR else dict(total_num_steps=4)
    if kind is not WarmupCosineLR:
        settings["warmup_max_lr"] = 0.1
    schedule = kind(adam(0.1), warmup_num_steps=0, **settings)
    assert schedule.get_last_lr() == [0.1]
    cosine = [(1 + math.cos(math.pi * min(1, i / 4))) / 2 for i in (1, 2, 3, 4, 5)]
    expected = {
        WarmupLR: [0.1] * 5,
        WarmupDecayLR: [0.1, 0.075, 0.05, 0.025, 0.0],
        WarmupCosineLR: [1e-5 + (0.1 - 1e-5) * part for part in cosine],
    }
    assert rates_over(schedule, 5) == pytest.approx(expected[kind], abs=1e-15)
    with pytest.raises(ValueError, match="warmup_num_steps"):
        kind(adam(0.1), warmup_num_steps=-1, **settings)


def test_one_rate_per_group():
    optimizer = adam(0.1, 0.2)
    WarmupLR(optimizer, [0.01, 0.02], [0.1, 0.2], 5, "linear").step(1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.028, 0.056])
    with pytest.raises(ValueError, match="expected 2 lr_range_test_min_lr, got 1"):
        LRRangeTest(adam(0.1, 0.2), lr_range_test_min_lr=[0.01])

    # Warmup to the optimizer's own rates.
    optimizer = adam(0.3, 0.5)
    rates_over(WarmupLR(optimizer, warmup_num_steps=2), 3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.5]


def test_momentum_goes_against_the_rate():
    optimizer = adam(0.1, betas=(0.5, 0.77))
    more = dict(cycle_second_step_size=2, decay_step_size=2, decay_mom_rate=0.1)
    schedule = OneCycle(optimizer, **CYCLE, **more)
    seen = []
    for _ in range(8):
        schedule.step()
        seen.append(optimizer.param_groups[0]["betas"])
    wanted = [0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.945, 0.99]
    assert [first for first, _ in seen] == pytest.approx(wanted)
    assert {second for _, second in seen} == {0.77}
    # It is left alone where there is none.
    optimizer = adam(0.1, kind=torch.optim.SGD, momentum=0.6)
    schedule = OneCycle(optimizer, **CYCLE)
    schedule.step()
    assert schedule.get_mom() is None and optimizer.param_groups[0]["momentum"] == 0.6


def test_rates_in_tensors_are_written_in_place():
    optimizer = adam(0.1)
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    WarmupLR(optimizer, warmup_max_lr=0.5, warmup_num_steps=2).step(5)
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.5


def test_any_object_with_groups_will_do():
    groups = SimpleNamespace(param_groups=[{"lr": 0.1}])
    WarmupLR(groups, warmup_max_lr=0.2, warmup_num_steps=2).step(7)
    assert groups.param_groups[0]["lr"] == 0.2
    with pytest.raises(TypeError, match="torch.optim.Optimizer"):
        WarmupLR(object())


def test_an_unknown_warmup_type_is_read_as_log():
    odd = rates_over(WarmupLR(adam(), 0, 0.1, 5, "steep"), 6)
    assert odd == rates_over(WarmupLR(adam(), 0, 0.1, 5, "log"), 6)


def parsed(*argv):
    return add_tuning_arguments(argparse.ArgumentParser()).parse_args(argv)


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_command_line_makes_a_schedule(name):
    config, error = get_config_from_args(parsed("--lr_schedule", name))
    assert error is None and config["type"] == name
    more = {"total_num_steps": 10} if name in ("WarmupDecayLR", "WarmupCosineLR") else {}
    schedule = getattr(lr_schedules, name)(adam(0.1), **config["params"], **more)
    assert len(rates_over(schedule, 3)) == 3


def test_command_line_values_are_used_and_errors_returned():
    argv = "--lr_schedule OneCycle --cycle_max_lr 0.5 --lr_range_test_staircase false"
    args = parsed(*argv.split())
    config, _ = get_config_from_args(args)
    assert get_lr_from_config(config) == (0.5, "")
    assert args.lr_range_test_staircase is False
    missing = "--lr_schedule not specified on command line"
    assert get_config_from_args(parsed()) == (None, missing)
    unknown = "x is not supported LR schedule"
    assert get_config_from_args(parsed("--lr_schedule", "x")) == (None, unknown)
    assert get_lr_from_config({})[0] is None
    undefined = "warmup_max_lr not defined in the params of WarmupLR"
    assert get_lr_from_config({"type": "WarmupLR", "params": {}}) == (None, undefined)
