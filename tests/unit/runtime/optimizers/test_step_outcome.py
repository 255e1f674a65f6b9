"""Gradients scaled and steps skipped without the host's knowing: what each optimizer leaves."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from unit.models import drawn

from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion
from deepspeed.runtime.gradients.norm import clip_factor
from deepspeed.runtime.optimizers.step_outcome import GradientScaling, StepOutcome, takes_scaling
from deepspeed.runtime.streams import LateNumber

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
TAKERS: dict[str, Make] = {
    "FusedAdam": lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1),
    "FusedAdam, moments as they are": lambda p: FusedAdam(p, lr=0.1, bias_correction=False),
    "FusedLion": lambda p: FusedLion(p, lr=0.1, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
}
OTHERS: dict[str, Make] = {
    "FusedLamb": lambda p: FusedLamb(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
}


def fused_adagrad(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.1, fused=True)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1.0, 1.0, 7))


# Its fused step takes a scale in newer torch only; torch says so by this attribute.
_takes = hasattr(fused_adagrad([parameter()]), "_step_supports_amp_scaling")
(TAKERS if _takes else OTHERS)["Adagrad"] = fused_adagrad


def scaled_step(
    optimizer: torch.optim.Optimizer, step: int, scaling: GradientScaling, bad: bool = False
) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = drawn(step, 7)
    if bad:
        param.grad[3] = math.inf
    scaling.step(optimizer, [param.grad])


def everything(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    (param,) = optimizer.param_groups[0]["params"]
    state = optimizer.state[param]
    return [param.detach(), *(state[name] for name in sorted(state))]


@pytest.mark.parametrize("name", TAKERS)
def test_a_factor_on_the_device_scales_as_a_number_does(name: str) -> None:
    # Kills: multiplying by grad_scale where it divides, and a factor that is forgotten.
    there, here = TAKERS[name]([parameter()]), TAKERS[name]([parameter()])
    assert takes_scaling(there)
    for step in range(3):
        found_inf = torch.tensor(0.0) if step else None
        scaled_step(there, step, GradientScaling(torch.tensor(0.3), found_inf))
        scaled_step(here, step, GradientScaling(0.3))
    for a, b in zip(everything(there), everything(here), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert not hasattr(there, "grad_scale") and not hasattr(there, "found_inf")


@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25), 1.0])
@pytest.mark.parametrize("name", TAKERS)
def test_a_step_that_is_skipped_changes_and_counts_nothing(name: str, factor: Any) -> None:
    # Kills: an update with a gradient of zero, which still decays weights; infinity times zero.
    optimizer = TAKERS[name]([parameter()])
    scaled_step(optimizer, 0, GradientScaling(1.0))
    before = copy.deepcopy(everything(optimizer))
    scaled_step(optimizer, 1, GradientScaling(factor, torch.tensor(1.0)), bad=True)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(optimizer), strict=True))
    scaled_step(optimizer, 2, GradientScaling(factor, torch.tensor(0.0)))
    assert not torch.equal(before[0], everything(optimizer)[0])


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_not_asked_to_skip(name: str) -> None:
    # Kills: a skipped step that an optimizer takes because it knows nothing of found_inf.
    optimizer = OTHERS[name]([parameter()])
    assert not takes_scaling(optimizer)
    reference = OTHERS[name]([parameter()])
    scaled_step(optimizer, 0, GradientScaling(torch.tensor(0.5)))
    scaled_step(reference, 0, GradientScaling(0.5))
    for a, b in zip(everything(optimizer), everything(reference), strict=True):
        assert a == b if isinstance(a, int) else torch.equal(a, b)


def test_groups_say_what_the_step_takes() -> None:
    # Kills: believing the constructor: torch refuses both tensors outside its fused kernels.
    optimizer = FusedAdam([parameter()])
    optimizer.param_groups[0]["fused"] = None
    assert not takes_scaling(optimizer)


def test_sgd_makes_its_momentum_in_a_step_that_is_not_skipped() -> None:
    # Kills: uninitialized momentum, which torch keeps when the first step is skipped.
    optimizer = torch.optim.SGD([parameter()], lr=0.1, momentum=0.9, fused=True)
    assert not takes_scaling(optimizer)
    scaled_step(optimizer, 0, GradientScaling(1.0))
    assert takes_scaling(optimizer)


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 3.0, math.inf, math.nan])
def test_host_and_device_decide_alike(norm: float) -> None:
    # Kills: a minimum that passes NaN on, by which every gradient would become NaN; a host that
    # counts a skip where the device took the step, or the other way round.
    assert float(clip_factor(torch.tensor(norm), 1.0)) == pytest.approx(clip_factor(norm, 1.0))
    skipped = not math.isfinite(norm)
    outcome = StepOutcome(torch.tensor(norm), 2.0, skips=True)
    found_inf = outcome.found_inf()
    assert found_inf is not None and bool(found_inf) == skipped == outcome.is_skipped
    unchecked = StepOutcome(torch.tensor(norm), 2.0, skips=False)
    assert unchecked.found_inf() is None and not unchecked.is_skipped


def test_a_late_number_is_waited_for_alone() -> None:
    # Kills: reading before the copy has arrived, and waiting for all that was issued since.
    with simulate() as sim:
        late, number = LateNumber(), torch.ones(()) * 3
        late.post(number)
        issued = sim.current_stream().issued
        number.add_(1)
        assert late.read() == 3.0
        assert sim.current_stream().done == issued
        late.post(number)
        assert late.read() == 4.0
    with pytest.raises(RuntimeError, match="post"):
        LateNumber().read()
