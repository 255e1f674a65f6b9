"""Observers of collectives: what they are told, in which order, by every operation."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.comm.watch import observation
from deepspeed.comm.watch.observation import CollectiveCall, call_site
from unit.common import DistributedTest, needs_all_to_all, needs_newer_gloo


class Recorder:
    """Notes the calls it sees, and the order in which several recorders saw them."""

    def __init__(self, label: str = "", order: list[str] | None = None) -> None:
        self.label = label
        self.order = order if order is not None else []
        self.calls: list[CollectiveCall] = []

    def run(self, call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
        self.calls.append(call)
        self.order.append(f"{self.label} in")
        result = proceed()
        self.order.append(f"{self.label} out")
        return result


@contextmanager
def observed_by(*observers: Any) -> Iterator[None]:
    for observer in observers:
        observation.add_observer(observer)
    try:
        yield
    finally:
        for observer in observers:
            observation.remove_observer(observer)


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


class TestChain(DistributedTest):
    world_size = 1

    def test_order_and_removal(self) -> None:
        order: list[str] = []
        first, second, device = (Recorder(name, order) for name in ("first", "second", "device"))
        with observed_by(first, second):
            observation.add_observer(device, innermost=True)
            observation.add_observer(first)  # once is enough
            dist.all_reduce(torch.ones(1))
            names = ("second", "first", "device")
            inwards, outwards = (f"{name} in" for name in names), (f"{name} out" for name in names)
            assert order == [*inwards, *[*outwards][::-1]]
            assert observation.is_observed_by(device)
            observation.remove_observer(device)
            observation.remove_observer(device)
            dist.all_reduce(torch.ones(1))
            assert len(device.calls) == 1 and len(first.calls) == 2
        # Nobody is left: the operations must call torch directly again.
        assert observation.chain is None

    def test_an_observer_can_replace_an_operation(self) -> None:
        def replace(call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
            call.argument("tensor").fill_(7.0)
            return "handle"

        tensor = torch.ones(1)
        with observed_by(SimpleNamespace(run=replace)):
            assert dist.all_reduce(tensor) == "handle" and tensor.item() == 7.0
        # Or choose how to issue it.
        with observed_by(SimpleNamespace(run=lambda call, proceed: call.with_async(True).issue())):
            dist.all_reduce(torch.ones(1)).wait()
            # A barrier's arguments stand in another order.
            dist.barrier().wait()

    def test_the_call_site_is_the_callers_whoever_observes(self) -> None:
        found = []

        def look(call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
            frame = call_site()
            found.append("" if frame is None else frame.f_code.co_name)
            return proceed()

        # The other observer's own frame, in this file, lies between.
        with observed_by(SimpleNamespace(run=look), Recorder()):
            dist.all_reduce(torch.ones(1))
        assert found == ["test_the_call_site_is_the_callers_whoever_observes"]

    def test_without_a_choice_of_asynchrony(self) -> None:
        call = CollectiveCall("isend", lambda: None, (torch.ones(1), 0, None, 0))
        assert call.async_op and call.with_async(True) is call
        with pytest.raises(ValueError, match="isend has no async_op=False"):
            call.with_async(False)


# Per operation: its arguments, which of their tensors are read, which are written. `t` is a list of
# six tensors.
T = list[torch.Tensor]
CASES: dict[str, Callable[[T], tuple[tuple[Any, ...], T, T]]] = {
    "all_reduce": lambda t: ((t[0],), [t[0]], [t[0]]),
    "inference_all_reduce": lambda t: ((t[0],), [t[0]], [t[0]]),
    "reduce": lambda t: ((t[0], 0), [t[0]], [t[0]]),
    "reduce_scatter_tensor": lambda t: ((t[0], t[1]), [t[1]], [t[0]]),
    "reduce_scatter_fn": lambda t: ((t[0], t[1]), [t[1]], [t[0]]),
    "reduce_scatter": lambda t: ((t[0], [t[1]]), [t[1]], [t[0]]),
    "all_reduce_coalesced": lambda t: ((t[:2],), t[:2], t[:2]),
    "all_gather": lambda t: (([t[0]], t[1]), [t[1]], [t[0]]),
    "all_gather_into_tensor": lambda t: ((t[0], t[1]), [t[1]], [t[0]]),
    "allgather_fn": lambda t: ((t[0], t[1]), [t[1]], [t[0]]),
    "all_gather_coalesced": lambda t: ((t[:2], t[2:4]), t[2:4], t[:2]),
    "all_gather_object": lambda t: (([None], 1), [], []),
    "gather": lambda t: ((t[0], [t[1]]), [t[0]], [t[1]]),
    "broadcast": lambda t: ((t[0], 0), [t[0]], []),
    "broadcast_object_list": lambda t: (([1], 0), [], []),
    "scatter": lambda t: ((t[0], [t[1]]), [t[1]], [t[0]]),
    "all_to_all_single": lambda t: ((t[0], t[1]), [t[1]], [t[0]]),
    "all_to_all": lambda t: (([t[0]], [t[1]]), [t[1]], [t[0]]),
    "barrier": lambda t: ((), [], []),
    "monitored_barrier": lambda t: ((), [], []),
}
# Operations that not every gloo has.
LACKING = {"reduce_scatter": needs_newer_gloo, "all_to_all": needs_all_to_all}
PAIRS = ("send", "recv", "isend", "irecv")


_NOT_OPERATIONS = {
    *("get_rank", "get_world_size", "get_global_rank", "get_backend_name"),
    *("get_all_ranks_from_group", "destroy_process_group"),
}


def _parameters(name: str) -> list[str]:
    value = getattr(dist, name)
    return list(inspect.signature(value).parameters) if inspect.isfunction(value) else []


class TestEveryOperation(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("name", CASES)
    def test_is_observed_with_what_it_reads_and_writes(self, name: str) -> None:
        tensors = [torch.full((2,), float(i)) for i in range(6)]
        args, reads, writes = CASES[name](tensors)
        recorder = Recorder()

        # Inside: the operation itself is not of interest.
        with observed_by(SimpleNamespace(run=lambda call, proceed: None), recorder):
            getattr(dist, name)(*args)
        (call,) = recorder.calls
        assert _same(call.reads, reads) and _same(call.writes, writes) and not call.async_op
        counted = writes if "all_gather" in name else reads
        assert call.group is None and call.num_bytes == sum(t.numel() * 4 for t in counted)

    @pytest.mark.parametrize(
        "name",
        [pytest.param(n, marks=LACKING.get(n, ())) for n in CASES if "async_op" in _parameters(n)],
    )
    def test_asynchrony_is_told(self, name: str) -> None:
        args, _, _ = CASES[name]([torch.zeros(2) for _ in range(6)])
        recorder = Recorder()
        with observed_by(recorder):
            getattr(dist, name)(*args, async_op=True).wait()
        (call,) = recorder.calls
        assert call.async_op and not call.with_async(False).async_op

    def test_no_operation_was_forgotten(self) -> None:
        with_group = {n for n in dist.__all__ if "group" in _parameters(n)}
        assert with_group - _NOT_OPERATIONS == {*CASES, *PAIRS}


class TestPairs(DistributedTest):
    world_size = 2

    def test_point_to_point_and_broadcast(self) -> None:
        recorder, tensor, rank = Recorder(), torch.zeros(2), dist.get_rank()
        with observed_by(recorder):
            if rank == 0:
                dist.send(tensor, 1, tag=3)
                dist.isend(tensor, 1).wait()
            else:
                assert dist.recv(tensor, 0, tag=3) == 0
                dist.irecv(tensor, 0).wait()
            dist.broadcast(tensor, 1)
        blocking, handed, broadcast = recorder.calls
        assert (blocking.async_op, handed.async_op) == (False, True)
        assert blocking.argument("tag") == 3 and blocking.argument("op", "none") == "none"
        on_0, on_1 = [tensor] * (rank == 0), [tensor] * (rank == 1)
        for call in (blocking, handed):
            assert _same(call.reads, on_0) and _same(call.writes, on_1)
        # The source's memory is only read: a checker must not call its other readers racy.
        assert _same(broadcast.reads, on_1) and _same(broadcast.writes, on_0)
