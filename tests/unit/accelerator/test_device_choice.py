"""Which device a process uses, by its local rank and by what it sees."""

import argparse
import os
from collections.abc import Iterator

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.device_choice import select_device
from unit.common import DistributedTest
from unit.models import config_of


class Several(CPU_Accelerator):
    """The host as `count` devices, which refuses an ordinal that a device would refuse."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.chosen: list[int] = []

    def device_name(self, device_index: int | None = None) -> str:
        return "several"

    def is_synchronized_device(self) -> bool:
        return False

    def device_count(self) -> int:
        return self.count

    def visible_devices_envs(self) -> list[str]:
        return ["SEVERAL_VISIBLE_DEVICES"]

    def set_device(self, device_index: int) -> None:
        if device_index >= self.count:
            raise RuntimeError("invalid device ordinal")
        self.chosen.append(device_index)


@pytest.fixture
def kept_accelerator() -> Iterator[None]:
    before = get_accelerator()
    yield
    set_accelerator(before)


def test_the_host_counts_processes(kept_accelerator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # As upstream: scripts divide ranks by it. A rank beyond the count lacks no device.
    set_accelerator(CPU_Accelerator())
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert get_accelerator().device_count() == 3
    assert get_accelerator().current_device_name() == "cpu" and select_device(5) == 5
    monkeypatch.delenv("LOCAL_SIZE")
    assert get_accelerator().device_count() == 1
    monkeypatch.setenv("LOCAL_SIZE", "some")
    with pytest.raises(ValueError, match="LOCAL_SIZE='some' is not a positive integer"):
        get_accelerator().device_count()


def test_rule(kept_accelerator: None) -> None:
    for count, local_rank, device in ((1, 0, 0), (1, 5, 0), (8, 0, 0), (8, 5, 5), (8, 7, 7)):
        several = Several(count)
        set_accelerator(several)
        assert select_device(local_rank) == device and several.chosen == [device]
    several = Several(4)
    set_accelerator(several)
    with pytest.raises(ValueError, match=r"LOCAL_RANK=4, but this process sees 4 devices") as told:
        select_device(4)
    assert "SEVERAL_VISIBLE_DEVICES" in str(told.value) and several.chosen == []


class TestEngine(DistributedTest):
    """Each rank sees one device, as with `srun --gpus-per-task=1`."""

    world_size = 2
    init_distributed = False

    def _engine(self, several: Several, **args: int) -> None:
        set_accelerator(several)
        dist.init_distributed("gloo")
        dist.barrier()  # rank 0, which may raise below, hosts the store by which others connect
        config = config_of(0, 1, optimizer={"type": "SGD", "params": {"lr": 0.1}})
        model, arguments = torch.nn.Linear(2, 2), argparse.Namespace(**args)
        deepspeed.initialize(args=arguments, model=model, config=config)

    def test_visible_devices(self) -> None:
        rank = int(os.environ["LOCAL_RANK"])
        for count, args in ((1, {}), (1, {"local_rank": rank}), (2, {})):
            several = Several(count)
            self._engine(several, **args)
            assert set(several.chosen) == {rank % count}, (count, args)

    def test_an_argument_that_no_device_has(self) -> None:
        with pytest.raises(ValueError, match=r"args.local_rank=2, but this process sees 2 devices"):
            self._engine(Several(2), local_rank=2)
