"""The loss scaler as a state machine: scales used, growth, hysteresis, the minimum, pickles."""

import json
import pickle

import pytest
import torch

from deepspeed.runtime.fp16.loss_scaler import (
    CreateLossScaler,
    DynamicLossScaler,
    LossScaleConfig,
    LossScaleProfile,
    LossScaler,
    to_python_float,
)

# (overflow, scale after, hysteresis after), as DeepSpeed 0.19.6 gives for init 64, window 3, min 1.
RECORDED_SHIFT_1 = [
    (1, 32.0, 1), (0, 32.0, 1), (0, 32.0, 1), (1, 16.0, 1), (0, 16.0, 1), (0, 16.0, 1),
    (0, 16.0, 1), (0, 32.0, 1), (1, 16.0, 1), (1, 8.0, 1), (0, 8.0, 1), (0, 8.0, 1), (0, 8.0, 1),
    (1, 4.0, 1),
]  # fmt: skip
RECORDED_SHIFT_2 = [
    (0, 64, 2), (0, 64, 2), (1, 64, 1), (1, 32.0, 1), (0, 32.0, 1), (0, 32.0, 1), (0, 32.0, 1),
    (0, 64.0, 2), (0, 64.0, 2), (0, 64.0, 2), (0, 128.0, 2), (1, 128.0, 1), (0, 128.0, 1),
    (0, 128.0, 1), (0, 128.0, 1), (0, 256.0, 2),
]  # fmt: skip
RECORDED_SHIFT_2_CONSECUTIVE = [
    (1, 64, 1), (0, 64, 2), (0, 64, 2), (0, 64, 2), (0, 128.0, 2), (1, 128.0, 1), (1, 64.0, 1),
    (0, 64.0, 2), (1, 64.0, 1), (1, 32.0, 1), (0, 32.0, 2), (0, 32.0, 2), (0, 32.0, 2),
    (0, 64.0, 2),
]  # fmt: skip


SETTINGS = {"init_scale": 64, "scale_window": 3, "min_scale": 1, "delayed_shift": 1}


def scaler(**changes):
    return DynamicLossScaler(**{**SETTINGS, "consecutive_hysteresis": False, **changes})


@pytest.mark.parametrize(
    "delayed_shift, consecutive, recorded",
    [
        (1, False, RECORDED_SHIFT_1),
        (2, False, RECORDED_SHIFT_2),
        (2, True, RECORDED_SHIFT_2_CONSECUTIVE),
    ],
)
def test_transitions_are_the_recorded_ones(delayed_shift, consecutive, recorded):
    machine = scaler(delayed_shift=delayed_shift, consecutive_hysteresis=consecutive)
    for overflow, scale, hysteresis in recorded:
        machine.update_scale(bool(overflow))
        assert (machine.cur_scale, machine.cur_hysteresis) == (scale, hysteresis)


def test_update_returns_the_scale_that_was_used():
    machine = scaler()
    for overflow in (False, False, False, False, True, False):
        scale_of_this_step = machine.loss_scale
        assert machine.update_scale(overflow) == scale_of_this_step
    # The fourth clean step grew the scale and the overflow halved it: both changes were seen.
    assert machine.loss_scale == 64 and machine.cur_iter == 6


def test_overflow_at_the_minimum_is_an_error_that_names_the_key_or_goes_on():
    machine = scaler(init_scale=2)
    machine.update_scale(True)
    before = dict(machine.__dict__)
    with pytest.raises(RuntimeError, match="fp16.min_loss_scale"):
        machine.update_scale(True)
    assert machine.__dict__ == before
    machine = scaler(init_scale=2, raise_error_at_min_scale=False)
    for _ in range(3):
        machine.update_scale(True)
    assert machine.cur_scale == 1


def test_static_scale_never_changes():
    machine = LossScaler(128)
    assert [machine.update_scale(overflow) for overflow in (True, False, True)] == [128.0] * 3
    assert machine.loss_scale == 128
    assert machine.dynamic is False and machine.has_overflow([]) is False


def test_scaled_backward_is_computed_in_fp32():
    weight = torch.ones(1, dtype=torch.float16, requires_grad=True)
    loss = (weight * 3).sum()
    assert torch.isfinite(scaler(init_scale=2**16).scale_loss(loss))
    LossScaler(8).backward(loss)
    assert weight.grad.item() == 24

    good, bad, none = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    good.grad, bad.grad = torch.ones(2), torch.tensor([0.0, float("inf")])
    assert not scaler().has_overflow_serial([good, none])
    assert scaler().has_overflow_serial([good, bad, none])
    assert to_python_float(torch.tensor([2.5])) == to_python_float(2.5) == 2.5


def test_pickle_keeps_class_path_and_attribute_names():
    machine = scaler(delayed_shift=2)
    machine.update_scale(True)
    text = pickle.dumps(machine)
    assert b"deepspeed.runtime.fp16.loss_scaler" in text and b"DynamicLossScaler" in text
    names = "cur_scale dynamic cur_iter last_overflow_iter scale_factor scale_window min_scale "
    names += "delayed_shift cur_hysteresis consecutive_hysteresis raise_error_at_min_scale dtype"
    assert set(machine.__dict__) == set(names.split())
    assert pickle.loads(text).__dict__ == machine.__dict__
    assert LossScaler(4.0).__dict__ == {"cur_scale": 4.0, "dynamic": False}


def test_state_dict_continues_exactly():
    machine, resumed = scaler(delayed_shift=2), scaler(delayed_shift=2, init_scale=7)
    for overflow in (False, True, True, False):
        machine.update_scale(overflow)
    resumed.load_state_dict(machine.state_dict())
    for overflow in (False, False, False, True, True):
        assert machine.update_scale(overflow) == resumed.update_scale(overflow)
    assert machine.state_dict() == resumed.state_dict()
    with pytest.raises(ValueError, match="fp16.loss_scale"):
        LossScaler(1).load_state_dict(scaler().state_dict())


def test_repr_is_json():
    assert json.loads(repr(LossScaler(1.0))) == {"cur_scale": 1.0, "dynamic": False}
    assert json.loads(repr(scaler()))["dtype"] == "torch.float16"


def test_create_chooses_by_type_and_settings():
    args = {**SETTINGS, "init_scale": 8, "delayed_shift": 2, "consecutive_hysteresis": False}
    dynamic = CreateLossScaler(torch.float16, 0, True, args)
    assert isinstance(dynamic, DynamicLossScaler)
    assert dynamic.cur_scale == 8 and dynamic.cur_hysteresis == 2
    assert CreateLossScaler(torch.float16, 4.0, False, None).cur_scale == 4
    for dtype in (torch.bfloat16, torch.float32):
        plain = CreateLossScaler(dtype, 4.0, True, args)
        assert type(plain) is LossScaler and plain.cur_scale == 1
    with pytest.raises(ValueError, match="dynamic_loss_args"):
        CreateLossScaler(torch.float16, 0, True, None)


ARGS = {"init_scale": 8, "scale_window": 2}


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(), (2**32, 1000, 1)),
        (dict(profile=LossScaleProfile.UNFUSED), (2**16, 1000, 0.25)),
        (dict(initial_dynamic_scale=77.0), (77, 1000, 1)),
        (dict(dynamic_loss_args=ARGS), (8, 2, 1)),
        (dict(dynamic_loss_scale=False, static_loss_scale=128), (128, None, None)),
        (dict(low_precision_dtype=torch.bfloat16), (1, None, None)),
    ],
)
def test_loss_scale_config_resolves_defaults(given, expected):
    defaults = {"low_precision_dtype": torch.float16, "static_loss_scale": 1.0}
    defaults |= {"dynamic_loss_args": None, "dynamic_loss_scale": True}
    config = LossScaleConfig(**{**defaults, **given})
    assert (config.cur_scale, config.scale_window, config.min_loss_scale) == expected
    assert config.use_grad_scaling == (config.low_precision_dtype == torch.float16)
