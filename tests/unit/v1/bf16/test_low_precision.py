"""Masters, gradients and moments in bf16 or fp16: bit for bit what a plain loop makes of the same
gradients, which every sum here holds exactly.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.gradients.norm import clip_factor
from deepspeed.runtime.sharding import low_precision
from deepspeed.runtime.sharding.low_precision import round_at_random
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from unit.common import DistributedTest
from unit.models import config_of, seeded
from unit.v1.looping import each_pair

# What is true in the block "bf16".
MASTERS = ("bf16_master_weights_and_grads",)
NARROW = (*MASTERS, "bf16_optimizer_states")
RANDOM = (*NARROW, "stochastic_rounding")
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS, RANKS, MICRO_BATCHES, CLIP = 4, 2, 2, 1.0
ADAM = {"lr": 0.01, "weight_decay": 0.1}
State = dict[str, torch.Tensor]


class Products(nn.Module):
    """Parameters of odd sizes, whose gradients are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(37, 5))
        self.bias = nn.Parameter(torch.randn(13))

    def forward(self, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The sum of products with `weight` `[37, 5]` and `bias` `[13]`."""
        return (self.weight.float() * weight).sum() + (self.bias.float() * bias).sum()


def batch(step: int, number: int) -> dict[str, torch.Tensor]:
    """Of integers: no sum of a few of them is rounded."""
    drawn = torch.Generator().manual_seed(100 * step + number)
    shapes = {name: param.shape for name, param in Products().named_parameters()}
    return {name: torch.randint(-8, 9, shape, generator=drawn) for name, shape in shapes.items()}


def random_bits(name: str, numel: int, step: int) -> np.ndarray:
    """SplitMix64's finalizer, in unsigned integers."""
    base = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    start = np.array([(base + step * 0x9E3779B97F4A7C15) % 2**64], dtype=np.uint64)
    z = start + np.arange(numel, dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def rounded(
    value: torch.Tensor, bits: np.ndarray | None, place: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    if bits is None:
        return value.to(dtype)
    own = (bits >> np.uint64(16 * place)) & np.uint64(0xFFFF)
    words = value.numpy().reshape(-1).view(np.uint32) + own.astype(np.uint32)
    upper = torch.from_numpy((words & np.uint32(0xFFFF0000)).view(np.float32))
    return upper.view(value.shape).to(torch.bfloat16)


def one_process(
    adam: Callable[..., torch.optim.Optimizer],
    how: Sequence[str],
    norms: Sequence[float] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> State:
    """Masters and moments after all steps, each rounded once in a step; gradients are clipped by
    these `norms`.
    """
    params = {name: p.detach().to(dtype) for name, p in seeded(Products).named_parameters()}
    states: dict[str, dict[str, Any]] = {name: {} for name in params}
    for step in range(STEPS):
        batches = [batch(step, number) for number in range(RANKS * MICRO_BATCHES)]
        for name, stored in params.items():
            param = nn.Parameter(stored.float())
            param.grad = torch.stack([one[name] for one in batches]).float().mean(0)
            if norms:
                param.grad *= clip_factor(norms[step], CLIP)
            optimizer = adam([param], **ADAM)
            widened = {
                key: value.float() if key in MOMENTS else value
                for key, value in states[name].items()
            }
            optimizer.state[param].update(widened)
            optimizer.step()
            bits = None
            if "stochastic_rounding" in how:
                bits = random_bits(name, param.numel(), step)
            params[name] = rounded(param.detach(), bits, 0, dtype)
            states[name] = dict(optimizer.state[param])
            if "bf16_optimizer_states" in how:
                for place, key in enumerate(MOMENTS, 1):
                    states[name][key] = rounded(states[name][key], bits, place)
    moments = {
        f"{name}.{key}": states[name][key].float().view(params[name].shape)
        for name in params
        for key in MOMENTS
    }
    return {**{name: param.float() for name, param in params.items()}, **moments}


def start(stage: int, how: Sequence[str], clip: float = 0.0, **zero: Any) -> Any:
    config = config_of(
        stage,
        1,
        MICRO_BATCHES,
        optimizer={"type": "Adam", "params": ADAM},
        gradient_clipping=clip,
        bf16=dict.fromkeys(("enabled", *how), True),
        zero_optimization=zero,
    )
    engine, *_ = deepspeed.initialize(model=seeded(Products), config=config)
    return engine


# Several pieces, of which the last is short, and parameters across their ends.
@mock.patch.object(low_precision, "HOST_NUMEL", 24)
def train(engine: Any, first: int = 0, end: int = STEPS) -> list[float]:
    """Train these steps; their gradients' norms."""
    rank, norms = engine.global_rank, []
    for step in range(first, end):
        for number in range(MICRO_BATCHES):
            engine.backward(engine(**batch(step, RANKS * number + rank)))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def state_of(engine: Any) -> State:
    found = {}
    for name, param in engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(param).cpu()
        for key in MOMENTS:
            found[f"{name}.{key}"] = safe_get_full_optimizer_state(param, key).cpu()
    return found


def check_equal(found: State, wanted: State) -> None:
    for name, value in wanted.items():
        # torch's fused Adam rounds fp32 otherwise where a vector is not full; 16 bits hide it.
        shorter = (value.bfloat16(), value.half())
        is_short = any(torch.equal(value, short.float()) for short in shorter)
        assert torch.allclose(found[name], value, rtol=0 if is_short else 2e-7, atol=0), name


def offloaded(device: str, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"offload_optimizer": {"device": device, **keys}}}


class TestLowPrecision(DistributedTest):
    world_size = RANKS

    @each_pair(
        stage=(1, 2, 3), how=(MASTERS, NARROW, RANDOM), offload=("none", "cpu"), clip=(0.0, CLIP)
    )
    def test_bits(self, stage: int, how: tuple[str, ...], offload: str, clip: float) -> None:
        # Kills: two roundings, a gradient that is clipped in bf16, a moment in another type, a
        # count of steps per piece, bits by the place in a shard, one draw for two values.
        adam = FusedAdam if offload == "none" else DeepSpeedCPUAdam
        engine = start(stage, how, clip, offload_optimizer={"device": offload})
        norms = train(engine)
        check_equal(state_of(engine), one_process(adam, how, norms if clip else ()))
        engine.destroy()

    @each_pair(stage=(1, 2, 3), how=(MASTERS, RANDOM))
    def test_a_checkpoint(self, stage: int, how: tuple[str, ...], tmpdir: str) -> None:
        # Kills: state that comes back in another type, random bits that begin anew.
        whole = one_process(FusedAdam, how)
        engine = start(stage, how)
        train(engine, end=2)
        tag = f"{stage} {len(how)}"
        engine.save_checkpoint(tmpdir, tag=tag)
        weights = {name: value for name, value in state_of(engine).items() if "exp" not in name}
        engine.destroy()
        resumed = start(stage, how)
        resumed.load_checkpoint(tmpdir, tag=tag)
        train(resumed, first=2)
        check_equal(state_of(resumed), whole)
        resumed.destroy()
        check_equal(get_fp32_state_dict_from_zero_checkpoint(tmpdir, tag), weights)

    def test_refusals(self, tmpdir: str) -> None:
        # Each is a fault that would train something else.
        rows: tuple[tuple[str, int, tuple[str, ...], dict[str, Any]], ...] = (
            ("without bf16.bf16_master", 2, ("bf16_optimizer_states",), {}),
            ("without bf16.bf16_master", 2, ("stochastic_rounding",), {}),
            ("use stage 1, 2 or 3", 0, MASTERS, {}),
            ("leave it out", 1, MASTERS, {"data_types": {"grad_accum_dtype": "fp32"}}),
            ("leave one", 1, MASTERS, {"reproducibility": {"world_size_invariant": True}}),
            ("Lamb", 1, MASTERS, {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}),
            ("ratio below 1.0", 3, MASTERS, offloaded("cpu", ratio=0.5)),
            ("files are not", 1, RANDOM, offloaded("nvme", nvme_path=str(tmpdir))),
        )
        for words, stage, how, more in rows:
            given = {"optimizer": {"type": "Adam", "params": ADAM}, **more}
            config = config_of(stage, 1, 1, bf16=dict.fromkeys(("enabled", *how), True), **given)
            with pytest.raises(DeepSpeedConfigError, match=words):
                deepspeed.initialize(model=seeded(Products), config=config)


class TestFp16(DistributedTest):
    world_size = RANKS

    def test_a_step_that_is_skipped(self) -> None:
        # Kills: moments or masters of a skipped step, masters in another type.
        config = config_of(
            2,
            1,
            MICRO_BATCHES,
            optimizer={"type": "Adam", "params": ADAM},
            fp16={"enabled": True, "loss_scale": 8, "fp16_master_weights_and_grads": True},
        )
        engine, *_ = deepspeed.initialize(model=seeded(Products), config=config)
        train(engine, end=2)
        before = state_of(engine)
        engine.backward(engine(torch.full((37, 5), float("inf")), torch.zeros(13)))
        engine.step()
        engine.backward(engine(**batch(0, engine.global_rank)))
        engine.step()
        assert engine.skipped_steps == 1
        check_equal(state_of(engine), before)
        train(engine, first=2)
        check_equal(state_of(engine), one_process(FusedAdam, (), dtype=torch.float16))
        engine.destroy()


def test_rounding_at_random() -> None:
    # Kills: a bias, NaNs that become numbers (CUDA's has all bits set), values that bf16 holds.
    value = torch.full((1 << 16,), 1.0 + 3 / 1024)  # bf16 holds 1 and 1 + 8 / 1024
    target = torch.empty_like(value, dtype=torch.bfloat16)
    bits = torch.arange(1 << 16, dtype=torch.int32)
    round_at_random(target, value, bits)
    assert target.float().mean().item() == value[0].item()
    words = [0x7FFFFFFF, -1, 0x7F800000, -0x00800000, 0x3F800000, -0x40800000, 0]
    special = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    target = torch.empty_like(special, dtype=torch.bfloat16)
    round_at_random(target, special, torch.full_like(bits[: len(words)], 0xFFFF))
    assert torch.equal(target.float().nan_to_num(7.0), special.nan_to_num(7.0))
