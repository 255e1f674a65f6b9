"""How much an object is, with all that it inherits inside the package."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# tests/ is no package, so the neighbour is found through the path
from test_style import FUNCTION, absolute, report, sources  # noqa: E402

METHODS, ATTRIBUTES, DEPTH = 40, 20, 3

DEVICE = "upstream's interface of a device: a method for each question that scripts ask"
STATE = "its attributes are one state that changes together"
LARGE: dict[str, str] = {
    "DeepSpeedAccelerator": DEVICE,
    "TorchDeviceAccelerator": DEVICE,
    **dict.fromkeys((f"{name}_Accelerator" for name in ("CPU", "CUDA", "HPU", "MPS")), DEVICE),
    **dict.fromkeys((f"{name}_Accelerator" for name in ("NPU", "Sim", "XPU")), DEVICE),
    "DeepSpeedEngine": "upstream's face of an engine; its work is done by the parts it has",
    "PipelineEngine": "upstream's face of an engine; its work is done by the parts it has",
    "PipelineModule": "upstream's face of a pipeline; its work is done by the parts it has",
    "PipelineParallelGrid": "upstream's face of a grid: a method and an attribute for each axis",
    **dict.fromkeys(("Bucketed", "Units"), "the sites of fixes 1 and 2, which stand together"),
    **dict.fromkeys(("GradientLedger", "Channel"), STATE),
}
"""Classes that may be larger or deeper, and why."""

CALLED: dict[str, str] = {
    "DeepSpeedEngine._check_settings": "refuses before anything is made; it reads arguments alone",
    "Publisher._plan": "a pure function of the group, which the constructor has taken in before",
    "ReadinessTracker.reset": "begins a state that each class adds its own part to",
}
"""Overridden methods that a constructor may call, and why."""


class Classes:
    """The classes of the package by dotted name, and what each inherits."""

    def __init__(self) -> None:
        self.nodes: dict[str, ast.ClassDef] = {}
        self.places: dict[str, str] = {}
        self._names: dict[str, str] = {}
        for source in sources():
            for node in source.tree.body:
                if isinstance(node, ast.ClassDef):
                    self.nodes[f"{source.module}.{node.name}"] = node
                    self.places[f"{source.module}.{node.name}"] = f"{source.path}:{node.lineno}"
            for found in source.every(ast.ImportFrom):
                for alias in found.names:
                    here = f"{source.module}.{alias.asname or alias.name}"
                    self._names[here] = f"{absolute(found, source.package)}.{alias.name}"

    def bases(self, name: str) -> list[str]:
        """The package's classes that a class names as its bases."""
        module, found = name.rpartition(".")[0], []
        for base in self.nodes[name].bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            target: str | None = f"{module}.{base.id}" if isinstance(base, ast.Name) else None
            while target is not None and target not in self.nodes:
                target = self._names.get(target)
            found += [target] if target is not None else []
        return found

    def line(self, name: str) -> list[str]:
        """A class and all that it inherits from."""
        found = [name]
        for base in self.bases(name):
            found += [other for other in self.line(base) if other not in found]
        return found

    def depth(self, name: str) -> int:
        """How many classes stand on the longest way up."""
        return 1 + max(map(self.depth, self.bases(name)), default=0)

    def methods(self, name: str) -> dict[str, ast.AST]:
        """The functions of a class itself."""
        return {node.name: node for node in self.nodes[name].body if isinstance(node, FUNCTION)}

    def attributes(self, name: str) -> Iterator[str]:
        """What a class itself assigns to an instance."""
        for node in ast.walk(self.nodes[name]):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    yield node.attr


def large() -> dict[str, str]:
    """The classes that are larger or deeper than others, and how large."""
    classes, found = Classes(), {}
    for name in classes.nodes:
        line = classes.line(name)
        methods = {method for one in line for method in classes.methods(one)}
        attributes = {found for one in line for found in classes.attributes(one)} - methods
        sizes = (len(methods), len(attributes), classes.depth(name))
        if any(a > b for a, b in zip(sizes, (METHODS, ATTRIBUTES, DEPTH), strict=True)):
            told = "{} methods, {} attributes, {} deep".format(*sizes)
            found[name.rpartition(".")[2]] = f"{classes.places[name]}: {told}"
    return found


def called() -> dict[str, str]:
    """The overridden methods that constructors call, and where."""
    classes, found = Classes(), {}
    pairs = [(name, base) for name in classes.nodes for base in classes.line(name)[1:]]
    overridden = {f"{base}.{method}" for name, base in pairs for method in classes.methods(name)}
    for name in classes.nodes:
        for node in ast.walk(classes.methods(name).get("__init__", ast.Module([], []))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                method, owner = node.func.attr, node.func.value
                if isinstance(owner, ast.Name) and owner.id == "self":
                    if f"{name}.{method}" in overridden:
                        short = f"{name.rpartition('.')[2]}.{method}"
                        found[short] = f"{classes.places[name]}: calls {method}"
    return found


def test_objects_are_small_with_what_they_inherit() -> None:
    """Who reads a class has read it when they know at most three classes."""
    report([told for name, told in large().items() if name not in LARGE])


def test_no_constructor_calls_what_is_overridden() -> None:
    """The override would see an object that is not made yet."""
    report([told for name, told in called().items() if name not in CALLED])


def test_exceptions_are_needed() -> None:
    report(sorted({*LARGE, *CALLED} - {*large(), *called()}))
