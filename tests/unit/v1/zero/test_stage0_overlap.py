"""Stage 0 with `overlap_comm`: buckets leave during backward, and only the time changes.

And Megatron-LM issue 3670: a wrapper built inside a side-stream context, overlap, two instances.
Gradients are accumulated, and their hooks run, on the side stream, as the accumulation nodes were
made there; the reduction may not start before. The simulated device makes a missing wait wrong.
"""

import functools
import re
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.compiler import blocks_of
from deepspeed.runtime.gradients.observer import GradientObserver
from deepspeed.runtime.streams import SideStream
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.models import config_of, drawn, seeded
from unit.one_process import OneProcess, go_through
from unit.v1.looping import each

LR = 0.125
WIDTH = 6
BLOCKS = 2
BUCKETS = 2 * (2 * BLOCKS + 1)  # a weight fills one, and so does a bias after it
HALF = {"bf16": {"enabled": True}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.inner(x).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def make_net() -> Net:
    return seeded(Net, seed=11)


def rows(index: int, rank: int) -> torch.Tensor:
    return drawn(100 * index + rank, 4, WIDTH)


def make_engine(stage: int = 0, **more: Any) -> Any:
    net = make_net()
    zero = {"overlap_comm": True, "reduce_bucket_size": WIDTH * WIDTH}
    config = config_of(stage, 4, zero_optimization=zero, **more)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def train(engine: Any, steps: int = 2) -> None:
    batches = (rows(index, dist.get_rank()).to(engine.model_dtype) for index in range(steps))
    go_through(engine, batches)


@functools.cache
def reference(steps: int) -> dict[str, torch.Tensor]:
    return OneProcess(make_net(), LR).train(rows, steps)


def compare(engine: Any, tolerance: float = 1e-6, steps: int = 2) -> None:
    wanted = reference(steps).values()
    for param, expected in zip(engine.module.parameters(), wanted, strict=True):
        value = safe_get_full_fp32_param(param) if hasattr(param, "_hp_mapping") else param.detach()
        torch.testing.assert_close(value, expected, rtol=0, atol=tolerance)


class Sent(GradientObserver):
    """Counts the buckets that have left."""

    def __init__(self, engine: Any) -> None:
        self.count = 0
        self._engine = engine
        engine._sequence.observe(self)

    def sent(self, params: Iterable[nn.Parameter]) -> None:
        self.count += 1

    def before_the_last_gradient(self) -> int:
        """How many leave in a backward before the gradient that comes last."""
        seen = []
        engine = self._engine
        handle = engine.module.first.weight.register_hook(lambda grad: seen.append(self.count))
        self.count = 0
        engine.backward(engine(rows(9, dist.get_rank()).to(engine.model_dtype)))
        handle.remove()
        engine.zero_grad()
        return int(seen[0])


class TestOverlap(DistributedTest):
    world_size = 2

    @each(block=({}, HALF), device=(False, True))
    def test_buckets_leave_during_backward(self, block: dict[str, Any], device: bool) -> None:
        # Kills: a reduction that begins when backward is over, one collective per parameter, a
        # bucket that is sent twice.
        with simulate(backward_streams=2) if device else nullcontext():
            with check_streams() if device else nullcontext():
                engine = make_engine(**block)
                sent = Sent(engine)
                # All but that of the last gradient. The host reduces when backward is over.
                assert sent.before_the_last_gradient() == (BUCKETS - 1 if device else 0)
                assert sent.count == (BUCKETS if device else 0)
                train(engine)
                compare(engine, 5e-3 if block else 1e-6)
                engine.destroy()

    def test_other_backwards(self) -> None:
        # Kills: places in the buffer that stay closed, and buckets on their way that are forgotten,
        # when a backward ends early on all ranks.
        with simulate(), check_streams():
            engine = make_engine()

            def fail(grad: torch.Tensor) -> None:
                raise KeyError("on purpose")

            handle = engine.module.blocks[0].outer.weight.register_hook(fail)
            with pytest.raises(KeyError, match="on purpose"):
                engine.backward(engine(rows(5, dist.get_rank())))
            handle.remove()
            assert engine.module.blocks[1].outer.weight.grad is None
            engine.zero_grad()
            train(engine)
            compare(engine)
            engine.destroy()
        # Kills: a second reduction that starts before the first is complete, or counts it anew.
        with simulate(backward_streams=2), check_streams():
            engine = make_engine()
            engine.backward(engine(rows(0, dist.get_rank())) / 2)
            engine.backward(engine(rows(0, dist.get_rank())) / 2)
            engine.step()
            compare(engine, steps=1)
            engine.destroy()


def test_blocks() -> None:
    # Kills: layers compiled one by one where nothing could be fused, blocks within blocks.
    net = make_net()
    assert blocks_of(net) == list(net.blocks)
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    nested = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)), nn.Linear(2, 2))
    assert blocks_of(nested) == list(nested)[:2]


HOOK_WIDTH, ROWS, STEPS, ACCUMULATION = 8, 3, 2, 2
CONFIGS: dict[str, dict[str, Any]] = {
    "stage 1": config_of(1, ROWS, ACCUMULATION),
    "stage 2": config_of(2, ROWS, ACCUMULATION),
    "BF16_Optimizer": config_of(
        1,
        ROWS,
        ACCUMULATION,
        bf16={"enabled": True, "immediate_grad_update": True},
        data_types={"grad_accum_dtype": "fp32"},
    ),
}


def train_instances(config: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters after training with a wrapper that was built under a side stream."""
    zero = {
        "overlap_comm": True,
        "reduce_bucket_size": HOOK_WIDTH * (HOOK_WIDTH + 1),
        "num_optimizer_instances": 2,
        **config["zero_optimization"],
    }
    device = get_accelerator()
    layers = seeded(lambda: [nn.Linear(HOOK_WIDTH, HOOK_WIDTH) for _ in range(4)], seed=3)
    model = nn.Sequential(*layers)
    side = device.Stream()
    side.wait_stream(device.current_stream())  # the model was made there
    with device.stream(side):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {**config, "zero_optimization": zero}
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        # As Megatron-LM does to hook them: whoever makes an accumulation node decides on which
        # stream its hooks run from then on.
        params = list(model.parameters())
        nodes = [param.expand_as(param).grad_fn.next_functions[0][0] for param in params]
    device.current_stream().wait_stream(side)
    batches = drawn(13 + dist.get_rank(), STEPS, ACCUMULATION, ROWS, HOOK_WIDTH)
    for step in batches.to(params[0].dtype):
        for index, micro in enumerate(step):
            # What the first micro-batch leaves in param.grad the second is added to, by a kernel on
            # the hooks' stream.
            with engine.no_sync() if index == 0 else nullcontext():
                engine.backward(engine(micro).float().square().mean())
            engine.step()
    del nodes
    device.synchronize()
    return [param.detach().float().clone() for param in params]


def deviates(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return any(not torch.allclose(one, other, rtol=1e-6, atol=1e-7) for one, other in pairs)


class TestBuiltUnderASideStream(DistributedTest):
    world_size = 4
    exec_timeout = 120

    @each(name=CONFIGS)
    def test_same_as_without_streams(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: waiting for a stream known at construction, or for the default one.
        expected = train_instances(CONFIGS[name])
        # The checker sees a missing wait in any order; numbers are of each in some configuration.
        with simulate(schedule=list(CONFIGS).index(name) % 2), check_streams():
            assert not deviates(train_instances(CONFIGS[name]), expected)
        if name != "stage 2":
            return
        # Kills: a simulation in which the hooks run on the default stream after all, so that what
        # is above would test nothing.
        with monkeypatch.context() as patch:
            patch.setattr(
                SideStream, "current_stream", lambda self: get_accelerator().default_stream()
            )
            for schedule in range(1, 4):
                with simulate(schedule=schedule), check_streams(raises=False) as checker:
                    is_wrong = deviates(train_instances(CONFIGS[name]), expected)
                report = checker.report()
                assert re.search(r"never waits for <stream \d+>", report), report
                if is_wrong:
                    return
        pytest.fail("no schedule gave a wrong number")
