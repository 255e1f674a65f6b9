"""Checkpointed layers in an engine train as plain torch; saved inputs in parts and on the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from unit.common import DistributedTest
from unit.models import config_of, drawn
from unit.one_process import OneProcess, mean_square
from unit.v1.device.test_overlap import Order, on_stream, waits
from unit.v1.looping import each, each_pair
from unit.v1.zero.usage import assert_close

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.activation_checkpointing import checkpointing, saved_inputs, settings
from deepspeed.verify import check_streams

KINDS = {
    "reentrant": checkpointing.checkpoint,
    "non_reentrant": checkpointing.non_reentrant_checkpoint,
}
TORCHS = {
    f"torch's, {kind}": partial(torch_checkpoint, use_reentrant=kind == "reentrant")
    for kind in KINDS
}
LR = 0.1
# Summation order over ranks and micro-batches, in fp32.
TOLERANCE = 2e-6


@contextmanager
def small_inputs_move() -> Iterator[None]:
    """To the host, though that isn't worth a copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_inputs, "MOVED_NUMEL", 0)
        yield


def direct(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class Net(nn.Module):
    """Three checkpointed segments with odd sizes on raw data; two use the weights of `shared`."""

    def __init__(self, call: Any = direct) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.shared, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.call(lambda x: self.shared(self.first(x).tanh()), x)
        hidden = self.call(lambda h, scale: self.shared(h.tanh()) * scale, hidden, 2)
        return self.call(lambda h: self.last(h), hidden)


def data(index: int, rank: int) -> torch.Tensor:
    return drawn(100 * index + rank, 4, 5)


def train(call: Any, stage: int, form: str, bucket: int) -> None:
    steps, accumulation, model = 2, 2, Net(call)
    zero = {"reduce_bucket_size": bucket, "overlap_comm": True}
    config = config_of(stage, 4, accumulation, zero_optimization=zero)
    config["verify"] = {"ledger": form != "direct", "collectives": True}
    wanted = OneProcess(Net(), LR, mean_square).train(data, steps, accumulation)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for index in range(steps * accumulation):
        x = data(index, dist.get_rank()).to(engine.device)
        if form.startswith("around"):
            loss = call(engine, x).square().mean()
        else:
            loss = mean_square(engine.module if form == "direct" else engine, x)
        if form in ("managed", "around"):
            engine.backward(loss)
        else:
            loss.backward()
        engine.step()
    assert_close(engine, wanted, TOLERANCE)
    engine.destroy()


class TestEngine(DistributedTest):
    world_size = 2

    @each_pair(
        kind=KINDS,
        stage=(0, 1, 2),
        form=("managed", "plain", "direct", "around", "around, plain"),
        bucket=(20, 10**6),
    )
    def test_trains_as_plain_torch(self, kind: str, stage: int, form: str, bucket: int) -> None:
        # Kills: a bucket sent after the first of two hooks of `shared`; a nested backward taken for
        # the end of the backward; a first segment that learns nothing because raw data requires no
        # gradient; an engine that, called again by recomputation, takes its running backward for
        # one that failed. The ledger and the intent check have to stay silent.
        train(KINDS[kind], stage, form, bucket)

    def test_the_block_configures(self) -> None:
        # Kills: a block without effect, or that cannot have one; an engine that overrides scripts.
        deepspeed.initialize(model=Net(), config=config_of(0, 1))
        assert not checkpointing.is_configured()
        unmet = config_of(0, 1, activation_checkpointing={"contiguous_memory_optimization": True})
        with pytest.raises(ValueError, match="partition_activations: true"):
            deepspeed.initialize(model=Net(), config=unmet)
        config = config_of(0, 1, activation_checkpointing={"profile": True})
        deepspeed.initialize(model=Net(), config=config)
        assert settings.current().profile and checkpointing.is_configured()
        deepspeed.checkpointing.configure(None, profile=False)
        deepspeed.initialize(model=Net(), config=config)
        assert not settings.current().profile

    @each_pair(kind=KINDS, stage=(0, 1, 2), form=("managed", "plain"), cpu=(False, True))
    def test_no_race_on_a_simulated_device(
        self, kind: str, stage: int, form: str, cpu: bool
    ) -> None:
        # Kills: hooks of a nested backward that wait for the wrong stream; gradients sent early.
        with simulate(backward_streams=2), check_streams(), small_inputs_move():
            deepspeed.checkpointing.configure(None, checkpoint_in_cpu=cpu)
            train(KINDS[kind], stage, form, bucket=20)


def test_configured_by_an_engines_filled_in_configuration() -> None:
    # Kills: asking which ranks share the batch, which a pipeline's configuration does not tell.
    filled = config_of(0, 2, 2, activation_checkpointing={"cpu_checkpointing": True})
    before = settings.current()
    try:
        checkpointing.configure(None, deepspeed_config={"train_batch_size": 8, **filled})
        assert settings.current().cpu
    finally:
        settings.choose(before)


def configure(**options: Any) -> None:
    """With all ranks as one tensor-parallel group."""
    unit = SimpleNamespace(
        get_tensor_model_parallel_rank=dist.get_rank,
        get_tensor_model_parallel_world_size=dist.get_world_size,
        get_tensor_model_parallel_group=dist.get_world_group,
    )
    checkpointing.configure(unit, **options)


class Recorded:
    """What `InputStore.pack` has made, small inputs too."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.packed: list[Any] = []
        original = saved_inputs.InputStore.pack

        def pack(store: Any, tensor: torch.Tensor) -> Any:
            self.packed.append(original(store, tensor))
            return self.packed[-1]

        patch.setattr(saved_inputs.InputStore, "pack", pack)
        patch.setattr(saved_inputs, "MOVED_NUMEL", 0)

    def content(self) -> list[torch.Tensor]:
        """What is kept of each moved input."""
        return [item.moved.content for item in self.packed if hasattr(item, "moved")]

    def sizes(self) -> list[int]:
        """Elements that are kept of each moved input."""
        return [tensor.numel() for tensor in self.content()]


def pieces(tensors: list[torch.Tensor]) -> int:
    """Of memory that they lie in."""
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors})


def trained(call: Callable[..., Any]) -> list[torch.Tensor]:
    """Gradients of three layers, the first on 3 x 5 numbers, uneven for two ranks."""
    torch.manual_seed(3)
    made = [nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.4), nn.Tanh()) for _ in range(3)]
    layers, x = nn.ModuleList(made), torch.randn(3, 5, requires_grad=True)
    hidden, index = x * 1, torch.tensor([2, 0, 1])
    for layer in layers:
        hidden = call(lambda h, i, layer=layer: layer(h)[i], hidden, index)
    hidden.square().sum().backward()
    return [hidden.detach(), x.grad, *(param.grad for param in layers.parameters())]


class TestTwoRanks(DistributedTest):
    world_size = 2

    @each(kind=KINDS, cpu=[False, True], contiguous=[False, True])
    def test_gradients(self, kind: str, cpu: bool, contiguous: bool) -> None:
        # Kills: parts put together in the wrong order or without the padding's end; a part of
        # another input; a block used early; keeping the whole beside the part; one piece of memory
        # per input where they should lie together.
        configure(
            partition_activations=True,
            checkpoint_in_cpu=cpu,
            contiguous_checkpointing=contiguous,
            num_checkpoints=3,
        )
        with pytest.MonkeyPatch.context() as patch:
            recorded = Recorded(patch)
            found = trained(KINDS[kind])
        assert all(map(torch.equal, found, trained(direct)))
        assert recorded.sizes() == [8, 8, 8]  # of 15, padded to 16
        assert cpu or pieces(recorded.content()) == (1 if contiguous else 3)

    def test_without_partitioning_inputs_stay_whole(self) -> None:
        configure()
        with pytest.MonkeyPatch.context() as patch:
            recorded = Recorded(patch)
            trained(checkpointing.checkpoint)
        assert not recorded.packed

    @each(contiguous=[False, True], cpu=[False, True])
    def test_the_flat_lists_of_upstreams_names(self, contiguous: bool, cpu: bool) -> None:
        configure(partition_activations=True)
        column = torch.arange(5.0).view(5, 1).requires_grad_()
        args = [column, 3, torch.tensor([1, 2]), torch.arange(4.0) + 10]
        parts = checkpointing.partition_activations(args, cpu, contiguous)
        assert [part.numel() for part in (parts[0], parts[3])] == [3, 2]
        assert pieces([parts[0], parts[3]]) == (1 if contiguous else 2)
        assert dist.get_rank() == 0 or parts[0][2] == 0  # padding
        saved = checkpointing.get_partitioned_activations_for_backward(args, parts, contiguous)
        whole = checkpointing.gather_partitioned_activations(saved)
        assert whole[1] == 3 and torch.equal(whole[2], args[2])
        assert torch.equal(whole[0], args[0]) and torch.equal(whole[3], args[3])
        assert checkpointing.get_partition_start(args[0]) == 3 * dist.get_rank()
        assert checkpointing.get_partition_size(args[0]) == 3
        with pytest.raises(RuntimeError, match="expected a tuple"):
            checkpointing.detach_variable(args)
        tensors, others, flags = checkpointing.extract_tensors(tuple(args))
        assert checkpointing.merge_tensors(tensors, others, flags) == tuple(args)

    @each(kind=KINDS, partition=[False, True], contiguous=[False, True])
    def test_on_a_simulated_device(self, kind: str, partition: bool, contiguous: bool) -> None:
        # Copies to the host and back on side streams, late; every unordered access is an error.
        # Kills: reading an input before its producer, or a host copy before the copy is done;
        # freeing an input early; a block that is written while its last reader is at it.
        if contiguous and not partition:
            return  # refused
        plain = trained(direct)
        with simulate(backward_streams=2) as device, check_streams(), small_inputs_move():
            configure(
                partition_activations=partition,
                contiguous_checkpointing=contiguous,
                num_checkpoints=2,
                checkpoint_in_cpu=True,
                synchronize=False,
            )
            with pytest.MonkeyPatch.context() as patch:
                recorded = Recorded(patch)
                for _ in range(2):  # the second round uses the blocks of the first
                    found = trained(KINDS[kind])
                assert all(map(device.is_pinned, recorded.content()))
                assert recorded.sizes() == [8 if partition else 15] * 6
            equal = [torch.equal(one, other) for one, other in zip(found, plain, strict=True)]
        assert all(equal)


LAYERS, NUMEL = 10, 1 << 14
INPUT = 4 * NUMEL  # bytes


@pytest.fixture
def as_before() -> Iterator[None]:
    yield
    checkpointing.reset()


def sines(x: torch.Tensor, call: Any = direct) -> torch.Tensor:
    for _ in range(LAYERS):
        x = call(torch.sin, x)
    return x


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("on_host, least, most", [(True, 2, 5), (False, LAYERS, LAYERS + 2)])
@pytest.mark.parametrize("kind", ["reentrant", *TORCHS])
def test_two_copies_are_under_way(on_host: bool, least: int, most: int, kind: str) -> None:
    # Kills: inputs held until the host happens to see that they were copied, which it never does
    # when it runs ahead; then this saves nothing. Without host copies all inputs are there, and the
    # test sees them.
    with simulate() as device, check_streams():
        checkpointing.configure(None, checkpoint_in_cpu=on_host)
        x = torch.ones(NUMEL, requires_grad=True)
        for _ in range(2):
            device.reset_peak_memory_stats()
            before = device.memory_allocated()
            y = sines(x, {**KINDS, **TORCHS}[kind])
            # The newest input, its output, two being copied, one dropped as the next is issued.
            peak = (device.max_memory_allocated() - before) / INPUT
            assert least <= peak <= most, peak
            y.sum().backward()
            del y
        assert x.grad is not None
        found = x.grad.clone()
    expected = torch.ones(NUMEL, requires_grad=True)
    (2 * sines(expected).sum()).backward()
    assert torch.allclose(found, expected.grad)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("call", [*KINDS.values(), *TORCHS.values()], ids=[*KINDS, *TORCHS])
def test_copies_come_back_ahead_of_their_use(call: Any) -> None:
    # Kills: a copy on the stream of backward, or that begins when it is needed or after what it
    # should run beside; memory of a graph that is dropped while its copy is under way.
    order = Order()
    with simulate() as device, device.trace_streams(order):
        checkpointing.configure(None, checkpoint_in_cpu=True)
        x = torch.ones(NUMEL, requires_grad=True)
        sines(x, call).sum().backward()
    copies = on_stream(order.launches, "activation copy-back stream", "aten::copy_")
    again = on_stream(order.launches, "default stream", "aten::cos")  # of backward
    assert len(copies) == len(again) == LAYERS
    assert all(waits(again, copies)) and not any(waits(again, copies[1:]))
    assert not any(waits(copies[1:], again))
    issued = [order.launches.index(one) for one in (*copies, *again)]
    assert all(map(int.__lt__, issued[1:LAYERS], issued[LAYERS:]))
    with simulate(), check_streams():
        checkpointing.configure(None, checkpoint_in_cpu=True)
        y, z = (sines(torch.ones(NUMEL, requires_grad=True), call) for _ in range(2))
        z.sum().backward()  # and of y a last copy
        del y
        torch.ones(NUMEL).mul_(2)
        sines(torch.ones(NUMEL, requires_grad=True), call).sum().backward()
