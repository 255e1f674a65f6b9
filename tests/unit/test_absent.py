"""What this release does not have says so by name: packages, modules, names, imports."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed
from deepspeed._modules import DOORS, STAND_INS, AbsentModuleError

MODULES = Path(__file__).with_name("upstream_modules.txt").read_text(encoding="ascii").split()
"""Of DeepSpeed 0.19.6, without those of inference, compression and autotuning."""


def test_each_of_upstreams_modules_imports_or_says_why_not() -> None:
    # Kills: a bare ModuleNotFoundError, which reads like a broken installation.
    assert len(MODULES) > 360
    found, told, others = 0, 0, []
    for name in MODULES:
        try:
            importlib.import_module(name)
            found += 1
        except AbsentModuleError as error:
            # The module itself, or the package that holds it; and what to do.
            package = re.fullmatch(r"(deepspeed[\w.]*): .{20,}", str(error))
            assert package is not None and f"{name}.".startswith(f"{package[1]}."), error
            told += 1
        except ImportError as error:
            others.append((name, str(error)))
    assert others == []
    print(f"{found} modules are here, {told} say why not")
    assert found > 150


def test_names_are_given_for_upstreams_only() -> None:
    # Kills: rules that answer what nobody would ask for, and entries for what has a file.
    assert {name for name in {*DOORS, *STAND_INS} if "compression" not in name} <= {*MODULES}
    for name in {*DOORS, *STAND_INS}:
        assert not Path(deepspeed.__file__).parents[1].joinpath(*name.split(".")).exists()
    with pytest.raises(ModuleNotFoundError, match="No module named 'deepspeed.compil'") as caught:
        importlib.import_module("deepspeed.compil")
    assert caught.value.name == "deepspeed.compil"


@pytest.mark.parametrize("name", ["inference", "compression.helper", "autotuning"])
def test_packages_out_of_scope_say_so(name: str) -> None:
    with pytest.raises(ImportError, match=f"deepspeed.{name}: .* out of scope"):
        importlib.import_module(f"deepspeed.{name}")


ASKED = """
import importlib.util, pkgutil
import deepspeed, deepspeed.runtime
assert importlib.util.find_spec("deepspeed.compile") is None
assert importlib.util.find_spec("deepspeed.runtime.zenflow") is None
assert importlib.util.find_spec("deepspeed.sequence.fpdt_layer") is not None
assert importlib.util.find_spec("deepspeed.runtime.torch_autocast") is not None
assert importlib.util.find_spec("deepspeed.no_such_thing") is None
for statement in (
    "import deepspeed.runtime.zenflow",
    "from deepspeed.runtime import zenflow",
    "from deepspeed.runtime.zenflow import engine",
    "import deepspeed.runtime.zenflow.engine",
):
    for expected in (ImportError, ModuleNotFoundError):
        try:
            exec(statement)
        except expected as error:
            assert "deepspeed.runtime.zenflow: ZenFlow comes" in str(error), (statement, error)
        else:
            raise AssertionError(statement)
assert not hasattr(deepspeed.runtime, "zenflow")
# Without an import of their own, as upstream's submodules.
loader = deepspeed.runtime.state_dict_factory.MegatronSDLoader
assert loader.__module__ == "deepspeed.runtime.state_dict_factory"
assert deepspeed.runtime.zero.mics_utils.scale_tensors.__module__ == "deepspeed.runtime.zero.mics"
"""


def test_who_asks_first_is_told_no() -> None:
    """Kills: a spec of what can't be imported, a lost explanation, an error nobody catches."""
    subprocess.run([sys.executable, "-c", ASKED], check=True, timeout=120)


FIRST_LINES = """
from deepspeed.compression.compress import init_compression, redundancy_clean
from deepspeed.ops.sparse_attention import (
    BigBirdSparsityConfig, BSLongformerSparsityConfig, FixedSparsityConfig, SparseSelfAttention,
    VariableSparsityConfig,
)
from deepspeed.ops.sparse_attention.sparsity_config import LocalSlidingWindowSparsityConfig
from deepspeed.runtime.data_pipeline.data_routing.helper import (
    convert_to_random_ltd, remove_random_ltd_state_dict,
)
from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
from deepspeed.sequence.fpdt_layer import (
    FPDT_FFN, FPDT_Attention, FPDT_InputConstruct, FPDT_LogitsLoss,
)
"""


def test_first_lines_of_scripts_import_and_using_explains() -> None:
    # Kills: Megatron-DeepSpeed and gpt-neox, which import all of them whether they use them or not.
    scope: dict[str, type] = {}
    exec(FIRST_LINES, scope)
    names = [name for name in scope if not name.startswith("_")]
    assert len(names) == 15
    for name in names:
        with pytest.raises(NotImplementedError, match=rf"deepspeed\.[\w.]+\.{name}: .{{20,}}"):
            scope[name]("anything", key=1)
    with pytest.raises(NotImplementedError, match=r"FPDT_FFN: .*\.DistributedAttention"):
        scope["FPDT_FFN"].apply(1)  # type: ignore[attr-defined]

    class Own(scope["FixedSparsityConfig"]):  # type: ignore[misc, name-defined]
        pass

    assert not isinstance(1, Own)
    with pytest.raises(NotImplementedError, match="sparse attention is out of scope"):
        Own()


def test_doors_lead_to_what_is_there() -> None:
    for module, names in DOORS.items():
        door = importlib.import_module(module)
        assert [*names] == door.__all__
        for name, home in names.items():
            assert getattr(door, name) is getattr(importlib.import_module(home), name)
        with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
            door.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", ["set_autotp_mode", "init_inference"])
def test_names_say_what_they_are(name: str) -> None:
    assert not hasattr(deepspeed, name)
    with pytest.raises(AttributeError, match=f"deepspeed.{name}: "):
        getattr(deepspeed, name)


def test_unknown_names_are_plain_attribute_errors() -> None:
    # Kills: answering every typo with a promise.
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        deepspeed.initialise  # noqa: B018
