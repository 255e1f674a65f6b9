"""Stream order on real devices: races forced by slow kernels, hooks with a stream of their own,
and the checker that finds both; without a device on the simulated one.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.streams import SideStream
from deepspeed.verify import StreamRaceError, check_streams
from unit.common import DistributedTest
from unit.models import config_of, drawn, linears, sgd
from unit.one_process import OneProcess, mean_square, placed, train

WIDTH, LAYERS, ROWS, LR = 64, 6, 5, 0.1
SLEEP_CYCLES = 400_000_000  # about a quarter of a second, many times what a step takes

no_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_model() -> nn.Sequential:
    return linears(LAYERS, WIDTH, seed=3)


def config(stage: int, **zero: Any) -> dict[str, Any]:
    zero = {"overlap_comm": True, "reduce_bucket_size": 2 * WIDTH * (WIDTH + 1), **zero}
    more = {"optimizer": sgd(LR), "gradient_clipping": 1.0}
    return config_of(stage, ROWS, zero_optimization=zero, **more)


def train_steps(engine: Any, steps: int) -> None:
    x = drawn(dist.get_rank(), ROWS, WIDTH)
    train(engine, (placed(engine, x) for _ in range(steps)), mean_square)


def arrives_late(side: Any, kept: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A gradient hook: NaN for long before it is written, on `side`, which reads `kept`."""

    def hook(grad: torch.Tensor) -> torch.Tensor:
        accelerator = get_accelerator()
        side.wait_stream(accelerator.current_stream())
        with accelerator.stream(side):
            late = torch.full_like(grad, float("nan"))
            side.synchronize()
            if torch.cuda.is_available():
                torch.cuda._sleep(SLEEP_CYCLES)
            late.copy_(grad)
        kept.append(grad)
        return late

    return hook


def one_step(
    settings: dict[str, Any], late: Callable[[int], bool], under_side: bool = False
) -> list[torch.Tensor]:
    """Parameters after one step, on the host; `late`: those of a layer come on the side stream."""
    accelerator = get_accelerator()
    model = make_model()
    side = accelerator.Stream()
    side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side) if under_side else nullcontext():
        engine, *_ = deepspeed.initialize(model=model, config=settings)
    side.wait_stream(accelerator.current_stream())
    slow = [
        param for index, layer in enumerate(model) if late(index) for param in layer.parameters()
    ]
    with accelerator.stream(side):
        # Whoever makes an accumulation node decides on which stream it, and its hooks, run.
        nodes = [param.expand_as(param).grad_fn.next_functions[0][0] for param in slow]
    kept: list[torch.Tensor] = []
    for param in slow:
        param.register_hook(arrives_late(side, kept))
    accelerator.current_stream().wait_stream(side)
    train_steps(engine, 1)
    accelerator.synchronize()
    del nodes, kept
    result = [param.detach().cpu().clone() for param in model.parameters()]
    engine.destroy()
    return result


def deviates(found: list[torch.Tensor]) -> bool:
    expected = OneProcess(make_model(), LR, mean_square).train(
        lambda _, rank: drawn(rank, ROWS, WIDTH), steps=1
    )
    pairs = zip(found, expected.values(), strict=True)
    return not all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in pairs)


def first_in_its_bucket(layer: int) -> bool:
    """Buckets fill from the model's end: the other layer completes it on the default stream."""
    return layer % 2 == 1


def every_layer(layer: int) -> bool:
    return True


def undo_fix_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for = SideStream.wait_for
    monkeypatch.setattr(
        SideStream, "wait_for", lambda self, producers: wait_for(self, {self.current_stream()})
    )


def undo_fix_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SideStream, "current_stream", lambda self: get_accelerator().default_stream()
    )


UNDONE = [
    pytest.param(undo_fix_1, first_in_its_bucket, False, id="fix1-one-producer-only"),
    pytest.param(undo_fix_2, every_layer, True, id="fix2-default-stream"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 2])
class Undone(DistributedTest):
    requires_cuda_env = True
    zero: dict[str, Any] = {}

    def test(
        self, stage: int, undo: Any, late: Any, under_side: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = config(stage, **self.zero)
        assert not deviates(one_step(settings, late, under_side))
        undo(monkeypatch)
        assert deviates(one_step(settings, late, under_side))


@pytest.mark.parametrize("undo, late, under_side", UNDONE)
class TestSlowProducer(Undone):
    # Kills, on a device: a reduction that waits for one producer only, or for the default stream.
    world_size = 1


class TestSlowProducerTwoDevices(TestSlowProducer):
    # Kills the same with NCCL's own stream behind the reduction stream.
    world_size = 2


@pytest.mark.parametrize("undo, late, under_side", UNDONE[1:])
class TestTwoInstances(Undone):
    # Kills, on devices: the situation of Megatron-LM issue 3670 (wrapper built under a side stream,
    # overlap, two instances).
    zero = {"num_optimizer_instances": 2}


@pytest.mark.gpu
@no_device
@pytest.mark.parametrize("node_under_side", [False, True])
def test_a_hook_runs_where_its_node_was_made(node_under_side: bool) -> None:
    # The facts that fix 2 stands on, as in the unit test of Megatron-LM issue 3670.
    # Kills: reading the stream at registration, waiting for the default stream. Fails where a torch
    # has changed the rule, and fix 2 with it.
    side, seen = torch.cuda.Stream(), []
    param = torch.randn(10, requires_grad=True, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side) if node_under_side else nullcontext():
        node = param.expand_as(param).grad_fn.next_functions[0][0]
    with torch.cuda.stream(side):
        node.register_hook(lambda *_: seen.append(torch.cuda.current_stream()))
    (param * 2).sum().backward()
    assert torch.cuda.default_stream() != side
    assert seen[0] == (side if node_under_side else torch.cuda.default_stream())


@pytest.mark.gpu
@no_device
class TestCheckerOnRealStreams:
    # Kills: callbacks of torch's GPU trace that do not arrive, or arrive with other handles than
    # those of the streams.
    def test_a_missing_wait(self) -> None:
        with pytest.raises(
            StreamRaceError,
            match=r"<default stream> never waits for <stream \d+>, which wrote bytes 0\.\.4000",
        ):
            with check_streams():
                side, value = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    value.mul_(2)
                value.add_(1)

    @pytest.mark.parametrize("wait", ["stream", "event", "synchronize", "query", "item"])
    def test_every_way_to_wait(self, wait: str) -> None:
        with check_streams():
            side, event = torch.cuda.Stream(), torch.cuda.Event()
            value = torch.zeros(1000, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                value.mul_(2)
                event.record()
                if wait == "item":
                    value.sum().item()
            if wait == "stream":
                torch.cuda.current_stream().wait_stream(side)
            elif wait == "event":
                event.wait()
            elif wait == "synchronize":
                event.synchronize()
            while wait == "query" and not event.query():
                pass
            value.add_(1)

    def test_memory_handed_out_under_a_side_stream(self) -> None:
        with check_streams(raises=False) as checker:
            side, value = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(1000)
                kept = value * 2
            del value
            torch.zeros(1000, device="cuda")
        assert [finding.kind.value for finding in checker.findings] == ["use after free"], (
            checker.report()
        )
        del kept

    def test_a_copy_to_page_locked_memory_that_nobody_waits_for(self) -> None:
        with pytest.raises(StreamRaceError, match="the host never waits for <default stream>"):
            with check_streams():
                host = torch.empty(1000, pin_memory=True)
                host.copy_(torch.zeros(1000, device="cuda"), non_blocking=True)
                host + 1


def train_checked(settings: dict[str, Any]) -> None:
    with check_streams():
        engine, *_ = deepspeed.initialize(model=make_model(), config=settings)
        train_steps(engine, 3)
        get_accelerator().synchronize()
    engine.destroy()


SETTINGS = [
    pytest.param(config(stage, **offload), id=f"zero{stage}-offload{bool(offload):d}")
    for stage in (1, 2)
    for offload in ({}, {"offload_optimizer": {"device": "cpu", "pin_memory": True}})
]


@pytest.mark.gpu
@pytest.mark.parametrize("settings", SETTINGS)
class TestCheckedTraining(DistributedTest):
    # Kills: alarms about training as it is, on one device.
    world_size = 1
    requires_cuda_env = True

    def test(self, settings: dict[str, Any]) -> None:
        train_checked(settings)


class TestCheckedTrainingTwoDevices(TestCheckedTraining):
    # Kills: alarms about collectives, and an asynchronous one that is taken to be waited for.
    world_size = 2

    def test_an_asynchronous_collective_nobody_waits_for(self, settings: dict[str, Any]) -> None:
        with check_streams(raises=False) as checker:
            value = torch.ones(1000, device=get_accelerator().current_device_name())
            work = dist.all_reduce(value, async_op=True)
            value.add_(1)
            work.wait()
        assert "never waits for <nccl stream of group [0, 1]>" in checker.report()


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 2])
class TestCompiled(DistributedTest):
    # Kills: compiled backward's gradients, which may come from other streams than eager ones, sent
    # before they are there.
    world_size = 1
    requires_cuda_env = True

    def test(self, stage: int) -> None:
        engine, *_ = deepspeed.initialize(model=make_model(), config=config(stage))
        engine.compile()
        train_steps(engine, 1)
        assert not deviates([param.detach().cpu() for param in engine.module.parameters()])


class TestHost(DistributedTest):
    # Keeps the situations above right where there is no device to run them on: the same, simulated.
    world_size = 1
    backend = "gloo"  # for host tensors, also beside a real device

    @pytest.mark.parametrize("undo, late, under_side", UNDONE)
    def test_slow_producer(
        self, undo: Any, late: Any, under_side: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with simulate(), check_streams():
            assert not deviates(one_step(config(2), late, under_side))
        undo(monkeypatch)
        with simulate(), check_streams(raises=False) as checker:
            one_step(config(2), late, under_side)
        assert "which wrote" in checker.report(), checker.report()

    @pytest.mark.parametrize("settings", [param.values[0] for param in SETTINGS])
    def test_checked_training(self, settings: dict[str, Any]) -> None:
        with simulate():
            train_checked(settings)
