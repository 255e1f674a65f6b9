"""Tracing of real streams without a device: torch's trace of GPU calls is played by the test, host
tensors play the device's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.cuda import _gpu_trace

from deepspeed.accelerator.cuda_trace import CudaTrace, traced
from deepspeed.accelerator.stream_trace import Access
from deepspeed.comm.watch.observation import CollectiveCall
from deepspeed.verify import StreamChecker
from deepspeed.verify.streams import collectives
from deepspeed.verify.streams.findings import Kind

SIDE, OTHER = 0xAAA0, 0xBBB0
recorded = _gpu_trace.EventRecordCallbacks.fire_callbacks
waited_for = _gpu_trace.EventWaitCallbacks.fire_callbacks
allocated = _gpu_trace.MemoryAllocationCallbacks.fire_callbacks
freed = _gpu_trace.MemoryDeallocationCallbacks.fire_callbacks


class Device:
    """Plays torch's trace (what C++ would call on a GPU); `current` is the stream's handle."""

    def __init__(self) -> None:
        self.current = 0
        self.checker = StreamChecker()
        self.trace = CudaTrace(self.checker, lambda: self.current, device_type="cpu")

    def wait(self, waiting: int, waited: int, event: int = 0xE0) -> None:
        recorded(event, waited)
        waited_for(event, waiting)

    def zeros(self, numel: int) -> torch.Tensor:
        tensor = torch.zeros(numel)
        allocated(tensor.untyped_storage().data_ptr())
        return tensor

    @property
    def kinds(self) -> list[Kind]:
        return [finding.kind for finding in self.checker.findings]


@pytest.fixture
def device() -> Iterator[Device]:
    played = Device()
    with traced(played.trace):
        yield played


def test_operators_of_two_streams_and_waits_through_events(device: Device) -> None:
    # Kills: operators reported on another stream than the current one, in-place arguments taken for
    # reads; event callbacks with event and stream exchanged, or not registered.
    value = torch.zeros(8)
    for is_awaited in (True, False):
        device.wait(SIDE, 0)
        device.current = SIDE
        value.mul_(2)
        device.current = 0
        if is_awaited:
            device.wait(0, SIDE)
            value.add_(1)
        assert device.kinds == []
    value + 1
    assert device.kinds == [Kind.RACE]
    edge = "<default stream> never waits for <stream 1>, which wrote bytes 0..32"
    assert edge in device.checker.report()


def test_views_touch_nothing_and_slices_their_bytes(device: Device) -> None:
    # Kills: a view taken for a read, a slice for the whole storage.
    value = torch.zeros(8)
    device.wait(SIDE, 0)
    value[:4].add_(1)
    device.current = SIDE
    value[4:].view(2, 2).mul_(2)
    assert device.kinds == []
    device.wait(OTHER, 0)
    device.current = OTHER
    value[3:5] + 1
    assert len(device.kinds) == 1
    assert "bytes 16..20" in device.checker.report()


def test_fresh_results_are_written(device: Device) -> None:
    # Kills: results that only the next operator makes known.
    value = torch.zeros(8) + 1
    device.current = SIDE
    value.sum()
    assert device.kinds == [Kind.RACE]


def test_a_deleted_events_handle_is_a_new_event(device: Device) -> None:
    # Kills: an order that a dead event's successor inherits.
    value = torch.zeros(8)
    recorded(0xE0, 0)
    _gpu_trace.EventDeletionCallbacks.fire_callbacks(0xE0)
    waited_for(0xE0, SIDE)
    device.current = SIDE
    value.mul_(2)
    assert device.kinds == [Kind.RACE]


@pytest.mark.parametrize("what", ["Device", "Stream", "Event"])
def test_synchronizing(device: Device, what: str) -> None:
    # Kills: a synchronization that is not told.
    arguments = {"Device": (), "Stream": (0,), "Event": (0xE0,)}[what]
    value = torch.zeros(8)
    recorded(0xE0, 0)
    getattr(_gpu_trace, f"{what}SynchronizationCallbacks").fire_callbacks(*arguments)
    device.current = SIDE
    value.mul_(2)
    assert device.kinds == []


class PlayedEvent:
    """Has what the trace reads off an event."""

    cuda_event = 0xE0

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


def test_a_successful_query_is_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: alarms about a keep-alive that is dropped once its event has passed; order from a query
    # that said no.
    monkeypatch.setattr(torch.cuda, "Event", PlayedEvent)
    device = Device()
    with traced(device.trace):
        value, event = torch.zeros(8), PlayedEvent()
        recorded(0xE0, 0)
        device.current = SIDE
        assert not event.query()
        value + 1
        assert device.kinds == [Kind.RACE]
        event.is_done = True
        assert event.query()
        device.current = OTHER
        value + 1
    assert device.kinds == [Kind.RACE]


class TestLifetime:
    def test_freed_while_a_side_stream_uses_it(self, device: Device) -> None:
        # Kills: allocation callbacks not registered, frees under another serial number.
        value = device.zeros(8)
        device.wait(SIDE, 0)
        device.current = SIDE
        value.sum()
        device.current = 0
        freed(value.untyped_storage().data_ptr())
        assert device.kinds == []
        device.zeros(8)
        assert device.kinds == [Kind.LIFETIME]

    def test_an_address_that_lives_again_is_other_memory(self, device: Device) -> None:
        # Kills: accesses of a former life held against the next one.
        value = device.zeros(8)
        value.add_(1)
        address = value.untyped_storage().data_ptr()
        freed(address)
        device.current = SIDE
        allocated(address)
        value.mul_(2)
        assert device.kinds == []


class Work:
    """Stands for torch's handle."""

    is_done = False

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.is_done


@pytest.fixture
def issue(device: Device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Issues an all-reduce of a value; the handle of an asynchronous one."""
    monkeypatch.setattr(collectives.dist, "get_all_ranks_from_group", lambda group: [0, 1])

    def run(value: torch.Tensor, async_op: bool) -> Any:
        work = Work() if async_op else None
        call = CollectiveCall("all_reduce", lambda *args: work, (value, None, None, async_op))
        return collectives.CollectiveTeller(device.trace).run(call, call.issue)

    return run


class TestCollectives:
    def test_an_asynchronous_one_is_not_waited_for(self, device: Device, issue: Any) -> None:
        # Kills: a bucket read before its reduction is waited for.
        value = torch.zeros(8)
        issue(value, True)
        value + 1
        assert device.kinds == [Kind.RACE]
        assert "<nccl stream of group [0, 1]>, which wrote" in device.checker.report()

    def test_waiting_orders_the_current_stream(self, device: Device, issue: Any) -> None:
        # Kills: a wait credited to the issuing stream.
        value = torch.zeros(8)
        work = issue(value, True)
        device.current = SIDE
        work.wait()
        first = value + 1  # kept: another result at its address would be a race too
        assert device.kinds == []
        device.current = OTHER
        second = value + 1
        assert device.kinds == [Kind.RACE] and first is not second

    def test_it_waits_for_the_current_stream_only(self, device: Device, issue: Any) -> None:
        # Kills: a collective taken to be ordered after everything.
        value = torch.zeros(8)
        device.wait(SIDE, 0)
        device.current = SIDE
        value.add_(1)
        device.current = 0
        issue(value, False)
        assert device.kinds == [Kind.RACE]

    def test_a_synchronous_one_is_waited_for(self, device: Device, issue: Any) -> None:
        # Kills: alarms about every synchronous collective.
        value = torch.zeros(8)
        issue(value, False)
        value.add_(1)
        assert device.kinds == []

    def test_completion_seen_by_the_host(self, device: Device, issue: Any) -> None:
        # Kills: alarms after a poll that said done; order from a poll that said no.
        value = torch.zeros(8)
        work = issue(value, True)
        assert not work.is_completed()
        value + 1
        assert device.kinds == [Kind.RACE]
        Work.is_done = True
        try:
            assert work.is_completed()
        finally:
            Work.is_done = False
        device.checker.findings.clear()
        value.add_(1)
        assert device.kinds == []


def test_everything_is_undone() -> None:
    # Kills: callbacks or patches left behind; a second trace that is refused for ever.
    before = torch.cuda.Event.query, len(_gpu_trace.EventRecordCallbacks.callback_list)
    device = Device()
    with traced(device.trace):
        with pytest.raises(RuntimeError, match="another tracer is active"), traced(Device().trace):
            pass
        assert torch.cuda.Event.query is not before[0]
    assert (torch.cuda.Event.query, len(_gpu_trace.EventRecordCallbacks.callback_list)) == before
    torch.zeros(8)
    with traced(Device().trace):
        pass


def test_accesses_of_fake_tensors_are_skipped(device: Device) -> None:
    # Kills: a crash when torch.compile traces under the checker.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        torch.zeros(8).add_(1)
    assert device.kinds == []


def test_byte_ranges_carry_addresses(device: Device) -> None:
    # Kills: addresses of the storage instead of the slice, which would name the wrong parameter.
    seen: list[Access] = []
    device.checker.launched = lambda operator, stream, accesses: seen.extend(accesses)  # type: ignore[method-assign]
    value = torch.zeros(8)
    seen.clear()
    value[2:4].add_(1)
    (access,) = [access for access in seen if access.writes]
    assert (access.start, access.end, access.address) == (8, 16, value.data_ptr() + 8)
