"""Values of `optimizer.params` and `scheduler.params`: numbers in text, and what is none."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config_models.arguments import read_arguments
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.optimizer_factory import build_basic_optimizer
from deepspeed.runtime.optimizers.lr_scheduler_factory import build_lr_scheduler
from unit.runtime.config_models.reading import config

TORCH_OPTIMIZERS = [
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and torch.optim.Optimizer in cls.__mro__[1:]
]
OWN_OPTIMIZERS = ["Adam", "AdamW", "FusedAdam", "Adagrad", "Lamb", "Lion", "Muon"]
OPTIMIZERS = sorted({*OWN_OPTIMIZERS, *TORCH_OPTIMIZERS})
# What does not follow from the signature: arguments that have to be given.
CYCLE = {"max_lr": 0.2, "total_steps": 10}
SCHEDULES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(lr_schedules.VALID_LR_SCHEDULES, {}),
    **dict.fromkeys(("ConstantLR", "LinearLR", "PolynomialLR", "ReduceLROnPlateau"), {}),
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    "WarmupDecayLR": {"total_num_steps": 10},
    "WarmupCosineLR": {"total_num_steps": 10},
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [3, 5]},
    "ExponentialLR": {"gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 10},
    "CosineAnnealingWarmRestarts": {"T_0": 10},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2},
    "OneCycleLR": CYCLE,
}


def optimizer_of(name: str, params: dict[str, Any], offload: bool = False) -> torch.optim.Optimizer:
    model = nn.Linear(4, 4)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}} if offload else {}
    read = config(optimizer={"type": name, "params": params}, zero_optimization=zero)
    return build_basic_optimizer(read, model.parameters(), model)


def schedule_of(name: str, params: dict[str, Any]) -> Any:
    read = config(scheduler={"type": name, "params": params})
    adam = torch.optim.Adam(nn.Linear(4, 4).parameters(), lr=0.1)
    return build_lr_scheduler(read, None, adam)


def spelled(value: Any) -> Any:
    """Numbers and booleans as text, as PyYAML leaves `1e-3`."""
    if isinstance(value, dict):
        return {key: spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [spelled(item) for item in value]
    is_number = isinstance(value, (bool, int, float))
    return f"{value:.17e}" if isinstance(value, float) else str(value) if is_number else value


def defaults_of(cls: Any) -> dict[str, Any]:
    found = {name: given.default for name, given in inspect.signature(cls).parameters.items()}
    return {name: value for name, value in found.items() if value not in (inspect._empty, None)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_number_of_an_optimizer_may_be_text(name: str) -> None:
    # Kills: a number that reaches torch as text, or another one than was meant.
    plain = optimizer_of(name, {})
    given = {key: value for key, value in defaults_of(type(plain)).items() if key != "adam_w_mode"}
    read = optimizer_of(name, spelled(given))
    for group, wanted in zip(read.param_groups, plain.param_groups, strict=True):
        assert {**group, "params": 0} == {**wanted, "params": 0}


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_number_of_a_schedule_may_be_text(name: str) -> None:
    plain = schedule_of(name, SCHEDULES[name])
    read = schedule_of(name, spelled({**defaults_of(type(plain)), **SCHEDULES[name]}))
    for _ in range(6):
        for schedule in (plain, read):
            schedule.optimizer.step()
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        ours, theirs = read.optimizer.param_groups, plain.optimizer.param_groups
        assert [group["lr"] for group in ours] == [group["lr"] for group in theirs]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_argument_of_an_optimizer_is_refused_by_its_key(name: str) -> None:
    # Kills: a value that fails somewhere within torch, at the first step or never.
    cls = type(optimizer_of(name, {}))
    for key in inspect.signature(cls).parameters:
        if key in ("params", "model_params", "max_grad_norm"):
            continue
        for value in ("abc", [0.5], {"a": 1}, [0.1, 0.2, 0.3, 0.4]):
            if value == "abc" and key in ("ns_method", "adjust_lr_fn", "line_search_fn"):
                continue  # text, of which its class knows which
            with pytest.raises(DeepSpeedConfigError, match=rf"r\.params\.{key}: .* expected"):
                optimizer_of(name, {key: value})


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_argument_of_a_schedule_is_refused_by_its_key(name: str) -> None:
    cls = type(schedule_of(name, SCHEDULES[name]))
    for key in inspect.signature(cls).parameters:
        if key in ("optimizer", "scale_fn", "warmup_type", "scale_mode"):
            continue
        with pytest.raises(DeepSpeedConfigError, match=rf"r\.params\.{key}: .* expected"):
            schedule_of(name, {**SCHEDULES[name], key: {"a": 1}})


REFUSED: list[tuple[Any, str, dict[str, Any], str]] = [
    (
        optimizer_of,
        "Adam",
        {"betas": [0.9]},
        r"betas: \[0\.9\] \(list\) .*: expected \[a number, a",
    ),
    (optimizer_of, "Adam", {"betas": 0.9}, r"betas: 0\.9 \(float\) .*: expected \[a number, a num"),
    (optimizer_of, "Adam", {"lr": True}, r"lr: True \(bool\) .*: expected a number$"),
    (optimizer_of, "Adam", {"lr": None}, r"lr: None .*: expected a number$"),
    (optimizer_of, "Adam", {"adam_w_mode": "maybe"}, r"adam_w_mode: 'maybe' .* true or false$"),
    (optimizer_of, "Adam", {"torch_adam": True, "betas": [0.9]}, r"betas: \[0\.9\]"),
    (optimizer_of, "SGD", {"momentum": "x", "nesterov": 3}, r"m: 'x' (.|\n)*nesterov: 3 \(int\)"),
    (optimizer_of, "Adam", {"lr": -1}, r"optimizer\.type 'Adam' with optimizer\.params .*-1\.0"),
    (
        optimizer_of,
        "Adam",
        {"learning_rate": 1},
        r"_rate is no argument of FusedAdam; it takes lr, ",
    ),
    (
        schedule_of,
        "WarmupLR",
        {"warmup_min_lr": "low"},
        r"'low' .* a number or \[a number, \.\.\.\]$",
    ),
    (schedule_of, "WarmupLR", {"warmup_max_lr": [1, 2]}, r"'WarmupLR'.*expected 1 warmup_max_lr"),
    (schedule_of, "WarmupLR", {"steps": 3}, r"params\.steps is no argument of WarmupLR; it"),
    (schedule_of, "WarmupDecayLR", {}, r"scheduler\.params\.total_num_steps: is missing"),
    (schedule_of, "StepLR", {"step_size": 5.5}, r"size: 5\.5 \(float\) .*: expected an integer$"),
    (schedule_of, "OneCycleLR", {**CYCLE, "anneal_strategy": "sin"}, "'cos' or 'linear'"),
    (schedule_of, "OneCycleLR", {"max_lr": 1}, r"scheduler\.type 'OneCycleLR' with .*total_steps"),
]


@pytest.mark.parametrize(("make", "name", "params", "told"), REFUSED)
def test_what_is_refused(make: Any, name: str, params: dict[str, Any], told: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=told):
        make(name, params)


def test_booleans_in_text_are_booleans() -> None:
    # Kills: bool("false").
    assert optimizer_of("Adam", {"adam_w_mode": "false"}).adam_w_mode is False
    assert type(optimizer_of("Adam", {"torch_adam": "false"})) is FusedAdam
    assert type(optimizer_of("Adam", {"torch_adam": "yes"})) is torch.optim.AdamW
    with pytest.raises(DeepSpeedConfigError, match=r"bias_correction: false is not supported"):
        optimizer_of("Adam", {"torch_adam": True, "bias_correction": "False"})


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "Lion"])
def test_those_of_the_host_too(name: str) -> None:
    assert optimizer_of(name, {"lr": "2e-3"}, offload=True).param_groups[0]["lr"] == 2e-3
    with pytest.raises(DeepSpeedConfigError, match=r"optimizer\.params\.lr: 'a lot'"):
        optimizer_of(name, {"lr": "a lot"}, offload=True)


def test_numbers_in_text_are_numbers_for_whoever_reads_the_configuration() -> None:
    read = config(
        optimizer={"type": "Muon", "params": {"lr": "1e-3", "betas": ["0.9", 0.95]}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "3", "warmup_type": "log"}},
    )
    assert read.optimizer_params == {"lr": 1e-3, "betas": [0.9, 0.95]}
    assert read.scheduler_params == {"warmup_num_steps": 3, "warmup_type": "log"}


def test_what_json_has_not_is_left_to_the_class() -> None:
    class Odd:
        def __init__(self, params: Any, lr: float, steps=None, names=("a",), other: Any = 0): ...  # type: ignore[no-untyped-def]

    lr = torch.tensor(0.5)
    given = {"lr": lr, "steps": "many", "names": "b", "other": {"x": 1}}
    assert read_arguments(Odd, given, "optimizer.params") == given
    assert read_arguments(Odd, given, "optimizer.params")["lr"] is lr
