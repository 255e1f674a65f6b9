"""What the host waits for on the simulated device, counted by kind and by place."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.host_waits import HostWaits
from deepspeed.accelerator.sim_accelerator import Sim_Accelerator, simulate
from unit.common import DistributedTest
from unit.models import config_of


@pytest.fixture
def sim() -> Iterator[Sim_Accelerator]:
    with simulate() as accelerator:
        yield accelerator


def an_event() -> Any:
    event = get_accelerator().Event()
    event.record()
    return event


def pinned(*size: int) -> torch.Tensor:
    return get_accelerator().pin_memory(torch.zeros(*size))


def mask() -> torch.Tensor:
    return torch.ones(3) > 0


WAITS: list[tuple[str, Callable[[], Any]]] = [
    ("item", lambda: torch.ones(3).sum().item()),
    ("item", lambda: bool(torch.ones(3).sum() > 0)),
    ("tolist", lambda: torch.ones(3).tolist()),
    ("numpy", lambda: torch.ones(3).numpy()),
    ("nonzero", lambda: torch.ones(3).nonzero()),
    ("equal", lambda: torch.equal(torch.ones(3), torch.ones(3))),
    ("unique", lambda: torch.ones(3).unique()),
    ("index by a mask", lambda: torch.ones(3)[mask()]),
    ("repeat_interleave", lambda: torch.ones(3).repeat_interleave(torch.ones(3, dtype=int))),
    ("event.synchronize", lambda: an_event().synchronize()),
    ("stream.synchronize", lambda: get_accelerator().current_stream().synchronize()),
    ("device synchronize", lambda: get_accelerator().synchronize()),
    ("blocking copy", lambda: torch.ones(3).cpu()),
    ("blocking copy", lambda: torch.ones(3).cpu().tolist()),
    ("blocking copy", lambda: torch.tensor([1.0], device=get_accelerator().device_name())),
    ("blocking copy", lambda: torch.ones(3).copy_(torch.tensor([1.0, 2.0, 3.0]))),
    ("blocking copy", lambda: torch.tensor([1.0, 2.0]).to(get_accelerator().device_name())),
    ("blocking copy", lambda: torch.ones(3).copy_(pinned(3))),
    ("blocking copy", lambda: pinned(3).copy_(torch.ones(3))),
]


@pytest.mark.parametrize(("kind", "program"), WAITS)
def test_each_wait_is_counted_once(sim: Sim_Accelerator, kind: str, program: Any) -> None:
    # Kills: a kind of wait that is not seen, or seen twice because it consists of others.
    with sim.count_host_waits() as waits:
        program()
    assert waits.total == 1
    line = program.__code__.co_firstlineno
    assert dict(waits.by_place) == {f"{__file__}:{line} in <lambda>: {kind}": 1}
    assert waits.pageable_copies.total() == (kind == "blocking copy")


def in_backward() -> None:
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()


def with_a_wait_between_streams() -> None:
    stream = get_accelerator().Stream()
    stream.wait_stream(get_accelerator().current_stream())
    an_event().wait(stream)
    an_event().query()
    stream.query()


def attention() -> None:
    queries = torch.ones(1, 1, 4, 8)
    torch.nn.functional.scaled_dot_product_attention(queries, queries, queries, is_causal=True)


def loading() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    for (rows,) in torch.utils.data.DataLoader(data, batch_size=2, shuffle=True):
        rows * 2


FREE: list[Callable[[], Any]] = [
    lambda: torch.ones(3).add_(1).sum(),
    lambda: torch.ones(3)[torch.tensor([0, 1])],
    lambda: torch.ones(3).index_put_((mask(),), torch.tensor(0.0)),
    lambda: torch.ones(3).repeat_interleave(torch.ones(3, dtype=int), output_size=3),
    lambda: pinned(3).copy_(torch.ones(3), non_blocking=True),
    lambda: torch.ones(3).copy_(pinned(3), non_blocking=True),
    lambda: (pinned(3).sum().item(), pinned(3).tolist()),
    lambda: torch.tensor([1.0, 2.0]).tolist(),
    lambda: get_accelerator().empty_cache(),
    *(in_backward, with_a_wait_between_streams, attention, loading),
]


@pytest.mark.parametrize("program", FREE)
def test_what_a_device_does_by_itself_is_no_wait(sim: Sim_Accelerator, program: Any) -> None:
    # Kills: counting what only the simulation waits for, and what lies in the host's own memory.
    with sim.count_host_waits() as waits:
        program()
    assert waits.total == 0 and not waits.pageable_copies


def test_a_copy_out_of_pageable_memory_is_named_though_nobody_waits(sim: Sim_Accelerator) -> None:
    # Kills: taking `non_blocking` for a promise that memory is page-locked.
    with sim.count_host_waits() as waits:
        torch.ones(3).copy_(torch.tensor([1.0, 2.0, 3.0]), non_blocking=True)
    assert waits.total == 0 and waits.pageable_copies.total() == 1


def test_nothing_is_counted_outside_and_other_threads_are_not(sim: Sim_Accelerator) -> None:
    # Kills: counters that stay, and waits of a thread that writes checkpoints; questions of a
    # thread whose device nobody has set.
    event, told = an_event(), list[str]()

    def write() -> None:
        for ask in (event.synchronize, event.query, sim.current_stream().query):
            with pytest.raises(RuntimeError, match="whose device is the first one until it says"):
                ask()
            told.append("refused")
        sim.set_device(0)
        told.append(str(event.synchronize()))

    with sim.count_host_waits() as waits:
        other = threading.Thread(target=write)
        other.start()
        other.join()
    torch.ones(3).sum().item()
    assert waits.total == 0 and torch.tensor([1.0]).item() == 1.0
    assert told == [*["refused"] * 3, "None"]


def test_a_wait_of_backward_is_the_programs() -> None:
    # Kills: counting one thread's alone, where devices run backward in one of autograd's.
    waits, leaf = HostWaits(), torch.ones(3, requires_grad=True)
    leaf.register_hook(lambda grad: waits.waited("hook"))
    backward = threading.Thread(target=leaf.sum().backward)
    backward.start()
    backward.join()
    assert waits.total == 1


def test_contexts_lie_in_one_another(sim: Sim_Accelerator) -> None:
    # Kills: an inner count that ends the outer one.
    with sim.count_host_waits() as outer:
        with sim.count_host_waits() as inner:
            torch.ones(3).sum().item()
        torch.ones(3).sum().item()
    assert (outer.total, inner.total) == (2, 1)


def test_a_device_that_cannot_tell_says_so() -> None:
    # Kills: zero waits because nobody looked.
    with pytest.raises(RuntimeError, match="DS_ACCELERATOR=sim"):
        CPU_Accelerator().count_host_waits()


def test_host_memory_is_as_torch_hands_it_out(sim: Sim_Accelerator) -> None:
    # Kills: page-locked memory that is counted as it was asked for, split, or given back.
    host = sim.simulator.allocator.host
    first = sim.pin_memory(torch.zeros(600))
    assert host.nbytes == 4096 and sim.is_pinned(first) and not sim.on_accelerator(first)
    del first
    smaller = sim.pin_memory(torch.zeros(300))
    assert host.nbytes == 4096 + 2048 and smaller.tolist() == [0.0] * 300
    other = sim.pin_memory(torch.empty(1000), make_copy=False)
    pageable = sim.host_empty(100, torch.float32)
    assert host.nbytes == 4096 + 2048 + 400 and other[0].isnan() and pageable.isnan().all()
    assert not sim.is_pinned(pageable) and not sim.on_accelerator(pageable)
    with sim.count_host_waits() as waits:
        pageable.copy_(torch.ones(100), non_blocking=True)  # which returns when it is done
        assert pageable.tolist() == [1.0] * 100
    assert waits.total == 1 and waits.pageable_copies.total() == 1
    del pageable
    assert host.nbytes == 4096 + 2048


class TestTraining(DistributedTest):
    world_size = 2

    def test_what_nccl_does_not_take_is_refused(self) -> None:
        # Kills: tensors that NCCL cannot reach, or reads as if they were contiguous, and types and
        # sums that it has not; refusing what it takes.
        with simulate() as sim:
            host = sim.host_empty(3, torch.float32, pin=True).zero_()
            matrix, image = torch.zeros(4, 4), torch.zeros(2, 3, 4, 4)
            cases: dict[str, Callable[[], Any]] = {
                r"all_reduce: .*\(3,\) is in host memory": lambda: dist.all_reduce(host),
                "broadcast: .*int16, which": lambda: dist.broadcast(matrix.short(), src=0),
                "all_reduce: .*float8": lambda: dist.all_reduce(matrix.to(torch.float8_e5m2)),
                r"strides \(1, 4\) is not contiguous": lambda: dist.all_reduce(matrix.t()),
                "isend: .* not contiguous": lambda: dist.isend(matrix[:, :1], 1 - dist.get_rank()),
                "no bitwise": lambda: dist.all_reduce(matrix.int(), op=dist.ReduceOp.BOR),
            }
            for told, issue in cases.items():
                with pytest.raises(RuntimeError, match=told):
                    issue()
            dist.all_reduce(image.to(memory_format=torch.channels_last))
            dist.all_reduce(matrix.to(torch.complex64))
            dist.all_gather([matrix[:, 0], matrix[:, 1]], torch.ones(4))
            assert matrix.sum() == 8

    def test_hosts_meet_to_make_a_communicator(self) -> None:
        # Kills: a first operation that waits for nobody; one wait for every direction of messages,
        # or for each operation; counting a group of one rank, or groups of a bound world.
        other = 1 - dist.get_rank()
        with simulate() as sim:
            group, alone = (
                dist.new_group([0, 1]),
                dist.new_group([dist.get_rank()], by_members=True),
            )
            with sim.count_host_waits() as waits:
                dist.all_reduce(torch.zeros(3), group=alone)
                for _ in range(2):
                    dist.all_reduce(torch.zeros(3), group=group)
                    works = [dist.isend(torch.zeros(3), other, group=group)]
                    works += [dist.irecv(torch.zeros(3), other, group=group)]
                    for work in works:
                        work.wait()
            met = [place for place in waits.by_place if place.endswith("use of a communicator")]
            assert waits.total == len(met) == 2
            with (
                sim.capture_to_graph(None),
                pytest.raises(RuntimeError, match="first all_reduce of"),
            ):
                dist.all_reduce(torch.zeros(3), group=dist.new_group([0, 1]))

    def test_places_lie_in_the_package_and_collectives_do_not_wait(self) -> None:
        # Kills: places inside of device or communication layer, counting what is only issued.
        with simulate() as sim:
            dist.init_distributed()
            config = config_of(2, 1, optimizer={"type": "SGD", "params": {"lr": 0.1}})
            engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=config)
            with sim.count_host_waits() as waits:
                engine.backward(engine(torch.ones(1, 4)).sum())
            assert waits.total == 0, waits.by_place
            with sim.count_host_waits() as waits:
                total = torch.ones(1)
                dist.all_reduce(total)
            assert waits.total == 0, waits.by_place
            with sim.count_host_waits() as waits:
                engine.step()
            places = list(waits.by_place)
            assert all(p.startswith("deepspeed/") for p in places), places
            assert not any("/accelerator/" in p or "/comm/" in p for p in places), places
            engine.destroy()
