"""Saved inputs in parts over two tensor-parallel ranks, on the host, in long buffers, counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from unit.common import DistributedTest
from unit.v1.looping import each

from deepspeed import comm as dist
from deepspeed.runtime.activation_checkpointing import checkpointing, saved_inputs

KINDS = {
    "reentrant": checkpointing.checkpoint,
    "non_reentrant": checkpointing.non_reentrant_checkpoint,
}


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


class TestOnASimulatedDevice(DistributedTest):
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
