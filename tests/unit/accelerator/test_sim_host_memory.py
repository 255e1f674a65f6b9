"""Page-locked memory of the simulated device: the host's own, reached by copies on streams."""

from collections.abc import Iterator

import pytest
import torch

from deepspeed.accelerator.sim_accelerator import Sim_Accelerator, simulate
from deepspeed.verify import check_streams


@pytest.fixture
def sim() -> Iterator[Sim_Accelerator]:
    with simulate() as accelerator:
        yield accelerator


def test_pinned_memory_is_not_on_the_device(sim: Sim_Accelerator) -> None:
    # Kills: taking host memory for the device's, so that offload would never be staged.
    device = torch.ones(3)
    host = sim.pin_memory(device)
    assert sim.on_accelerator(device) and not sim.is_pinned(device)
    assert sim.is_pinned(host) and not sim.on_accelerator(host[1:])
    assert sim.is_pinned(host * 2)
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


def test_a_blocking_copy_is_done_when_it_returns(sim: Sim_Accelerator) -> None:
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


def test_waiting_before_the_change_is_no_race(sim: Sim_Accelerator) -> None:
    # Kills: reporting every use of host memory.
    with check_streams():
        device, host = torch.zeros(3), sim.pin_memory(torch.ones(3))
        device.copy_(host, non_blocking=True)
        sim.current_stream().synchronize()
        host.fill_(7.0)
    assert device.tolist() == [1.0, 1.0, 1.0]


def test_a_comparison_across_the_bus_is_refused(sim: Sim_Accelerator) -> None:
    # Kills: an answer that nothing was compared for, where a device raises.
    device, host = torch.ones(3), sim.pin_memory(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"refuses; compare a copy .*to_host"):
        torch.equal(device, host)
    assert torch.equal(sim.to_host(device), host) and torch.equal(device, torch.ones(3))


def test_a_mask_on_the_host_chooses(sim: Sim_Accelerator) -> None:
    # Kills: a result of as many elements as a mask without values would choose.
    device, mask = torch.arange(3.0), sim.pin_memory(torch.tensor([True, False, True]))
    assert device[mask].tolist() == [0.0, 2.0]
