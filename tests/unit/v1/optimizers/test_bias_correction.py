"""Adam without bias correction, from the configuration, against the formula."""

from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.zero.units.partial_offload import DevicePart
from deepspeed.utils import safe_get_full_fp32_param
from unit.common import DistributedTest
from unit.models import config_of
from unit.one_process import placed, train
from unit.v1.fp16.test_dynamic_scaling import Net
from unit.v1.looping import each

RATE, BETAS, EPS, DECAY = 0.05, (0.8, 0.95), 1e-4, 0.2
HOST: dict[str, Any] = {"device": "cpu"}
# Ways to keep the state, and the stages that have them.
WAYS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "device": ({}, (0, 1, 2, 3)),
    "host": ({"offload_optimizer": HOST}, (1, 2, 3)),
    "both": ({"offload_optimizer": {**HOST, "ratio": 0.5}}, (3,)),
}
KINDS = [(stage, way) for way, (_, stages) in WAYS.items() for stage in stages]


def make_engine(stage: int, way: str, precision: str, adam_w_mode: bool) -> Any:
    params = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    params |= {"bias_correction": False, "adam_w_mode": adam_w_mode}
    more: dict[str, Any] = {"optimizer": {"type": "Adam", "params": params}}
    if precision == "fp16":
        more["fp16"] = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    zero = {"reduce_bucket_size": 5, **WAYS[way][0]}
    config = config_of(stage, 1, precision=precision, **{"zero_optimization": zero, **more})
    return deepspeed.initialize(model=Net(), config=config)[0]


def one_step(engine: Any, step: int, is_bad: bool = False) -> None:
    """One row on each rank, of which the gradient is the mean, whatever the weights are."""
    value = float("inf") if is_bad and dist.get_rank() == 1 else 1.0 + dist.get_rank() + step
    train(engine, [placed(engine, torch.full((1, 5), value))])


def by_formula(gradients: list[float], adam_w_mode: bool) -> torch.Tensor:
    """The weight after steps on these gradients, in double precision."""
    weight = torch.arange(5.0, dtype=torch.float64)
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for gradient in gradients:
        grad = torch.full_like(weight, gradient)
        if adam_w_mode:
            weight = weight * (1 - RATE * DECAY)
        else:
            grad = grad + DECAY * weight
        first = BETAS[0] * first + (1 - BETAS[0]) * grad
        second = BETAS[1] * second + (1 - BETAS[1]) * grad.square()
        weight = weight - RATE * first / (second.sqrt() + EPS)
    return weight


def weight_of(engine: Any) -> torch.Tensor:
    return safe_get_full_fp32_param(engine.module.weight).double()


class TestWithoutBiasCorrection(DistributedTest):
    world_size = 2

    @each(kind=KINDS, precision=("fp32", "bf16", "fp16"), adam_w_mode=(True, False))
    def test_the_weights_are_those_of_the_formula(
        self, kind: tuple[int, str], precision: str, adam_w_mode: bool
    ) -> None:
        # Kills: a moment that is divided; a count that a step moves which the device skips, or
        # that stays at infinity; decay of the other Adam.
        with simulate():
            engine = make_engine(*kind, precision, adam_w_mode)
            for step in range(4):
                one_step(engine, step, is_bad=precision == "fp16" and step == 1)
            assert engine.skipped_steps == int(precision == "fp16")
            taken = [0, 2, 3] if precision == "fp16" else range(4)
            wanted = by_formula([1.5 + step for step in taken], adam_w_mode)
            torch.testing.assert_close(weight_of(engine), wanted, rtol=1e-5, atol=1e-6)
            counts = {int(state["step"]) for state in engine.optimizer.state.values()}
            assert counts == {len(taken)}
            engine.destroy()

    @pytest.mark.parametrize("stage", [0, 2, 3])
    def test_a_loaded_run_goes_on_by_the_formula(self, stage: int, tmp_path: Path) -> None:
        # Kills: a correction that comes back with the state of a file, or with its groups.
        with simulate():
            engine = make_engine(stage, "device", "bf16", adam_w_mode=True)
            for step in range(2):
                one_step(engine, step)
            engine.save_checkpoint(str(tmp_path))
            engine.destroy()
            engine = make_engine(stage, "device", "bf16", adam_w_mode=True)
            engine.load_checkpoint(str(tmp_path))
            for step in range(2, 4):
                one_step(engine, step)
            wanted = by_formula([1.5 + step for step in range(4)], adam_w_mode=True)
            torch.testing.assert_close(weight_of(engine), wanted, rtol=1e-5, atol=1e-6)
            engine.destroy()

    def test_each_group_says_so_of_both_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a device's part that asks all groups at once, when it is made.
        steps: list[list[bool]] = []

        def noted(self: DevicePart, scaling: Any, step: Any = DevicePart.step) -> None:
            step(self, scaling)
            steps.append([group["bias_correction"] for group in self.optimizer.param_groups])

        monkeypatch.setattr(DevicePart, "step", noted)
        with simulate():
            engine = make_engine(3, "both", "bf16", adam_w_mode=True)
            for is_corrected in (True, False):
                for group in engine.optimizer.param_groups:
                    group["bias_correction"] = is_corrected
                one_step(engine, 0)
            engine.destroy()
        assert steps == [[True], [False]]
