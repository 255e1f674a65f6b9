"""The page docs/architecture.md says what is there: layers, names, paths, numbers, rooms."""

import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "deepspeed"
TOPS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
NAMES = re.findall(rf"`((?:{'|'.join(TOPS)})(?:\.\w+)+)`", PAGE)
ROOMS = {f"runtime.{path.parent.name}" for path in (PACKAGE / "runtime").glob("*/__init__.py")}


def exists(name: str) -> bool:
    """Whether `name` is a module of the package, or something in one."""
    module, found = "deepspeed", importlib.import_module("deepspeed")
    for part in name.split("."):
        # A package, and not something in a module.
        if hasattr(found, "__path__") and find_spec(f"{module}.{part}"):
            module = f"{module}.{part}"
            found = importlib.import_module(module)
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            return False
    return True


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_layers_are_those_of_the_table() -> None:
    # Kills: a layer that is added or changed and not drawn.
    script = ROOT / "docs" / "generate_architecture.py"
    done = subprocess.run([sys.executable, str(script), "--check"], check=False)
    remedy = "docs/architecture.md is not current; run: python docs/generate_architecture.py"
    assert done.returncode == 0, remedy


def test_every_name_is_in_the_package() -> None:
    # Kills: a drawing or a recipe that outlives what it names.
    assert len(NAMES) > 80
    assert [name for name in NAMES if not exists(name)] == []


def test_a_name_that_is_gone_is_noticed() -> None:
    assert exists("runtime.engine.DeepSpeedEngine.step")
    assert not exists("runtime.engine.DeepSpeedEngine.stride")
    assert not exists("runtime.engines")


def test_every_path_exists() -> None:
    paths = re.findall(r"`((?:tests|docs|deepspeed|op_builder)/[\w/.]*)`", PAGE)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_numbers_of_the_drawings_are_rows_of_the_tables() -> None:
    for title in ("The life of a gradient", "The life of a save"):
        text = section(title)
        drawn = re.findall(r"\[(\d+)\]", text.split("```")[1])
        rows = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
        assert drawn == rows != [], title


def test_the_table_of_rooms_has_every_room() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|", section("The rooms of `runtime/`"), re.MULTILINE)
    assert rows == sorted(ROOMS)


def test_every_file_beside_the_rooms_is_named() -> None:
    stems = {path.stem for path in (PACKAGE / "runtime").glob("*.py")} - {"__init__"}
    named = set(re.findall(r"`(runtime\.\w+)`", section("The rooms of `runtime/`")))
    assert named - ROOMS == {f"runtime.{stem}" for stem in stems}


def test_the_methods_of_a_stage_are_those_of_its_parts() -> None:
    # Kills: a method that a part must answer, and the recipe does not tell.
    from deepspeed.runtime.gradients.reduction import GradientReduction

    table = section("How to add").partition("| Part | Methods | Say |")[2].partition("\n\n")[0]
    part, required = "", set()
    for first, methods in re.findall(r"^\| (.*?) ?\| (`.*?) \|", table, re.MULTILINE):
        part = first.strip("`") or part
        names = re.findall(r"`(\w+)`", methods)
        required |= set(names) if "(required)" in methods else set()
        assert all(exists(f"{part}.{name}") for name in names if part != "each"), (part, names)
    own = vars(GradientReduction).items()
    getters = ((name, getattr(method, "fget", method)) for name, method in own)
    codes = {name: getattr(get, "__code__", None) for name, get in getters}
    named = {name: getattr(code, "co_names", ()) for name, code in codes.items()}
    raising = {name for name, words in named.items() if "NotImplementedError" in words}
    assert required == {name for name in raising if not name.startswith("_")}
