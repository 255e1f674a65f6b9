"""Checkpointed layers in an engine train as plain torch; saved inputs in parts and on the host."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from unit.common import DistributedTest
from unit.models import drawn
from unit.one_process import OneProcess, mean_square
from unit.v1.looping import each, each_pair

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.activation_checkpointing import checkpointing, saved_inputs, settings
from deepspeed.verify import check_streams

KINDS = {
    "reentrant": checkpointing.checkpoint,
    "non_reentrant": checkpointing.non_reentrant_checkpoint,
}
LR = 0.1
# Summation order over ranks and micro-batches, in fp32.
TOLERANCE = 2e-6


class Net(nn.Module):
    """Three checkpointed segments with odd sizes on raw data; two use the weights of `shared`."""

    def __init__(self, call: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.shared, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.call = call or (lambda function, *args: function(*args))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.call(lambda x: self.shared(self.first(x).tanh()), x)
        hidden = self.call(lambda h, scale: self.shared(h.tanh()) * scale, hidden, 2)
        return self.call(lambda h: self.last(h), hidden)


def data(index: int, rank: int) -> torch.Tensor:
    return drawn(100 * index + rank, 4, 5)


def train(
    call: Any, stage: int, form: str, bucket: int, steps: int = 2, accumulation: int = 2
) -> None:
    model = Net(call)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket, "overlap_comm": True},
        "verify": {"ledger": form != "direct", "collectives": True},
    }
    wanted = OneProcess(Net(), LR, mean_square).train(data, steps, accumulation)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config
    )
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
    found = {
        name: deepspeed.utils.safe_get_full_fp32_param(param).clone()
        for name, param in model.named_parameters()
    }
    engine.destroy()
    for name, param in found.items():
        error = ((param - wanted[name]).norm() / wanted[name].norm()).item()
        assert error <= TOLERANCE, f"{name} is off by {error:.2e}"


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
        # Kills: a block without effect; an engine that overrides what the script chose.
        config = {"train_batch_size": 2, "activation_checkpointing": {"profile": True}}
        deepspeed.initialize(model=Net(), config={"train_batch_size": 2})
        assert not checkpointing.is_configured()
        deepspeed.initialize(model=Net(), config=config)
        assert settings.current().profile and checkpointing.is_configured()
        deepspeed.checkpointing.configure(None, profile=False)
        deepspeed.initialize(model=Net(), config=config)
        assert not settings.current().profile

    @pytest.mark.world_size(1)
    def test_a_block_that_cannot_be_honoured(self) -> None:
        config = {
            "train_batch_size": 1,
            "activation_checkpointing": {"contiguous_memory_optimization": True},
        }
        with pytest.raises(ValueError, match="partition_activations: true"):
            deepspeed.initialize(model=Net(), config=config)


class TestOnASimulatedDevice(DistributedTest):
    world_size = 2

    @each_pair(kind=KINDS, stage=(0, 1, 2), form=("managed", "plain"), cpu=(False, True))
    def test_no_race(self, kind: str, stage: int, form: str, cpu: bool) -> None:
        # Kills: hooks of a nested backward that wait for the wrong stream, and gradients sent
        # before they are complete.
        from deepspeed.accelerator.sim_accelerator import simulate
        from deepspeed.verify import check_streams

        with simulate(backward_streams=2), check_streams():
            deepspeed.checkpointing.configure(None, checkpoint_in_cpu=cpu)
            train(KINDS[kind], stage, form, bucket=20)


def test_configured_by_an_engines_filled_in_configuration() -> None:
    # Kills: asking which ranks share the batch, which a pipeline's configuration does not tell.
    filled = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    before = settings.current()
    try:
        checkpointing.configure(None, deepspeed_config=filled)
        assert settings.current().cpu
    finally:
        settings.choose(before)


class Unit:
    """An mpu of one tensor-parallel group: all ranks."""

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_tensor_model_parallel_group(self) -> Any:
        return dist.get_world_group()


class Recorded:
    """What `InputStore.pack` has made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.packed: list[Any] = []
        original = saved_inputs.InputStore.pack

        def pack(store: Any, tensor: torch.Tensor) -> Any:
            self.packed.append(original(store, tensor))
            return self.packed[-1]

        patch.setattr(saved_inputs.InputStore, "pack", pack)

    def sizes(self) -> list[int]:
        """Elements that are kept of each moved input."""
        return [
            item.content.numel() for item in self.packed if isinstance(item, saved_inputs._Packed)
        ]

    def memories(self) -> set[int]:
        """The pieces of memory that they lie in."""
        return {
            item.content.untyped_storage().data_ptr()
            for item in self.packed
            if isinstance(item, saved_inputs._Packed)
        }


def trained(call: Callable[..., Any]) -> list[torch.Tensor]:
    """Gradients of three layers, the first on 3 x 5 numbers, uneven for two ranks."""
    torch.manual_seed(3)
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.4), nn.Tanh()) for _ in range(3)
    )
    x = torch.randn(3, 5, requires_grad=True)
    index = torch.tensor([2, 0, 1])
    hidden = x * 1
    for layer in layers:
        hidden = call(lambda h, i, layer=layer: layer(h)[i], hidden, index)
    hidden.square().sum().backward()
    return [hidden.detach(), x.grad, *(param.grad for param in layers.parameters())]


class TestTwoRanks(DistributedTest):
    world_size = 2

    @each(kind=KINDS, cpu=[False, True], contiguous=[False, True])
    def test_gradients(self, kind: str, cpu: bool, contiguous: bool) -> None:
        # Kills: parts put together in the wrong order or without the padding's end; a part of
        # another input; a block used early.
        checkpointing.configure(
            Unit(),
            partition_activations=True,
            checkpoint_in_cpu=cpu,
            contiguous_checkpointing=contiguous,
            num_checkpoints=3,
        )
        plain = trained(lambda function, *args: function(*args))
        found = trained(KINDS[kind])
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))

    @each(kind=KINDS, contiguous=[False, True])
    def test_each_rank_keeps_its_part(self, kind: str, contiguous: bool) -> None:
        # Kills: keeping the whole beside the part; one piece of memory per input where they should
        # lie together.
        checkpointing.configure(
            Unit(),
            partition_activations=True,
            contiguous_checkpointing=contiguous,
            num_checkpoints=3,
        )
        with pytest.MonkeyPatch.context() as patch:
            recorded = Recorded(patch)
            trained(KINDS[kind])
        assert recorded.sizes() == [8, 8, 8]  # of 15, padded to 16
        assert len(recorded.memories()) == (1 if contiguous else 3)

    def test_without_partitioning_inputs_stay_whole(self) -> None:
        checkpointing.configure(Unit())
        with pytest.MonkeyPatch.context() as patch:
            recorded = Recorded(patch)
            trained(checkpointing.checkpoint)
        assert not recorded.packed

    @each(contiguous=[False, True], cpu=[False, True])
    def test_the_flat_lists_of_upstreams_names(self, contiguous: bool, cpu: bool) -> None:
        checkpointing.configure(Unit(), partition_activations=True)
        args = [
            torch.arange(5.0).view(5, 1).requires_grad_(),
            3,
            torch.tensor([1, 2]),
            torch.arange(4.0) + 10,
        ]
        parts = checkpointing.partition_activations(args, cpu, contiguous)
        assert [part.numel() for part in (parts[0], parts[3])] == [3, 2]
        assert len({part.untyped_storage().data_ptr() for part in (parts[0], parts[3])}) == (
            1 if contiguous else 2
        )
        assert dist.get_rank() == 0 or parts[0][2] == 0  # padding
        saved = checkpointing.get_partitioned_activations_for_backward(args, parts, contiguous)
        whole = checkpointing.gather_partitioned_activations(saved)
        assert whole[1] == 3 and torch.equal(whole[2], args[2])
        assert torch.equal(whole[0], args[0]) and torch.equal(whole[3], args[3])
        start, size = (
            checkpointing.get_partition_start(args[0]),
            checkpointing.get_partition_size(args[0]),
        )
        assert (start, size) == (3 * dist.get_rank(), 3)
        with pytest.raises(RuntimeError, match="expected a tuple"):
            checkpointing.detach_variable(args)
        tensors, others, flags = checkpointing.extract_tensors(tuple(args))
        assert checkpointing.merge_tensors(tensors, others, flags) == tuple(args)


class TestPartsOnASimulatedDevice(DistributedTest):
    """Copies to the host and back on side streams, late, with every unordered access an error."""

    world_size = 2

    @each(kind=KINDS, partition=[False, True], contiguous=[False, True])
    def test_gradients(self, kind: str, partition: bool, contiguous: bool) -> None:
        # Kills: reading an input before its producer, or a host copy before the copy is done;
        # freeing an input early; a block that is written while its last reader is at it.
        from deepspeed.accelerator.sim_accelerator import simulate
        from deepspeed.verify import check_streams

        if contiguous and not partition:
            return  # refused
        plain = trained(lambda function, *args: function(*args))
        with simulate(backward_streams=2) as device, check_streams():
            checkpointing.configure(
                Unit(),
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
                assert all(
                    device.is_pinned(item.content)
                    for item in recorded.packed
                    if hasattr(item, "content")
                )
                assert recorded.sizes() == [8 if partition else 15] * 6
            equal = [torch.equal(one, other) for one, other in zip(found, plain, strict=True)]
        assert all(equal)


LAYERS = 10
NUMEL = 1 << 12
INPUT = 4 * NUMEL  # bytes


@pytest.fixture
def as_before() -> Iterator[None]:
    yield
    checkpointing.reset()


def forward(x: torch.Tensor) -> torch.Tensor:
    for _ in range(LAYERS):
        x = checkpointing.checkpoint(torch.sin, x)
    return x


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("on_host, least, most", [(True, 2, 5), (False, LAYERS, LAYERS + 2)])
def test_two_copies_are_under_way(on_host: bool, least: int, most: int) -> None:
    # Kills: inputs held until the host happens to see that they were copied, which it never does
    # when it runs ahead; then this saves nothing. Without host copies all inputs are there, and the
    # test sees them.
    with simulate() as device, check_streams():
        checkpointing.configure(None, checkpoint_in_cpu=on_host)
        x = torch.ones(NUMEL, requires_grad=True)
        for _ in range(2):
            device.reset_peak_memory_stats()
            before = device.memory_allocated()
            y = forward(x)
            # The newest input, its output, two that are being copied, and one that is dropped as
            # the next copy is issued.
            peak = (device.max_memory_allocated() - before) / INPUT
            assert least <= peak <= most, peak
            y.sum().backward()
            del y
        grad = x.grad
        assert grad is not None
        found = grad.clone()
    expected = torch.ones(NUMEL, requires_grad=True)
    y = expected
    for _ in range(LAYERS):
        y = torch.sin(y)
    (2 * y.sum()).backward()
    assert torch.allclose(found, expected.grad)
