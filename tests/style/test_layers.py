"""The tables of `layers` and the rules that hold the package to them."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# tests/ is no package, so the neighbours are found through the path
import test_style as style  # noqa: E402
from layers import DOORS, GRAB_BAGS, LAYERS  # noqa: E402
from test_style import Source, absolute, docstring_lines, report, rule, sources  # noqa: E402

PLACES = {entry: index for index, (_, entries) in enumerate(LAYERS) for entry in entries}


@lru_cache(maxsize=1)
def modules() -> dict[str, str]:
    """Modules of the package by their names in the tables: no `deepspeed`, with `__init__`."""
    paths = {source.module: source.path for source in sources()}
    return {module: path.removesuffix(".py").replace("/", ".") for module, path in paths.items()}


def layer_of(module: str) -> int | None:
    """The index in LAYERS that `module` belongs to: the longest name that covers it says."""
    name = modules().get(module, module.removeprefix("deepspeed."))
    parts = name.split(".")
    covering = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((PLACES[entry] for entry in covering if entry in PLACES), None)


def is_above(module: str, source: Source) -> bool:
    """Whether `module` is of a higher layer than the file."""
    other, own = layer_of(module), layer_of(source.module)
    return own is not None and other is not None and other > own


def imported_modules(source: Source, types: bool = False) -> Iterator[tuple[int, str]]:
    """(line, module of the package) of all imports that run, wherever in the file they stand, and
    with `types` of those for annotations alone.
    """
    typing_only = set() if types else style.type_checking_lines(source)
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom) and node.lineno not in typing_only:
            for found in imports_of(node, source.package):
                yield node.lineno, found


def imports_of(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    """The package's modules that one statement imports."""
    if isinstance(node, ast.Import):
        named = [(alias.name, "") for alias in node.names]
    else:
        base = absolute(node, package)
        named = [(f"{base}.{alias.name}", base) for alias in node.names]
    for name, base in named:
        if not style.within(name, ("deepspeed",)):
            continue
        # A name that is no module stands in the file that it is imported from.
        is_module = name in modules() or layer_of(name) not in (None, layer_of(base))
        yield name if is_module else base or name


@rule()
def test_every_file_has_a_layer(source: Source) -> Iterator[int]:
    return iter(() if layer_of(source.module) is not None else (1,))


def test_the_tables_name_what_is_there() -> None:
    """Every name of a layer covers a file and stands in one layer; every door is one."""
    entries = [entry for _, entries in LAYERS for entry in entries]
    found = {".".join(name.split(".")[:n]) for name in modules().values() for n in range(1, 9)}
    doors = {modules()[s.module] for s in sources() if any(names_from_above(s))}
    wrong = [entry for entry in entries if entry not in found or entries.count(entry) > 1]
    report(wrong + [door for door in DOORS if door not in doors])


@rule()
def test_imports_go_down_only(source: Source) -> Iterator[int]:
    return (line for line, module in imported_modules(source) if is_above(module, source))


def room_of(module: str) -> str:
    """The package, or the file of a grab bag, that a module belongs to."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] and parts[0] in GRAB_BAGS else 1])


def test_no_two_packages_import_each_other() -> None:
    found = [(s, line, module) for s in sources() for line, module in imported_modules(s)]
    imports = {(room_of(s.module), room_of(m)): f"{s.path}:{line}" for s, line, m in found}
    report([place for (a, b), place in imports.items() if a != b and a and (b, a) in imports])


def test_no_modules_import_in_a_circle() -> None:
    """Not even by what they import for annotations."""
    reached = {s.module: {name for _, name in imported_modules(s, types=True)} for s in sources()}
    for _ in reached:  # a longer path has a circle in it
        further = {name: [reached.get(m, set()) for m in found] for name, found in reached.items()}
        wider = {name: found.union(*further[name]) for name, found in reached.items()}
        if wider == reached:
            break
        reached = wider
    report([f"{s.path}:1" for s in sources() if s.module in reached[s.module]])


def names_from_above(source: Source) -> Iterator[int]:
    """Lines with a module above the file's own layer as text, which loads on demand."""
    words = docstring_lines(source)
    for node in source.every(ast.Constant):
        name = node.value.partition(":")[0] if isinstance(node.value, str) else ""
        if name.startswith("deepspeed.") and name in modules() and node.lineno not in words:
            if is_above(name, source):
                yield node.lineno


@rule()
def test_only_doors_name_what_is_above_them(source: Source) -> Iterator[int]:
    return iter(()) if modules()[source.module] in DOORS else names_from_above(source)


def bound_names(module: str) -> set[str]:
    """What the module's own file defines or imports."""
    tree = next((source.tree for source in sources() if source.module == module), None)
    names: set[str] = set()
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        else:
            names.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    return names


@rule()
def test_nobody_inside_goes_through_a_door(source: Source) -> Iterator[int]:
    """It would hide an import from the rules about layers."""
    typing_only = style.type_checking_lines(source)
    for node in source.every(ast.ImportFrom):
        base = absolute(node, source.package)
        if modules().get(base, base.removeprefix("deepspeed.")) in DOORS:
            known = {"*"} | bound_names(base)
            names = {a.name for a in node.names if f"{base}.{a.name}" not in modules()}
            if names - known and node.lineno not in typing_only:
                yield node.lineno


HALL_ELSEWHERE = ("", "runtime", "ops/op_builder", *GRAB_BAGS)
"""Folders whose files docs/architecture.md tells of, that are a link, or that have no subject."""


def test_every_folder_has_a_hall() -> None:
    """A folder's `__init__` says what each file is for: who looks for a place reads that alone."""
    folders: dict[str, list[str]] = {}
    halls: dict[str, str] = {}
    for source in sources():
        path = Path(source.path)
        if path.name == "__init__.py":
            halls[path.parent.as_posix()] = ast.get_docstring(source.tree) or ""
            path = path.parent
        folders.setdefault(path.parent.as_posix(), []).append(path.stem)
    skip = {Path(folder).as_posix() for folder in HALL_ELSEWHERE}
    report(
        [
            f"{folder}/__init__.py: its docstring does not say what `{name}` is for"
            for folder, names in folders.items()
            if folder not in skip and len(names) > 2
            for name in names
            if not re.search(rf"\b{name}\b", halls.get(folder, ""))
        ]
    )
