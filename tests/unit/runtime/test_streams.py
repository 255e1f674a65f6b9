"""SideStream on an accelerator that writes down what is asked: waits, keep-alive, join."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.streams import SideStream
from unit.common import standing_in


class FakeStream:
    """A name, and what was asked of it."""

    def __init__(self, log: list[tuple[Any, ...]], name: str) -> None:
        self.log = log
        self.name = name
        self.recorded = 0

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(("wait", self.name, other.name))

    def record_event(self) -> str:
        self.recorded += 1
        self.log.append(("record", self.name))
        return f"{self.name} {self.recorded}"

    def wait_event(self, event: str) -> None:
        self.log.append(("wait", self.name, event))

    def synchronize(self) -> None:
        self.log.append(("synchronize", self.name))


class FakeAccelerator(CPU_Accelerator):
    """The host with streams that write down what is asked of them."""

    def __init__(self) -> None:
        super().__init__()
        self.has_streams = True
        self.log: list[tuple[Any, ...]] = []
        self.current = self.named("default")
        self.made = 0
        self.priority = 0

    def named(self, name: str) -> FakeStream:
        return FakeStream(self.log, name)

    def resolves_data_dependency(self) -> bool:
        return not self.has_streams

    def Stream(self, priority: int = 0) -> FakeStream:  # noqa: N802 - the accelerator's name
        self.made += 1
        self.priority = priority
        return self.named(f"side{self.made}")

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
    with standing_in(FakeAccelerator()) as stand_in:
        yield stand_in


@pytest.fixture
def side(fake: FakeAccelerator) -> SideStream:
    return SideStream(overlap=True)


def test_the_reduction_stream_waits_for_every_producer(fake, side):
    # Kills: waiting for one of several streams (fix 1) or the one current at construction (fix 2).
    side.wait_for([fake.named("a"), fake.named("b")])
    assert fake.log == [("wait", "side1", "a"), ("wait", "side1", "b")]


def test_current_stream_is_asked_for_each_time(fake, side):
    # Kills: remembering the stream of the first question.
    assert side.current_stream().name == "default"
    with fake.stream(fake.named("side hook")):
        assert side.current_stream().name == "side hook"


def test_work_is_issued_on_the_reduction_stream(fake, side):
    # Kills: a block that leaves the caller on the side stream, or never enters it; a stream whose
    # copies and sums come after all kernels of the model that are queued.
    assert fake.priority == -1
    with pytest.raises(KeyError), side.issue():
        assert fake.current is side.stream
        raise KeyError("x")
    assert fake.current.name == "default"


def test_released_memory_is_awaited_by_every_producer(fake, side):
    # Kills: an event recorded before the use, one producer only, a host that waits or asks.
    side.release([fake.named("a"), fake.named("b")])
    assert fake.log == [("record", "side1"), ("wait", "a", "side1 1"), ("wait", "b", "side1 1")]


def kept(side, producers):
    """Keep a tensor alive; a weak reference to it."""
    tensor = torch.zeros(4)
    side.keep_alive([tensor], producers)
    return weakref.ref(tensor)


def test_two_uses_are_under_way(fake, side):
    # Kills: dropping the reference at once: the allocator would hand the memory out while the side
    # stream reads it. Holding all that the host has issued, however far it runs ahead.
    alive = [kept(side, [fake.named(name)]) for name in "abc"]
    gc.collect()
    assert [tensor() is not None for tensor in alive] == [False, True, True]
    record = ("record", "side1")
    assert fake.log == [record, record, ("wait", "a", "side1 1"), record]


def test_the_producers_wait_before_the_references_go(fake, side, monkeypatch):
    # Kills: references that go first, or while only one of several producers waits.
    alive = kept(side, [fake.named("a"), fake.named("b")])
    waiting = []
    note = lambda self, event: waiting.append((self.name, alive() is None))  # noqa: E731
    monkeypatch.setattr(FakeStream, "wait_event", note)
    kept(side, [])
    kept(side, [])
    gc.collect()
    assert waiting == [("a", False), ("b", False)] and alive() is None


def test_join_lets_the_current_stream_wait_and_frees(fake, side):
    # Kills: a host synchronization instead of a stream wait, waiting in the wrong direction, a
    # producer that is forgotten, and a leak over steps.
    alive = kept(side, [fake.named("producer")])
    fake.log.clear()
    with fake.stream(fake.named("trainer")):
        side.join()
    assert fake.log == [("wait", "trainer", "side1"), ("wait", "producer", "side1 1")]
    gc.collect()
    assert alive() is None


def test_destroy_waits_for_outstanding_work(fake, side):
    # Kills: freeing buffers that the device still uses.
    side.keep_alive([torch.zeros(1)], [])
    side.destroy()
    assert fake.log[-1] == ("synchronize", "side1")


def test_only_without_overlap_the_current_stream_waits_after_every_reduction(fake, side):
    # Kills: an overlap that serializes; computation beside a reduction that was not to overlap.
    side.join_unless_overlapped()
    assert fake.log == []
    other = SideStream(overlap=False)
    with other.issue():
        assert fake.current.name == "side2"
    other.join_unless_overlapped()
    assert fake.log[-1] == ("wait", "default", "side2")


def test_devices_without_streams_make_none(fake):
    # Kills: claiming a stream on the host.
    fake.has_streams = False
    side = SideStream(overlap=True)
    assert side.stream is None and not side.has_streams
    assert fake.made == 0
