"""Stream order on real devices: races forced by slow kernels, hooks with a stream of their own,
and the checker that finds both; training equals plain torch there. Without a device on the
simulated one, or the host.
"""

import itertools
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
from deepspeed.utils import safe_get_full_fp32_params
from deepspeed.verify import StreamRaceError, check_streams
from unit.common import DistributedTest
from unit.models import config_of, drawn, linears, seeded, sgd
from unit.one_process import OneProcess, mean_square, of_all_ranks, placed, train

WIDTH, LAYERS, ROWS, LR = 64, 6, 5, 0.1
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
SLEEP_CYCLES = 400_000_000  # about a quarter of a second, many times what a step takes

no_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_model() -> nn.Sequential:
    return linears(LAYERS, WIDTH, seed=3)


def config(
    stage: int, accumulation: int = 1, precision: str = "fp32", clip: float = 1.0, **zero: Any
) -> dict[str, Any]:
    buckets = {"overlap_comm": True, "reduce_bucket_size": 2 * WIDTH * (WIDTH + 1)}
    more = {"optimizer": sgd(LR), "zero_optimization": {**buckets, **zero}}
    return config_of(stage, ROWS, accumulation, precision, gradient_clipping=clip, **more)


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
    layers = [layer for index, layer in enumerate(model) if late(index)]
    slow = [param for layer in layers for param in layer.parameters()]
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
    one = OneProcess(make_model(), LR, mean_square)
    expected = one.train(lambda _, rank: drawn(rank, ROWS, WIDTH), steps=1)
    pairs = zip(found, expected.values(), strict=True)
    return not all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in pairs)


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
    # Buckets fill from the model's end: the other layer completes one on the default stream.
    pytest.param(undo_fix_1, lambda layer: layer % 2 == 1, False, id="fix1-one-producer-only"),
    pytest.param(undo_fix_2, lambda layer: True, True, id="fix2-default-stream"),
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
        kinds = [finding.kind.value for finding in checker.findings]
        assert kinds == ["use after free"], checker.report()
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
    for offload in ({}, OFFLOAD)
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


STEPS, ACCUMULATION = 3, 2  # of trainings that equal plain torch on the device


class Streamed(nn.Module):
    """Every other layer runs on a side stream, so a bucket has gradients of two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.side: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        accelerator = get_accelerator()
        for index, layer in enumerate(self.layers):
            if self.side is None or index % 2:
                x = layer(x).tanh()
                continue
            main = accelerator.current_stream()
            self.side.wait_stream(main)
            with accelerator.stream(self.side):
                x = layer(x).tanh()
            main.wait_stream(self.side)
        return x


def batch(number: int, rank: int) -> torch.Tensor:
    return drawn(10 * number + rank, ROWS, WIDTH)


def reference_step(masters: list[torch.Tensor], one: OneProcess, batches: list[Any]) -> None:
    """A step on the whole batch: gradients in the dtype of the model, masters in fp32."""
    with torch.no_grad():
        for param, master in zip(one.model.parameters(), masters, strict=True):
            param.copy_(master)
    totals = [torch.zeros_like(master) for master in masters]
    for one_batch in batches:
        one.backward([one_batch])
        for total, grad in zip(totals, one.grads().values(), strict=True):
            total += grad.float() / len(batches)
    for master, total in zip(masters, totals, strict=True):
        master -= LR * total


def train_and_compare(stage: int, precision: str, overlap: bool, offload: bool) -> None:
    zero: dict[str, Any] = {"overlap_comm": overlap, **(OFFLOAD if offload else {})}
    keys = config(stage, ACCUMULATION, precision, clip=0.0, **zero)
    model = seeded(Streamed, seed=3)
    engine, *_ = deepspeed.initialize(model=model, config=keys)
    model.side = get_accelerator().Stream() if engine.device.type != "cpu" else None
    plain = seeded(Streamed, seed=3).to(engine.device, engine.model_dtype)
    # Masters start from the rounded weights.
    masters = [param.detach().float().clone() for param in plain.parameters()]
    one = OneProcess(plain, LR, mean_square)
    numbers = range(STEPS * ACCUMULATION)
    train(engine, (placed(engine, batch(n, dist.get_rank())) for n in numbers), mean_square)
    for step in range(STEPS):
        batches = of_all_ranks(batch, step, ACCUMULATION)
        reference_step(masters, one, [placed(engine, x) for x in batches])
    found = safe_get_full_fp32_params(list(model.parameters()))
    # fp32: another order of the same sums. bf16: micro-batch gradients are rounded to 8 bits, on
    # other sums at stage 1.
    bound = 1e-5 if precision == "fp32" else 2e-3
    for value, master in zip(found, masters, strict=True):
        assert (value.to(engine.device) - master).norm() <= bound * master.norm()
    engine.destroy()


MATRIX = [
    pytest.param(*case, id="zero{}-{}-overlap{:d}-offload{:d}".format(*case))
    for case in itertools.product((1, 2), ("fp32", "bf16"), (False, True), (False, True))
]


@pytest.mark.gpu
@pytest.mark.parametrize("stage, precision, overlap, offload", MATRIX)
class TestParity(DistributedTest):
    # Training on a device equals plain torch there.
    # Kills: a reduction that does not wait for all producer streams, a step before its
    # copies to the host are there.
    world_size = 1
    requires_cuda_env = True

    def test(self, stage: int, precision: str, overlap: bool, offload: bool) -> None:
        train_and_compare(stage, precision, overlap, offload)


class TestParityTwoDevices(TestParity):
    # Kills the same with collectives on their own stream.
    world_size = 2


@pytest.mark.parametrize("stage, precision, overlap, offload", [MATRIX[0], MATRIX[-1]])
class TestParityOnHost(DistributedTest):
    # Keeps the comparison itself right where there is no device to run it on.
    world_size = 2

    def test(self, stage: int, precision: str, overlap: bool, offload: bool) -> None:
        train_and_compare(stage, precision, overlap, offload)
