"""Models on a device and in a dtype; modules marked as leaves; profiler ranges."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules, unset_z3_leaf_modules
from deepspeed.utils import set_z3_leaf_modules_by_name as set_by_name
from deepspeed.utils import set_z3_leaf_modules_by_suffix as set_by_suffix
from deepspeed.utils.init_on_device import OnDevice
from deepspeed.utils.nvtx import instrument_w_nvtx
from unit.common import standing_in


def test_modules_have_shapes_without_memory() -> None:
    with OnDevice(dtype=torch.float16, device="meta"):
        model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.MultiheadAttention(4, 2))
    kinds = {(p.device.type, p.dtype) for p in model.parameters()}
    assert kinds == {("meta", torch.float16)} and model[0].weight.shape == (5, 4)


def test_integers_keep_their_dtype_and_arguments_win() -> None:
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        assert torch.arange(3).dtype == torch.int64 and torch.tensor([1]).dtype == torch.int64
        assert torch.tensor([1.0]).dtype == torch.full((2,), 0.5).dtype == torch.bfloat16
        assert torch.zeros(2, dtype=torch.int32).dtype == torch.int32
        assert torch.ones(2, device="cpu").device.type == "cpu"
    assert torch.empty(1).dtype == torch.float32 and torch.empty(1).device.type == "cpu"


def test_disabled_changes_nothing_and_an_exception_ends_it() -> None:
    with OnDevice(dtype=torch.float16, device="meta", enabled=False):
        assert torch.empty(2).dtype == torch.float32 and torch.empty(2).device.type == "cpu"
    with pytest.raises(KeyError), OnDevice(dtype=torch.float16):
        raise KeyError
    assert torch.empty(1).device.type == "cpu"


class RangeDevice(CPU_Accelerator):
    """Writes down the ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[str] = []

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        self.ranges.append(msg)

    def range_pop(self, domain: str | None = None) -> None:
        self.ranges.append("pop")


@pytest.fixture
def range_device() -> Iterator[RangeDevice]:
    with standing_in(RangeDevice()) as device:
        yield device


def test_ranges_close_also_after_an_exception(range_device: RangeDevice) -> None:
    @instrument_w_nvtx
    def divide(by: int) -> float:
        """Doc."""
        return 1 / by

    assert divide(2) == 0.5
    with pytest.raises(ZeroDivisionError):
        divide(by=0)
    assert [name.rsplit(".", 1)[-1] for name in range_device.ranges] == ["divide", "pop"] * 2
    assert divide.__doc__ == "Doc."


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


@pytest.mark.parametrize("classes", ["Linear", nn.Linear, ["Linear"], (nn.Linear,)])
def test_one_class_needs_no_list(classes: object) -> None:
    # Kills: reading a string as its letters, of which no module is.
    model = make()
    assert set_z3_leaf_modules(model, classes) == [model[0], model[1][0]]
    assert get_z3_leaf_modules(model) == [model[0], model[1][0]]
    unset_z3_leaf_modules(model, classes)
    assert get_z3_leaf_modules(model) == []


def test_one_name_is_not_part_of_another() -> None:
    # Kills: `name in "1.0"`, which is true of "0" and "1" too.
    model = make()
    assert set_by_name(model, "1.0") == ([model[1][0]], [])
    assert get_z3_leaf_modules(model) == [model[1][0]]
    with pytest.raises(ValueError, match=r"Sequential is named \['2'\]"):
        set_by_name(model, "2")
    model = make()
    assert set_by_suffix(model, ".0") == ([model[1][0]], [])
