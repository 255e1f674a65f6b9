"""Two dtypes in one piece of memory: nothing is lost on the way, and no memory is taken for it."""

import pytest
import torch

from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.gradients.overlay import TAIL_NUMEL, Overlay

CPU = torch.device("cpu")
SIZES = [0, 1, 7, TAIL_NUMEL - 1, TAIL_NUMEL, TAIL_NUMEL + 1, 5 * TAIL_NUMEL + 3, 17 * TAIL_NUMEL]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_there_and_back(numel: int, narrow: torch.dtype, wide: torch.dtype) -> None:
    # Kills: a piece that writes over elements not read yet, in either direction; a lost tail.
    overlay = Overlay(numel, narrow, wide, CPU)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(narrow)
    assert not overlay.narrow.any() and overlay.narrow.shape == overlay.wide.shape == (numel,)
    overlay.narrow.copy_(values)
    overlay.widen()
    assert torch.equal(overlay.wide, values.to(wide))
    overlay.wide.mul_(2)
    overlay.narrow_again()
    assert torch.equal(overlay.narrow, values * 2)


def test_one_dtype_is_one_buffer() -> None:
    overlay = Overlay(9, torch.float32, torch.float32, CPU)
    overlay.narrow.fill_(3)
    overlay.widen()
    assert torch.equal(overlay.wide, torch.full((9,), 3.0))
    overlay.narrow_again()
    assert torch.equal(overlay.narrow, torch.full((9,), 3.0))


def test_starts_are_aligned() -> None:
    # Kills: a narrow buffer right behind an odd number of bytes.
    for numel in (1, 3, 1000, 1001):
        overlay = Overlay(numel, torch.bfloat16, torch.float32, CPU)
        assert (overlay.narrow.data_ptr() - overlay.wide.data_ptr()) % 16 == 0


def test_memory_of_one() -> None:
    # Kills: buffers apart, or a conversion through a whole copy.
    numel = 64 * TAIL_NUMEL
    with simulate() as device:
        overlay = Overlay(numel, torch.bfloat16, torch.float32, CPU)
        overlay.widen()
        overlay.narrow_again()
        assert 4 * numel <= device.max_memory_allocated() < 4.2 * numel
