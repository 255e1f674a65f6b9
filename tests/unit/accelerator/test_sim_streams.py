"""The simulated device: what is not ordered is wrong every time, the rest is the host's result."""

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import Sim_Accelerator, simulate
from deepspeed.accelerator.thread_state import KNOWS_SAVED_HOOKS
from deepspeed.verify import check_streams


@pytest.fixture
def sim() -> Iterator[Sim_Accelerator]:
    with simulate() as accelerator:
        yield accelerator


def on_side(sim: Sim_Accelerator, value: float = 1.0) -> tuple[object, torch.Tensor]:
    """A side stream, and a tensor of fours that it produces late."""
    side = sim.Stream()
    base = torch.full((4,), value)
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        produced = base + 3.0
    return side, produced


def test_missing_wait_reads_poison(sim: Sim_Accelerator) -> None:
    # Kills: a scheduler that runs a producer nobody waits for.
    _, produced = on_side(sim)
    assert (produced * 2).isnan().all().item()


def wait_for_event(sim: Sim_Accelerator, side: Any) -> None:
    event = sim.Event()
    event.record(side)
    event.wait()


WAITS: dict[str, Callable[[Sim_Accelerator, Any], object]] = {
    "stream": lambda sim, side: sim.current_stream().wait_stream(side),
    "event": wait_for_event,
    "synchronize": lambda sim, side: side.synchronize(),
    "device": lambda sim, side: sim.synchronize(),
    "event_synchronize": lambda sim, side: side.record_event().synchronize(),
}


@pytest.mark.parametrize("how", WAITS)
def test_waits_order(sim: Sim_Accelerator, how: str) -> None:
    # Kills: a way to wait that doesn't.
    side, produced = on_side(sim)
    WAITS[how](sim, side)
    assert (produced * 2).tolist() == [8.0] * 4


def test_wait_covers_only_what_was_issued_before(sim: Sim_Accelerator) -> None:
    # Kills: a wait for the whole stream instead of a position.
    side, _ = on_side(sim)
    sim.current_stream().wait_stream(side)
    with sim.stream(side):
        late = torch.ones(3) * 2
    assert late.isnan().all().item()
    sim.current_stream().wait_stream(side)
    assert late.tolist() == [2.0] * 3


def test_queries_run_nothing(sim: Sim_Accelerator) -> None:
    # Kills: a query that hurries the device.
    side, produced = on_side(sim)
    event = side.record_event()
    assert not side.query()
    assert not event.query()
    assert produced.isnan().all().item()
    side.synchronize()
    assert side.query()
    assert event.query()


def test_integers_and_flags_are_poisoned(sim: Sim_Accelerator) -> None:
    # Kills: fresh memory that looks like a result.
    with sim.stream(sim.Stream()):
        numbers, flags = torch.arange(3), torch.zeros(3, dtype=torch.bool)
    assert (numbers < -1_000_000).all().item()
    assert flags.tolist() == [True] * 3


@pytest.mark.parametrize("how", ["free", "record_stream", "keep"])
def test_only_freed_memory_is_reused_under_queued_work(sim: Sim_Accelerator, how: str) -> None:
    # Kills: an allocator that is kinder than a device's, a record_stream that does nothing, and
    # reuse of memory that is still referenced.
    source = torch.full((1000,), 5.0) + 0.0
    side = sim.Stream()
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        copied = source * 1.0
    if how == "record_stream":
        source.record_stream(side)
    kept = source if how == "keep" else None
    del source
    torch.full((1000,), 7.0) + 0.0  # takes the memory on the default stream
    sim.default_stream().synchronize()
    side.synchronize()
    assert (copied[0].item() != 5.0) if how == "free" else (copied.tolist() == [5.0] * 1000)
    del kept


def test_memory_counters(sim: Sim_Accelerator) -> None:
    # Kills: counters that forget frees, or peaks that follow them.
    before = sim.memory_allocated()
    tensor = torch.ones(1 << 18)
    assert sim.memory_allocated() - before == 1 << 20
    del tensor
    assert sim.memory_allocated() == before
    assert sim.max_memory_allocated() >= before + (1 << 20)
    assert sim.memory_reserved() >= 1 << 20
    sim.synchronize()
    sim.empty_cache()
    assert sim.memory_reserved() <= before + (1 << 20) // 2


def model() -> nn.Sequential:
    first, behind = (nn.Embedding(11, 8), nn.Linear(8, 16)), (nn.GELU(), nn.Dropout(0.25))
    return nn.Sequential(*first, nn.LayerNorm(16), *behind, nn.Linear(16, 11))


def train() -> list[torch.Tensor]:
    """Losses and parameters, of dropout, foreach optimizers, clipping, autocast, a random batch."""
    torch.manual_seed(3)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True)
    losses = []
    for _ in range(4):
        tokens = torch.randint(11, (6,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(net(tokens).float(), tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in net.parameters()), torch.rand(3)]


@pytest.mark.parametrize(
    "device",
    [*({"schedule": n} for n in range(3)), {"backward_streams": 1}, {"backward_streams": 3}],
    ids=str,
)
def test_training_equals_the_host_bit_for_bit(device: dict[str, int]) -> None:
    # Kills: numbers that depend on when work runs (generators, autocast, grad mode), wrong strides
    # or dtypes of results, a backward whose end doesn't wait for the streams that accumulated.
    expected = train()
    with simulate(**device):
        found = [tensor.clone() for tensor in train()]
    for wanted, value in zip(expected, found, strict=True):
        assert torch.equal(wanted, value)


def test_hooks_find_the_stream_of_their_node(sim: Sim_Accelerator) -> None:
    # Kills: hooks on the caller's stream, or on the stream of the node before, whatever stream the
    # gradient is accumulated on.
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    sides = [sim.Stream() for _ in weights]
    before, after = [], []
    for weight in weights:
        for _ in range(2):
            weight.register_hook(lambda grad: before.append(sim.current_stream()))
        weight.register_post_accumulate_grad_hook(lambda param: after.append(sim.current_stream()))
    with sim.backward_on_streams(dict(zip(weights, sides, strict=True)).__getitem__):
        # One node hands both gradients out: the second parameter comes right behind the first.
        torch.add(*weights, alpha=2).sum().backward()
    assert set(after) == set(sides)
    assert before == [stream for stream in after for _ in range(2)]
    assert sim.current_stream() is sim.default_stream()
    assert [weight.grad.tolist() for weight in weights] == [[1.0] * 4, [2.0] * 4]
    assert all(len(weight._backward_hooks) == 2 for weight in weights)


@pytest.mark.skipif(not KNOWS_SAVED_HOOKS, reason="torch 2.6 does not tell hooks of saved tensors")
def test_backward_is_in_a_thread_of_its_own(sim: Sim_Accelerator) -> None:
    # Kills: hooks in the caller's thread, whose locks and thread-local values a device's do not
    # find; modes, autocast and hooks that do not reach it; errors that stay there.
    leaf, local, seen = torch.ones(3, requires_grad=True), threading.local(), list[Any]()
    local.value = 1

    def hook(grad: torch.Tensor) -> torch.Tensor:
        seen.append((hasattr(local, "value"), threading.current_thread().name.split("_")[0]))
        seen.append((torch.is_autocast_enabled("cpu"), sim.current_stream()))
        assert len(seen) < 3, "a second backward"
        return grad * 2

    leaf.register_hook(hook)
    with torch.autocast("cpu"):
        (leaf * 3).sum().backward()
        with pytest.raises(AssertionError, match="a second backward"):
            (leaf * 3).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [6.0] * 3
    assert seen[0] == (False, "backward of the simulated device")
    assert seen[1] == (True, sim.default_stream())


def test_nodes_run_where_forward_made_them(sim: Sim_Accelerator) -> None:
    # Kills: forgetting which stream was current in forward.
    side = sim.Stream()
    inputs = torch.ones(4, requires_grad=True)
    seen = []
    with sim.stream(side):
        middle = inputs * 3
    middle.grad_fn.register_hook(lambda inputs, outputs: seen.append(sim.current_stream()))
    sim.current_stream().wait_stream(side)
    (middle * 2).sum().backward()
    assert seen == [side]
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [6.0] * 4


def many_streams(sim: Sim_Accelerator, x: torch.Tensor, case: str) -> torch.Tensor:
    """A loss whose gradients for one node come from several streams."""
    main, sides = sim.current_stream(), [sim.Stream(), sim.Stream()]
    w = x * 1.0
    parts = [w * 3]
    for number, side in enumerate(sides):
        side.wait_stream(main)
        with sim.stream(side):
            parts += [w * 2, w * float(number)] if case == "several each" else [w * 2]
    for side in sides:
        main.wait_stream(side)
    parts.append(w * 5)
    if case == "loss on a side stream":
        sides[0].wait_stream(main)
        with sim.stream(sides[0]):
            loss = torch.stack(parts).sum()
        main.wait_stream(sides[0])
        return loss
    return sum(parts[1:], parts[0]).sum()


@pytest.mark.parametrize("case", ["one each", "several each", "loss on a side stream"])
def test_sums_of_gradients_wait_for_their_parts(case: str) -> None:
    # Kills: a false race, and poison, where autograd adds gradients of several streams: a summand
    # that is not waited for, a sum of sums that is not, memory that is reused while it is added,
    # and the gradient of a loss that a side stream made.
    expected = {"one each": 12.0, "several each": 13.0, "loss on a side stream": 12.0}[case]
    for schedule in range(3):
        with simulate(schedule=schedule) as sim, check_streams():
            x = torch.ones(4, requires_grad=True)
            many_streams(sim, x, case).backward()
            assert x.grad is not None and x.grad.tolist() == [expected] * 4


def test_host_reads_see_the_current_stream(sim: Sim_Accelerator, tmp_path: Path) -> None:
    # Kills: a way to look at memory that doesn't wait for what the current stream still has to do.
    value = torch.ones(3) * 2
    assert "2., 2., 2." in repr(value)
    assert (torch.ones(3) * 2).numpy().tolist() == [2.0] * 3
    assert copy.deepcopy(torch.ones(3) * 2).sum().item() == 6.0
    torch.save(torch.ones(3) * 2, tmp_path / "saved.pt")
    assert torch.load(tmp_path / "saved.pt").tolist() == [2.0] * 3
    assert (torch.ones(3) * 2).nonzero().numel() == 3
    assert torch.arange(4)[torch.tensor([True, False, True, False])].tolist() == [0, 2]


def test_a_kernel_that_looks_at_its_arguments_runs_in_its_place(sim: Sim_Accelerator) -> None:
    # Kills: running what is queued behind a custom operator while its kernel reads a value.
    @torch.library.custom_op("deepspeed_test::rows_until", mutates_args=())
    def rows_until(rows: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        (last,) = end.tolist()
        result = torch.zeros_like(rows)
        result[:last] = rows[:last]
        return result

    found = rows_until(torch.ones(3) + 1.0, torch.tensor([2]))
    assert (found + 1.0).tolist() == [3.0, 3.0, 1.0]


def test_errors_name_the_operator(sim: Sim_Accelerator) -> None:
    # Kills: an error of a queued operator that nobody can place.
    table = torch.randn(4, 2)
    torch.nn.functional.embedding(torch.tensor([9]) + 0, table)
    with pytest.raises(RuntimeError, match="aten::embedding, issued on <default stream>"):
        sim.synchronize()


def test_closing_restores_the_host() -> None:
    # Kills: patches, modes or accelerators that outlive the simulation.
    before, numpy = get_accelerator(), torch.Tensor.numpy
    with simulate() as sim:
        inside = torch.ones(2) + 1
        assert get_accelerator() is sim
    assert get_accelerator() is before
    assert torch.Tensor.numpy is numpy
    assert inside.tolist() == [2.0, 2.0]


def test_numbers_in_the_environment_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: a typing mistake that silently means schedule 0.
    monkeypatch.setenv("DS_SIM_SCHEDULE", "all")
    with pytest.raises(ValueError, match="DS_SIM_SCHEDULE='all' is not a number"):
        Sim_Accelerator()


def test_pinned_memory_is_not_on_the_device(sim: Sim_Accelerator) -> None:
    # Kills: taking host memory for the device's, so that offload would never be staged.
    device = torch.ones(3)
    host = sim.pin_memory(device)
    assert sim.on_accelerator(device) and not sim.is_pinned(device)
    assert sim.is_pinned(host) and not sim.on_accelerator(host[1:])
    assert not sim.on_accelerator(host * 2) and not sim.is_pinned(host * 2)
    assert host.tolist() == [1.0, 1.0, 1.0]


def test_the_host_reads_an_unfinished_copy_as_it_is(sim: Sim_Accelerator) -> None:
    # Kills: waiting for the stream behind the host's back, which hides a missing
    # event.synchronize().
    host = sim.pin_memory(torch.zeros(3))
    host.copy_(torch.full((3,), 5.0), non_blocking=True)
    event = sim.Event()
    event.record()
    early = (host + 1).tolist()
    event.synchronize()
    assert early == [1.0, 1.0, 1.0] and (host + 1).tolist() == [6.0, 6.0, 6.0]
    # Kills: an asynchronous copy where nobody asked for one.
    host = sim.pin_memory(torch.zeros(3))
    host.copy_(torch.full((3,), 5.0))
    assert (host + 1).tolist() == [6.0, 6.0, 6.0]


def test_changing_memory_that_is_still_being_sent_is_a_race(sim: Sim_Accelerator) -> None:
    # Kills: a checker that doesn't see what the host writes; a simulation that copies early.
    with check_streams(raises=False) as checker:
        device, host = torch.zeros(3), sim.pin_memory(torch.ones(3))
        device.copy_(host, non_blocking=True)
        host.fill_(7.0)
        sim.synchronize()
    assert device.tolist() == [7.0, 7.0, 7.0]
    assert "the host never waits for <default stream>, which read" in checker.report()
    # Waiting before the change is none. Kills: reporting every use of host memory.
    with check_streams():
        device, host = torch.zeros(3), sim.pin_memory(torch.ones(3))
        device.copy_(host, non_blocking=True)
        sim.current_stream().synchronize()
        host.fill_(7.0)
    assert device.tolist() == [1.0, 1.0, 1.0]


def test_a_comparison_across_the_bus_is_refused(sim: Sim_Accelerator) -> None:
    # Kills: an answer that nothing was compared for, where a device raises.
    device, host = torch.ones(3), sim.pin_memory(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"refuses; use a copy .*to_host"):
        torch.equal(device, host)
    assert torch.equal(sim.to_host(device), host) and torch.equal(device, torch.ones(3))


def test_a_mask_on_the_host_chooses(sim: Sim_Accelerator) -> None:
    # Kills: a result of as many elements as a mask without values would choose.
    device, mask = torch.arange(3.0), sim.pin_memory(torch.tensor([True, False, True]))
    assert device[mask].tolist() == [0.0, 2.0]
