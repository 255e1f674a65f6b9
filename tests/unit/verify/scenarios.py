"""Short trainings (the contract suite's model, SGD, other data on every rank) with one guard on,
run by name on every rank; they return what the guard found.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.utils import safe_get_full_fp32_params
from unit import models
from unit.static_gradients import StaticGradients
from unit.v1.contract import reference
from unit.v1.contract.model import ROWS, make_model, micro_batch, parameter_groups
from unit.verify import file_scenarios, gather_scenarios, pipe_scenarios, zero3_scenarios
from unit.verify.command_faults import on_ranks
from unit.verify.guards import raised, simulated, watched

STEPS = 2
NAN_OVER_SEEDS = "oracle: a NaN over 7 seeds and 8 schedules"
ACCUMULATION = 2
SMALL_BUCKET = 300
# Bounds that look for faults, not rounding: relative to a parameter's moves and its size.
TOLERANCE = {"fp32": (1e-5, 1e-6), "bf16": (0.1, 2.0**-8), "fp16": (0.02, 2.0**-11)}


def config_of(
    precision: str = "fp32", accumulation: int = ACCUMULATION, *, stage: int, **zero: Any
) -> dict[str, Any]:
    """A configuration with many small buckets."""
    small = {"reduce_bucket_size": SMALL_BUCKET, "allgather_bucket_size": SMALL_BUCKET * 10}
    dtype, _, accumulate_in = precision.partition("+")
    more: dict[str, Any] = {"zero_optimization": {**small, **zero}}
    if accumulate_in:
        more["data_types"] = {"grad_accum_dtype": accumulate_in}
    config = models.config_of(stage, ROWS, accumulation, dtype, **more)
    if dtype == "fp16":
        config["fp16"].update(initial_scale_power=4, loss_scale_window=1, hysteresis=1)
    return config


def immediate(config: dict[str, Any]) -> dict[str, Any]:
    """The same, with gradients that join the accumulator from their hooks."""
    return {**config, "bf16": {"enabled": True, "immediate_grad_update": True}}


def on_host_adam(config: dict[str, Any]) -> dict[str, Any]:
    """The same with Adam, which rounds on the host what is sent to the device."""
    return {**config, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}


def train(config: dict[str, Any], side_stream: bool = False) -> dict[str, torch.Tensor]:
    """Train for a few steps, on a stream that is not the default one if `side_stream`; returns the
    fp32 parameters by name, whole, on every rank.
    """
    accelerator = get_accelerator()
    deepspeed.init_distributed(dist_backend="gloo")
    model = make_model()
    optimizer = None
    if "optimizer" not in config:
        optimizer = torch.optim.SGD(parameter_groups(model), lr=reference.LEARNING_RATE)
    with _side_stream() if side_stream else nullcontext():
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for step in range(STEPS):
            for micro in range(config["gradient_accumulation_steps"]):
                loss = engine(*micro_batch(step, dist.get_rank(), micro, dist.get_world_size()))
                engine.backward(loss)
                del loss
                engine.step()
        result = _masters(engine)
        accelerator.synchronize()
    return result


def _side_stream() -> Any:
    accelerator = get_accelerator()
    stream = accelerator.Stream()
    stream.wait_stream(accelerator.current_stream())
    return accelerator.stream(stream)


def _masters(engine: Any) -> dict[str, torch.Tensor]:
    params = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    values = list(params.values())
    if engine.zero_optimization_stage() or engine.bfloat16_enabled():
        values = safe_get_full_fp32_params(values)
    return {name: value.detach().clone() for name, value in zip(params, values, strict=True)}


def checker(config: dict[str, Any], side_stream: bool = False) -> list[str]:
    """What the stream checker finds on the simulated device."""
    with watched() as found:
        train(config, side_stream)
    return found


def checkpoints_on_host() -> list[str]:
    """What the stream checker finds of checkpoints on the host, in a forward of two streams."""
    with watched() as found:
        accelerator = get_accelerator()
        deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)
        main, side = accelerator.current_stream(), accelerator.Stream()
        x = torch.ones(100, requires_grad=True)
        for layer in range(8):
            stream, other = (main, side) if layer % 4 < 2 else (side, main)
            stream.wait_stream(other)
            with accelerator.stream(stream):
                x = deepspeed.checkpointing.checkpoint(torch.sin, x)
        main.wait_stream(side)
        x.sum().backward()
        accelerator.synchronize()
        deepspeed.checkpointing.reset()
    return found


def static_gradients() -> list[str]:
    """What the stream checker finds when each backward writes where the one before did."""
    config = {**config_of(stage=2, overlap_comm=True), "optimizer": {"type": "SGD"}}
    with watched(backward_streams=0) as found:
        deepspeed.init_distributed(dist_backend="gloo")
        layers = [StaticGradients(torch.nn.Linear(16, 16)) for _ in range(3)]
        engine, *_ = deepspeed.initialize(model=torch.nn.Sequential(*layers), config=config)
        for _ in range(STEPS * ACCUMULATION):
            engine.backward(engine(torch.ones(ROWS, 16)).square().mean())
            engine.step()
        engine.destroy()
    return found


def guard(kind: str, config: dict[str, Any], on_device: bool = False) -> list[str]:
    """What the gradient ledger or the collective intent check finds."""
    with simulated() if on_device else nullcontext():
        return raised(kind, partial(train, config))


def oracle(config: dict[str, Any], precision: str, on_device: bool = False) -> list[str]:
    """Which parameters are not what one process gets that sees the whole batch."""
    with simulated() if on_device else nullcontext():
        actual = train(config)
    world = int(os.environ["WORLD_SIZE"])
    accumulation = config["gradient_accumulation_steps"]
    expected = reference.fp32_run(STEPS, accumulation, False, world)[-1].params
    start = {name: param.detach() for name, param in make_model().named_parameters()}
    of_the_way, of_the_value = TOLERANCE[precision]
    found = []
    for name, value in actual.items():
        moved = (expected[name] - start[name]).norm()
        error = (value - expected[name]).norm()
        if not error <= of_the_way * moved + of_the_value * start[name].norm():
            should = f"it should have moved by {float(moved):.3g}"
            found.append(f"oracle: {name} is off by {float(error):.3g}, {should}")
    return found


def nan_norms(seeds: int, schedules: int) -> list[str]:
    """Runs in which a gradient norm was not finite, so that the step was skipped: short trainings
    on the device with each seed, under the default schedule and another (DeepSpeed issue 8061).

    Two layers share a bucket and gradients are accumulated on three streams.
    """
    deepspeed.init_distributed(dist_backend="gloo")
    layer_numel = 8 * 8 + 8
    zero = {"overlap_comm": True, "reduce_bucket_size": 2 * layer_numel}
    config = models.config_of(2, 4, zero_optimization=zero)
    found = []
    others = ((seed, 1 + seed % (schedules - 1)) for seed in range(seeds))
    for seed, schedule in (*((seed, 0) for seed in range(seeds)), *others):
        with simulate(seed=seed, schedule=schedule, backward_streams=3):
            torch.manual_seed(seed)
            model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
            optimizer = torch.optim.SGD(model.parameters(), lr=reference.LEARNING_RATE)
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
            for _ in range(2):
                engine.backward(engine(torch.randn(4, 8)).square().mean())
                engine.step()
            skipped = engine.skipped_steps
            engine.destroy()
        if skipped:
            found.append(f"seed {seed}, schedule {schedule}: the gradient norm is not finite")
    return found


_OFFLOAD = {"device": "cpu", "pin_memory": True}
_STAGE_1 = config_of(stage=1, overlap_comm=True)
_STAGE_2 = config_of(stage=2, overlap_comm=True)
_BF16 = config_of("bf16+fp32", stage=1)
_STREAMS = {
    "stage 1": _STAGE_1,
    "stage 1, no overlap": config_of(stage=1, overlap_comm=False),
    "stage 2": _STAGE_2,
    "stage 2, no overlap": config_of(stage=2, overlap_comm=False),
    "stage 2, new buffers": config_of(stage=2, overlap_comm=True, contiguous_gradients=False),
    "stage 2, offload": config_of(stage=2, overlap_comm=True, offload_optimizer=_OFFLOAD),
    "stage 1, bf16, Adam on the host": on_host_adam(
        config_of("bf16", stage=1, offload_optimizer=_OFFLOAD)
    ),
    "BF16_Optimizer": _BF16,
    "BF16_Optimizer, from hooks": immediate(_BF16),
    "stage 0, overlapped": config_of(stage=0, overlap_comm=True),
}
_GUARDED = {
    "ledger: stage 1": _STAGE_1,
    "ledger: stage 1, no overlap": config_of(stage=1, overlap_comm=False),
    "ledger: stage 2": _STAGE_2,
    "ledger: stage 2, 2 instances": config_of(stage=2, num_optimizer_instances=2),
    "ledger: BF16_Optimizer": _BF16,
    "ledger: stage 0, overlapped": config_of(stage=0, overlap_comm=True),
    "ledger: stage 0, no accumulation": config_of(accumulation=1, stage=0),
    "ledger: stage 2 on the device": _STAGE_2,
    "intent: stage 2 on the device": _STAGE_2,
    "intent: stage 1": config_of(stage=1),
    "intent: stage 2": _STAGE_2,
}
_VERIFY = {"ledger": {"ledger": True}, "intent": {"collectives": True, "collectives_timeout": 10}}

SCENARIOS: dict[str, Callable[[], list[str]]] = {
    **{f"streams: {name}": partial(checker, config) for name, config in _STREAMS.items()},
    "streams: stage 2 on a side stream": partial(checker, _STAGE_2, True),
    "streams: checkpoints on the host": checkpoints_on_host,
    "streams: static gradients": static_gradients,
    **{
        name: partial(guard, kind, {**config, "verify": _VERIFY[kind]}, name.endswith("device"))
        for name, config in _GUARDED.items()
        for kind in [name[:6]]
    },
    "oracle: stage 1": partial(oracle, _STAGE_1, "fp32"),
    "oracle: BF16_Optimizer": partial(oracle, _BF16, "bf16"),
    "oracle: fp16": partial(oracle, config_of("fp16", stage=1), "fp16"),
    NAN_OVER_SEEDS: partial(nan_norms, 7, 8),
    **file_scenarios.SCENARIOS,
    **gather_scenarios.SCENARIOS,
    **pipe_scenarios.SCENARIOS,
    **zero3_scenarios.SCENARIOS,
}


def world_of(scenario: str) -> int:
    """On how many ranks it runs."""
    if scenario.endswith(", 1 rank"):
        return 1
    return 4 if scenario.endswith(", 4 ranks") else 2


def run(scenario: str) -> list[str]:
    """Run one by name."""
    torch.set_num_threads(1)
    guard, _, setup = scenario.partition(": ")
    return on_ranks(setup) if guard == "command" else SCENARIOS[scenario]()
