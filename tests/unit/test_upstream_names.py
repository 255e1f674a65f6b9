"""Every public name of upstream's is here and of upstream's kind, or says what to use instead.

`upstream_names.txt` is read off DeepSpeed 0.19.6. `pytest -s` prints the table.
"""

import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import deepspeed
from deepspeed._absent import ABSENCES, reason
from deepspeed.ops.op_builder import ALL_OPS, OTHER_OPS, OpBuildError
from unit.common import DistributedTest

NAMES = Path(__file__).with_name("upstream_names.txt")
HAS, REFUSES, MISSING = "has", "refuses", "missing"


class Listed(NamedTuple):
    """A name; one of a class has `method`, otherwise it is empty."""

    module: str
    name: str
    method: str
    kind: str


def listed() -> Iterator[Listed]:
    module = name = ""
    for line in NAMES.read_text(encoding="ascii").splitlines():
        text, _, kind = line.strip().partition(" ")
        if not text or line.startswith("#"):
            continue
        if not line.startswith(" "):
            module = text
        elif not line.startswith("    "):
            name = text
            yield Listed(module, name, "", kind)
        else:
            yield Listed(module, name, text, kind)


def answer(module: str, name: str, method: str) -> str:
    """What a script finds."""
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError) as error:
        told = {reason(module, name)}
        if module.count("."):  # a package that cannot be imported says it for what is in it
            told.add(reason(*module.split(".")[:2]))
        return REFUSES if str(error) in told or method else MISSING
    if not method or hasattr(found, method):
        return HAS
    fields = {**getattr(found, "model_fields", {}), **vars(found).get("__annotations__", {})}
    if method in fields:
        return HAS
    return REFUSES if reason(f"{module}.{name}", method) else MISSING


def test_no_name_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    # Kills: an import in a script's first line that fails without a word on what to do.
    table: dict[str, Counter[str]] = {}
    missing = []
    for entry in listed():
        kind = answer(*entry[:3])
        table.setdefault(entry.module, Counter())[kind] += 1
        if kind == MISSING:
            missing.append(".".join(filter(None, entry[:3])))
    for module, counts in table.items():
        print(f"{module:55} {counts[HAS]:4} has {counts[REFUSES]:4} refuses")
    total = sum(table.values(), Counter())
    print(f"{'all':55} {total[HAS]:4} has {total[REFUSES]:4} refuses")
    assert missing == []
    # Refusals are no way to make the list empty: what scripts call is there.
    assert total[HAS] > 2 * total[REFUSES]


def kind_of(found: Any) -> str:
    if isinstance(found, ModuleType):
        return "module"
    return "class" if isinstance(found, type) else "function" if callable(found) else "constant"


def test_what_is_there_is_of_the_same_kind() -> None:
    # Kills: a submodule in the place of upstream's function of the same name, and a property that
    # scripts call, or the other way round.
    others = []
    for module, name, method, kind in listed():
        if answer(module, name, method) != HAS:
            continue
        found = getattr(importlib.import_module(module), name)
        if not method:
            here = kind_of(found)
        elif callable(getattr(found, method, None)):
            here = "method"
        else:
            here = "field" if method in getattr(found, "model_fields", {}) else "property"
        if here != kind:
            others.append(f"{module}.{name}.{method}: {kind}, here a {here}")
    assert others == []


NAMESAKES = """
import importlib, sys, types
import deepspeed.utils.tensor_fragment as fragment
from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules, z3_leaf_module
import deepspeed, deepspeed.utils
import deepspeed.utils.z3_leaf_module
assert deepspeed.utils.z3_leaf_module is z3_leaf_module
assert isinstance(fragment, type) and fragment is deepspeed.utils.tensor_fragment
from deepspeed.utils import tensor_fragment, z3_leaf_module
assert not any(isinstance(value, types.ModuleType) for value in (tensor_fragment, z3_leaf_module))
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment as again
assert again is tensor_fragment and importlib.import_module(fragment_address.__module__)
assert isinstance(deepspeed.utils.timer, types.ModuleType)
deepspeed.utils.z3_leaf_module = print  # a patch stays
assert deepspeed.utils.z3_leaf_module is print
"""


def test_a_name_wins_over_the_submodule_of_the_same_name() -> None:
    # Kills: importing `deepspeed.utils.z3_leaf_module` that replaces the function, as imports do.
    subprocess.run([sys.executable, "-c", NAMESAKES], check=True, timeout=120)
    words = "tensor_fragment: use .*safe_get_full_fp32_param"
    with pytest.raises(NotImplementedError, match=words):
        deepspeed.utils.tensor_fragment()


def test_each_absence_is_upstreams() -> None:
    # Kills: a rule that answers what nobody would ask for.
    names = [(f"{m}.{name}" if method else m, method or name) for m, name, method, _ in listed()]
    modules = NAMES.with_name("upstream_modules.txt").read_text(encoding="ascii").split()
    names += [(package, name) for package, _, name in (name.rpartition(".") for name in modules)]
    names += [("deepspeed.checkpoint", "merge_state")]
    told = [reason(*entry) for entry in names]
    ends = tuple(text for text in told if text)
    used = [absence for absence in ABSENCES if any(end.endswith(absence.why) for end in ends)]
    assert [absence for absence in ABSENCES if absence not in used] == []


@pytest.mark.parametrize(
    "module, name",
    [
        ("deepspeed.runtime.utils", "see_memory_usages"),
        ("deepspeed.runtime.config", "GET_BATCH"),
        ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer3"),
        ("deepspeed.runtime.engine.DeepSpeedEngine", "zero_max_live_parameter"),
        ("deepspeed.checkpoint.ds_to_universal", "mains"),
    ],
)
def test_what_is_misspelled_is_not_answered(module: str, name: str) -> None:
    assert reason(module, name) is None


def test_builders_say_what_serves_instead() -> None:
    from deepspeed.ops import __compatible_ops__
    from deepspeed.ops.op_builder import (  # type: ignore[attr-defined]  # made by name
        FusedAdamBuilder,
        TransformerBuilder,
        UtilsBuilder,
    )

    assert set(__compatible_ops__) == {*ALL_OPS, *OTHER_OPS}
    assert __compatible_ops__["fused_adam"] and not __compatible_ops__["transformer"]
    assert FusedAdamBuilder().load().FusedAdam is deepspeed.ops.adam.FusedAdam
    tensors = [torch.ones(2, 3), torch.zeros(4)]
    utils = UtilsBuilder().load()
    flat = utils.flatten(tensors)
    assert flat.shape == (10,)
    assert all(map(torch.equal, utils.unflatten(flat, tensors), tensors))
    with pytest.raises(OpBuildError, match="op transformer cannot be used here: .*torch's"):
        TransformerBuilder().load()


class TestRefusals(DistributedTest):
    world_size = 1

    def test_of_objects(self) -> None:
        # Kills: rules that only this test would ever read.
        sgd = {"type": "SGD", "params": {"lr": 0.1}}
        config = {"train_batch_size": 1, "optimizer": sgd, "zero_optimization": {"stage": 2}}
        engine, optimizer, _, _ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)
        with pytest.raises(AttributeError, match="load_moe_state_dict: use engine.load_checkpoint"):
            engine.load_moe_state_dict()
        with pytest.raises(AttributeError, match="reduce_ipg_grads: it is a part of upstream's"):
            optimizer.reduce_ipg_grads()
        for thing in (engine, optimizer):
            with pytest.raises(AttributeError, match="no attribute 'stepp'"):
                thing.stepp()
        with pytest.raises(AttributeError, match="no attribute 'weihgt'"):
            engine.weihgt  # noqa: B018
        assert engine.weight is engine.module.weight
        # Kills: a model's property that is computed twice.
        asked = []
        kind = type(engine.module)
        counted = type("Counted", (kind,), {"dear": property(lambda self: asked.append(1))})
        engine.module.__class__ = counted
        assert engine.dear is None and asked == [1]
