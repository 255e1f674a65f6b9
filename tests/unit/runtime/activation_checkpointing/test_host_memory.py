"""Inputs that are copied to the host leave the device, however far the host runs ahead."""

from collections.abc import Iterator

import pytest
import torch

from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.verify import check_streams

LAYERS = 10
NUMEL = 1 << 12
INPUT = 4 * NUMEL  # bytes


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    checkpointing.reset()


def forward(x: torch.Tensor) -> torch.Tensor:
    for _ in range(LAYERS):
        x = checkpointing.checkpoint(torch.sin, x)
    return x


@pytest.mark.parametrize("on_host, least, most", [(True, 2, 5), (False, LAYERS, LAYERS + 2)])
def test_two_copies_are_under_way(on_host: bool, least: int, most: int) -> None:
    # Kills: inputs held until the host happens to see that they were copied, which it never does
    # when it runs ahead; then this saves nothing. Without host copies all inputs are there, and the
    # test sees them.
    with simulate() as device, check_streams():
        checkpointing.configure(None, checkpoint_in_cpu=on_host)
        x = torch.ones(NUMEL, requires_grad=True)
        for _ in range(2):
            device.reset_peak_memory_stats()
            before = device.memory_allocated()
            y = forward(x)
            # The newest input, its output, two that are being copied, and one that is dropped as
            # the next copy is issued.
            peak = (device.max_memory_allocated() - before) / INPUT
            assert least <= peak <= most, peak
            y.sum().backward()
            del y
        grad = x.grad
        assert grad is not None
        found = grad.clone()
    expected = torch.ones(NUMEL, requires_grad=True)
    y = expected
    for _ in range(LAYERS):
        y = torch.sin(y)
    (2 * y.sum()).backward()
    assert torch.allclose(found, expected.grad)
