"""CommContext on an accelerator that only writes down what is asked of it: waits, keep-alive,
join.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.streams import CommContext


class FakeStream:
    """A name, and what was asked of it."""

    def __init__(self, log: list[tuple[Any, ...]], name: str) -> None:
        self.log = log
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(("wait", self.name, other.name))

    def synchronize(self) -> None:
        self.log.append(("synchronize", self.name))


class FakeEvent:
    """Passes when the test says so."""

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log
        self.passed = False

    def record(self, stream: FakeStream) -> None:
        self.log.append(("record", stream.name))

    def query(self) -> bool:
        return self.passed


class FakeAccelerator(CPU_Accelerator):
    """The host with streams that write down what is asked of them."""

    def __init__(self, streams: bool = True) -> None:
        super().__init__()
        self._streams = streams
        self.log: list[tuple[Any, ...]] = []
        self.events: list[FakeEvent] = []
        self.current = FakeStream(self.log, "default")
        self.made = 0

    def resolves_data_dependency(self) -> bool:
        return not self._streams

    def Stream(self, *args: Any, **kwargs: Any) -> FakeStream:  # noqa: N802 - the accelerator's name
        self.made += 1
        return FakeStream(self.log, f"side{self.made}")

    def Event(self, *args: Any, **kwargs: Any) -> FakeEvent:  # noqa: N802 - the accelerator's name
        self.events.append(FakeEvent(self.log))
        return self.events[-1]

    def current_stream(self, device_index: int | None = None) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def fake() -> Iterator[FakeAccelerator]:
    real = get_accelerator()
    stand_in = FakeAccelerator()
    set_accelerator(stand_in)
    yield stand_in
    set_accelerator(real)


def test_the_reduction_stream_waits_for_every_producer(fake):
    # Kills: waiting for one of several streams (fix 1), or for the stream current at construction
    # (fix 2).
    context = CommContext(overlap=True)
    producers = [FakeStream(fake.log, "a"), FakeStream(fake.log, "b")]
    context.wait_for(producers)
    assert fake.log == [("wait", "side1", "a"), ("wait", "side1", "b")]


def test_current_stream_is_asked_for_each_time(fake):
    # Kills: remembering the stream of the first question.
    context = CommContext(overlap=True)
    assert context.current_stream().name == "default"
    with fake.stream(FakeStream(fake.log, "side hook")):
        assert context.current_stream().name == "side hook"


def test_work_is_issued_on_the_reduction_stream(fake):
    # Kills: a block that leaves the caller on the side stream, or never enters it.
    context = CommContext(overlap=True)
    with pytest.raises(KeyError), context.on_reduction_stream():
        assert fake.current is context.reduction_stream
        raise KeyError("x")
    assert fake.current.name == "default"


def test_buffers_live_until_their_event_has_passed(fake):
    # Kills: dropping the reference at once: the allocator would hand the memory out while the side
    # stream reads it.
    context = CommContext(overlap=True)
    tensor = torch.zeros(4)
    alive = weakref.ref(tensor)
    context.keep_alive([tensor])
    del tensor
    assert ("record", "side1") in fake.log
    context.keep_alive([torch.zeros(1)])  # looks for events that have passed: none has
    gc.collect()
    assert alive() is not None
    fake.events[0].passed = True
    context.keep_alive([torch.zeros(1)])
    gc.collect()
    assert alive() is None


def test_release_keeps_the_order_of_the_stream(fake):
    # Kills: letting go of a younger buffer while an older one still waits, as a set instead of a
    # queue would.
    context = CommContext(overlap=True)
    tensors = [torch.zeros(1), torch.zeros(1)]
    alive = [weakref.ref(t) for t in tensors]
    for tensor in tensors:
        context.keep_alive([tensor])
    del tensor, tensors
    fake.events[1].passed = True
    context.keep_alive([torch.zeros(1)])
    gc.collect()
    assert alive[0]() is not None and alive[1]() is not None


def test_join_lets_the_current_stream_wait_and_frees(fake):
    # Kills: a host synchronization instead of a stream wait, waiting in the wrong direction, and a
    # leak over steps.
    context = CommContext(overlap=True)
    tensor = torch.zeros(1)
    alive = weakref.ref(tensor)
    context.keep_alive([tensor])
    del tensor
    fake.log.clear()
    with fake.stream(FakeStream(fake.log, "trainer")):
        context.join()
    assert fake.log == [("wait", "trainer", "side1")]
    gc.collect()
    assert alive() is None


def test_destroy_waits_for_outstanding_work(fake):
    # Kills: freeing buffers that the device still uses.
    context = CommContext(overlap=True)
    context.keep_alive([torch.zeros(1)])
    context.destroy()
    assert fake.log[-1] == ("synchronize", "side1")


def test_without_overlap_the_current_stream_waits_after_every_reduction(fake):
    # Kills: computation that runs beside a reduction nobody asked to overlap.
    context = CommContext(overlap=False)
    with context.on_reduction_stream():
        assert fake.current.name == "side1"
    context.issued()
    assert fake.log[-1] == ("wait", "default", "side1") and not context.async_handles


def test_with_overlap_nothing_waits_for_a_reduction_before_the_join(fake):
    # Kills: an overlap that serializes.
    context = CommContext(overlap=True)
    context.issued()
    assert fake.log == []


def test_devices_without_streams_overlap_by_handles():
    # Kills: claiming a stream on the host, or no overlap at all there.
    real = get_accelerator()
    stand_in = FakeAccelerator(streams=False)
    set_accelerator(stand_in)
    try:
        context = CommContext(overlap=True)
        assert (
            context.async_handles and context.reduction_stream is None and not context.has_streams
        )
        assert not CommContext(overlap=False).async_handles
        assert stand_in.made == 0
    finally:
        set_accelerator(real)
