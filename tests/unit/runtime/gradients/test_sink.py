"""Gradient sinks: the first write replaces, later ones add, and the host's equal the device's."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from unit.common import standing_in
from unit.operators import Operators

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.gradients.buckets import Segment
from deepspeed.runtime.gradients.sink import DeviceSink, HostSink, Sums, accumulate
from deepspeed.runtime.sharding.fragments import FragmentTable
from deepspeed.runtime.sharding.group import ShardedGroup

FIRST, TWO_SEGMENTS = (Segment(0, 0, 5),), (Segment(0, 0, 2), Segment(2, 5, 3))


def make_group() -> ShardedGroup:
    return ShardedGroup(
        [nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))],
        FragmentTable.build([5, 5], 1),
        0,
        master_dtype=torch.float32,
        grad_dtype=torch.float32,
        device=torch.device("cpu"),
        offload=True,
    )


SINKS = {"device": lambda: DeviceSink(Sums()), "host": lambda: HostSink(Sums(), 2)}
of_both = pytest.mark.parametrize("make_sink", SINKS.values(), ids=SINKS.keys())


@of_both
def test_the_first_write_replaces_what_an_earlier_step_left_and_later_ones_add(make_sink):
    # Kills: adding into the last step's gradient, or wiping elements that belong to other buckets.
    group, sink = make_group(), make_sink()
    group.grad.fill_(math.nan)
    sink.add(0, group, TWO_SEGMENTS, [torch.arange(5.0)], 2.0)
    sink.finish()
    assert group.grad[[0, 1, 5, 6, 7]].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert torch.isnan(group.grad[[2, 3, 4, 8, 9]]).all()
    # Kills: replacing in every micro-batch, so that only the last one would count.
    group, sink = make_group(), make_sink()
    for value in (1.0, 10.0, 100.0):
        sink.add(0, group, TWO_SEGMENTS, [torch.full((5,), value)], 0.5)
    sink.finish()
    assert group.grad[[0, 1, 5, 6, 7]].tolist() == [55.5] * 5
    sink.clear()
    sink.add(0, group, TWO_SEGMENTS, [torch.ones(5)], 1.0)
    sink.finish()
    assert group.grad[[0, 1, 5, 6, 7]].tolist() == [1.0] * 5


@of_both
def test_buckets_are_first_each_for_itself(make_sink):
    # Kills: one flag for all buckets: the second bucket would add to stale memory.
    group, sink = make_group(), make_sink()
    group.grad.fill_(7.0)
    sink.add(0, group, FIRST, [torch.ones(5)], 1.0)
    sink.add(1, group, (Segment(0, 5, 5),), [torch.full((5,), 3.0)], 1.0)
    sink.finish()
    assert group.grad.tolist() == [1.0] * 5 + [3.0] * 5


@of_both
def test_pieces_are_summed_in_the_gradients_dtype(make_sink):
    # Kills: summing bf16 pieces in bf16: 256 + 1 + 1 is 256 there; reporting a gradient where there
    # is none, and keeping the report after clear().
    group, sink = make_group(), make_sink()
    assert sink.is_empty
    pieces = [torch.full((5,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    sink.add(0, group, FIRST, pieces, 1.0)
    assert not sink.is_empty
    sink.finish()
    assert group.grad[:5].tolist() == [258.0] * 5
    sink.clear()
    assert sink.is_empty


class FakeEvent:
    """Lets staged data appear only when it is waited for, as an asynchronous copy may."""

    synchronized = 0

    def record(self, stream: Any) -> None:
        """Nothing to order on the host."""

    def query(self) -> bool:
        """The slowest device: never there before it is waited for."""
        return False

    def synchronize(self) -> None:
        FakeEvent.synchronized += 1


class StagingAccelerator(CPU_Accelerator):
    """The host with countable events and pinned buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned = 0

    def Event(self, *args: Any, **kwargs: Any) -> FakeEvent:  # noqa: N802 - the accelerator's name
        return FakeEvent()

    def current_stream(self, device_index: int | None = None) -> str:
        return "current"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return False  # every tensor that is asked about, the sink's target, lies on the host

    def host_empty(self, numel: int, dtype: torch.dtype, pin: bool = False) -> torch.Tensor:
        self.pinned += pin
        return torch.empty(numel, dtype=dtype)


@pytest.fixture
def staging() -> Iterator[StagingAccelerator]:
    FakeEvent.synchronized = 0
    with standing_in(StagingAccelerator()) as stand_in:
        yield stand_in


def test_staged_slices_equal_the_device_path(staging):
    # Kills: a staged slice that is lost, added twice, scaled otherwise, or replaces a later one.
    generator = torch.Generator().manual_seed(0)
    expected, actual = make_group(), make_group()
    device, host = DeviceSink(Sums()), HostSink(Sums(), 2)
    for group in (expected, actual):
        group.grad.fill_(9.0)
    for bucket in (0, 1, 0, 1, 0):
        pieces = [torch.randn(5, generator=generator) for _ in range(3)]
        segments = (Segment(0, 5 * bucket, 2), Segment(2, 5 * bucket + 2, 3))
        device.add(bucket, expected, segments, pieces, 0.3)
        host.add(bucket, actual, segments, pieces, 0.3)
    host.finish()
    assert torch.equal(expected.grad, actual.grad)
    assert staging.pinned > 0 and FakeEvent.synchronized == 5


def test_staging_is_bounded_and_read_only_after_the_event(staging):
    # Kills: unbounded page-locked memory, and adding a slice before its copy is known to be done.
    group, sink = make_group(), HostSink(Sums(), 2)
    for _ in range(5):
        sink.add(0, group, FIRST, [torch.ones(5)], 1.0)
    assert len(sink._in_flight) == 2 and FakeEvent.synchronized == 3
    sink.finish()
    assert FakeEvent.synchronized == 5 and group.grad[:5].tolist() == [5.0] * 5

    # Kills: a skipped step's gradient that lands in the next one.
    group, sink = make_group(), HostSink(Sums(), 4)
    sink.add(0, group, FIRST, [torch.full((5,), 5.0)], 1.0)
    sink.clear()
    sink.add(0, group, FIRST, [torch.ones(5)], 1.0)
    sink.finish()
    assert group.grad[:5].tolist() == [1.0] * 5


HALF, WIDE = torch.bfloat16, torch.float32


@pytest.mark.parametrize("of, into", [(WIDE, WIDE), (HALF, WIDE), (HALF, HALF), (WIDE, HALF)])
def test_the_first_piece_is_scaled_in_one_pass(of: torch.dtype, into: torch.dtype) -> None:
    # Kills: a copy and a pass over what was copied; a product that is rounded to the piece's dtype.
    piece = torch.randn(1000).to(of)
    wanted = piece.to(into, copy=True).mul_(1 / 3)
    with simulate():
        own, target = piece + 0, torch.empty(1000, dtype=into)
        with Operators() as seen, torch.no_grad():
            accumulate(target, [own], 1 / 3, first=True)
        assert ("copy_.default" in seen.names) == (into is HALF and of is WIDE), seen.names
        found = target.clone()
        assert found.tolist() == wanted.tolist()
