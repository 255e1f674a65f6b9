"""Parameters move into a flat buffer, within the memory that the device has."""

import pytest
import torch
from torch import nn

from deepspeed.accelerator.sim_accelerator import Sim_Accelerator, simulate
from deepspeed.runtime.sharding import flattening
from deepspeed.runtime.sharding.flattening import flatten, make_master, write_master

LAYERS = 16
NUMEL = 1 << 16


def make_params() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(NUMEL // 64, 64)) for _ in range(LAYERS)]
    params[3] = nn.Parameter(torch.randn(64, NUMEL // 64).t())
    params[5] = nn.Parameter(torch.zeros(0, 3))
    return params


def offsets_of(params: list[nn.Parameter]) -> list[int]:
    return [sum(param.numel() for param in params[:index]) for index in range(len(params))]


@pytest.mark.parametrize("short", [False, True])
def test_values_and_memory(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: the buffer beside all parameters on a device that has no room for both; a way through
    # the host where there is; parameters that do not lie in the order of their elements.
    with simulate() as device:
        params = make_params()
        tied = nn.ModuleDict({"left": nn.Linear(1, 1), "right": nn.Linear(1, 1)})
        tied["left"].weight = tied["right"].weight = params[0]
        offsets, numel = offsets_of(params), sum(param.numel() for param in params)
        expected = torch.cat([param.detach().reshape(-1) for param in params])
        device.synchronize()
        weights = 4 * numel
        if short:
            room = weights - 1
            monkeypatch.setattr(Sim_Accelerator, "available_memory", lambda self, index=None: room)
        before = device.memory_allocated()
        device.reset_peak_memory_stats()
        flat = flatten(params, offsets, numel + 10)
        beside = device.max_memory_allocated() - before
        assert torch.equal(flat[:numel], expected) and not flat[numel:].any()
        for param, start in zip(params, offsets, strict=True):
            assert param.data_ptr() == flat[start:].data_ptr() or not param.numel()
            assert param.shape[1:] in ((64,), (3,))
        assert tied["left"].weight is tied["right"].weight is params[0]
    largest = 4 * NUMEL
    if short:
        assert beside <= largest + (1 << 14), beside / largest
    else:
        assert weights <= beside < weights + largest


def test_the_host_has_no_other_place(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: a copy of host memory in host memory.
    monkeypatch.setattr(flattening, "_to_host", lambda param: pytest.fail("copied"))
    params = make_params()
    flatten(params, offsets_of(params), sum(param.numel() for param in params))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_masters(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: a piece that is left out, or written to the wrong place.
    monkeypatch.setattr(flattening, "CONVERTED_NUMEL", 7)
    shard = torch.randn(24).bfloat16()
    master = make_master(shard, torch.device(device), torch.float32)
    assert master.shape == shard.shape and master.dtype == torch.float32
    assert master.device.type == device
    if device == "cpu":
        assert torch.equal(master, shard.float())
        write_master(master, shard * 2)
        assert torch.equal(master, shard.float() * 2)
