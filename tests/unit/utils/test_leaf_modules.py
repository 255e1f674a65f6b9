"""Modules marked as leaves by class, name and suffix."""

import pytest
import torch
from torch import nn

from deepspeed.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
)


def make() -> nn.Sequential:
    return nn.Sequential(torch.nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


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
    assert set_z3_leaf_modules_by_name(model, "1.0") == ([model[1][0]], [])
    assert get_z3_leaf_modules(model) == [model[1][0]]
    with pytest.raises(ValueError, match=r"Sequential is named \['2'\]"):
        set_z3_leaf_modules_by_name(model, "2")
    model = make()
    assert set_z3_leaf_modules_by_suffix(model, ".0") == ([model[1][0]], [])
