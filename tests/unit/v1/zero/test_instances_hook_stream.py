"""Megatron-LM issue 3670: a wrapper built inside a side-stream context, overlap, two instances.

Gradients are accumulated, and their hooks run, on the side stream, as the accumulation nodes were
made there; the reduction may not start before. The simulated device makes a missing wait wrong.
"""

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.streams import SideStream
from deepspeed.verify import check_streams
from unit.common import DistributedTest

WIDTH, ROWS, STEPS, ACCUMULATION, LR = 8, 3, 2, 2, 0.1
CONFIGS: dict[str, dict[str, Any]] = {
    "stage 1": {"zero": {"stage": 1}},
    "stage 2": {"zero": {"stage": 2}},
    "BF16_Optimizer": {
        "zero": {"stage": 1},
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def batches() -> torch.Tensor:
    """Shape [steps, accumulation, rows, width]: this rank's."""
    torch.manual_seed(13 + dist.get_rank())
    return torch.randn(STEPS, ACCUMULATION, ROWS, WIDTH)


def train(config: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters after training with a wrapper that was built under a side stream."""
    zero = {
        "overlap_comm": True,
        "reduce_bucket_size": WIDTH * (WIDTH + 1),
        "num_optimizer_instances": 2,
        **config["zero"],
    }
    config = {
        **{key: value for key, value in config.items() if key != "zero"},
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": zero,
    }
    device = get_accelerator()
    model = make_model()
    side = device.Stream()
    side.wait_stream(device.current_stream())  # the model was made there
    with device.stream(side):
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        # As Megatron-LM does to hook them: whoever makes an accumulation node decides on which
        # stream its hooks run from then on.
        nodes = [
            param.expand_as(param).grad_fn.next_functions[0][0] for param in model.parameters()
        ]
    device.current_stream().wait_stream(side)
    for step in batches().to(next(model.parameters()).dtype):
        for index, micro in enumerate(step):
            # What the first micro-batch leaves in param.grad the second is added to, by a kernel on
            # the hooks' stream.
            with engine.no_sync() if index == 0 else nullcontext():
                engine.backward(engine(micro).float().square().mean())
            engine.step()
    del nodes
    device.synchronize()
    return [param.detach().float().clone() for param in model.parameters()]


def deviates(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return any(
        not torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(found, expected, strict=True)
    )


class TestBuiltUnderASideStream(DistributedTest):
    """Two instances of two ranks."""

    world_size = 4
    exec_timeout = 120

    def test_same_as_without_streams(self) -> None:
        # Kills: waiting for a stream known at construction, or for the default one; see below for
        # the proof that it does.
        for name, config in CONFIGS.items():
            expected = train(config)
            for schedule in range(2):
                with simulate(schedule=schedule), check_streams():
                    assert not deviates(train(config), expected), (name, schedule)

    @pytest.mark.parametrize("stage", ["stage 1", "stage 2"])
    def test_waiting_for_the_default_stream_is_found(
        self, stage: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a simulation in which the hooks run on the default stream after all, so that the
        # test above would test nothing.
        expected = train(CONFIGS[stage])
        monkeypatch.setattr(
            SideStream, "current_stream", lambda self: get_accelerator().default_stream()
        )
        for schedule in range(1, 4):
            with simulate(schedule=schedule), check_streams(raises=False) as checker:
                is_wrong = deviates(train(CONFIGS[stage]), expected)
            assert re.search(r"never waits for <stream \d+>", checker.report()), checker.report()
            if is_wrong:
                return
        pytest.fail("no schedule gave a wrong number")
