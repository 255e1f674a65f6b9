"""Edits a source tree through its syntax tree: functions are found by name, places in them by
shape, and what is inserted are lines of the program that edits.

`Tree` finds functions in files, `Function` is one function while it is edited. Everything that is
not touched keeps its bytes. Whatever cannot be found is a `PlaceNotFound` that says what was looked
for and where; nothing is written then.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst
from shapes import Place, dotted, names_in, small_of, walk

Definition = cst.FunctionDef | cst.ClassDef


class PlaceNotFound(Exception):
    """A function or a place that a program edits is not there, or is there more than once."""


class AlreadyFixed(Exception):
    """The tree has what a program would bring; the text says what shows it."""


class _Bare(cst.CSTTransformer):
    """Takes the indentation out of empty lines."""

    def leave_EmptyLine(
        self, original_node: cst.EmptyLine, updated_node: cst.EmptyLine
    ) -> cst.EmptyLine:
        return updated_node.with_changes(indent=updated_node.comment is not None)


def lines(code: str) -> list[cst.BaseStatement]:
    """The statements of ``code``, of which the indentation of the whole does not matter."""
    module = cst.parse_module(textwrap.dedent(code).strip("\n") + "\n").visit(_Bare())
    body = [statement for statement in module.body if isinstance(statement, cst.BaseStatement)]
    if module.header:
        # libcst keeps comments before the first statement apart from it.
        body[0] = body[0].with_changes(leading_lines=[*module.header, *body[0].leading_lines])
    return body


class _Swap(cst.CSTTransformer):
    """Puts statements in the place of a statement, which is known by identity."""

    def __init__(self, target: cst.CSTNode, replacement: Sequence[cst.BaseStatement]) -> None:
        super().__init__()
        self._target = target
        self._replacement = replacement

    def on_leave(  # type: ignore[override]  # any statement may become several
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> object:
        if original_node is self._target:
            if not self._replacement:
                return cst.RemoveFromParent()
            return cst.FlattenSentinel(self._replacement)
        return updated_node


class _Rename(cst.CSTTransformer):
    """Puts an expression in the place of a dotted name; `Function.rename` has the arguments."""

    def __init__(self, name: str, expression: str, only: Place | None, spare: Place | None) -> None:
        super().__init__()
        self._name = name
        self._expression = expression
        self._only = only
        self._spare = spare
        self._inside = only is None
        self.count = 0

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:
        self._inside = self._only is None or self._only.fits(node)
        return self._spare is None or not self._spare.fits(node)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        self._inside = self._only is None
        return updated_node

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        if not self._inside or dotted(original_node) != self._name:
            return updated_node
        self.count += 1
        return cst.parse_expression(self._expression)


@dataclass
class Source:
    """One file of the tree while it is edited."""

    path: Path
    name: str
    module: cst.Module
    changed: bool = False

    def swap(self, path: Sequence[int], new: Definition | None, *more: cst.BaseStatement) -> None:
        """Replace the definition at ``path``, the places in the bodies that lead to it."""
        statements = [] if new is None else [new, *more]
        self.module = _rebuilt(self.module, path, statements)
        self.changed = True

    def _in_use(self, name: str) -> bool:
        return len(re.findall(rf"\b{name}\b", self.module.code)) > 1

    def _edit_imports(self, edit: Callable[[cst.ImportFrom], cst.ImportFrom | None]) -> None:
        body: list[cst.BaseStatement] = []
        for line in self.module.body:
            small = small_of(line)
            if isinstance(small, cst.ImportFrom):
                edited = edit(small)
                if edited is None:
                    continue
                assert isinstance(line, cst.SimpleStatementLine), "an import is a simple statement"
                line = line if edited is small else line.with_changes(body=[edited])
            body.append(line)  # type: ignore[arg-type]  # what a module has are statements
        self.module = self.module.with_changes(body=body)

    def drop_unused_import(self, *names: str) -> None:
        """Take out of ``from ... import`` what nothing in the file uses any more."""
        unused = {name for name in names if not self._in_use(name)}

        def edit(node: cst.ImportFrom) -> cst.ImportFrom | None:
            if isinstance(node.names, cst.ImportStar):
                return node
            kept = [n for n in node.names if dotted(n.name) not in unused]
            if len(kept) == len(node.names) or not kept:
                return node if kept else None
            kept[-1] = kept[-1].with_changes(comma=node.names[-1].comma)
            return node.with_changes(names=kept)

        self._edit_imports(edit)

    def add_import(self, module: str, name: str) -> None:
        """Let the file import ``name`` from ``module``.

        Raises:
            PlaceNotFound: There is no import to put it behind.
        """
        found = False

        def edit(node: cst.ImportFrom) -> cst.ImportFrom:
            nonlocal found
            if found or node.module is None or dotted(node.module) != module:
                return node
            if isinstance(node.names, cst.ImportStar):
                return node
            found = True
            if any(dotted(alias.name) == name for alias in node.names):
                return node
            last = node.names[-1]
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            added = cst.ImportAlias(cst.Name(name), comma=last.comma)
            return node.with_changes(
                names=[*node.names[:-1], last.with_changes(comma=comma), added]
            )

        self._edit_imports(edit)
        if found:
            return
        body = list(self.module.body)
        places = [i for i, line in enumerate(body) if isinstance(small_of(line), cst.ImportFrom)]
        if not places:
            raise PlaceNotFound(f"{self.name}: an import was not found")
        body[places[-1] + 1 : places[-1] + 1] = lines(f"from {module} import {name}")
        self.module = self.module.with_changes(body=body)


def _rebuilt(block: Any, path: Sequence[int], new: Sequence[cst.BaseStatement]) -> Any:
    """``block`` with ``new`` in the place of the statement at ``path``."""
    place, *rest = path
    body = list(block.body)
    if rest:
        owner = body[place]
        body[place] = owner.with_changes(body=_rebuilt(owner.body, rest, new))
    else:
        body[place : place + 1] = new
    return block.with_changes(body=body)


class Function:
    """One function or class while it is edited; each method is one edit, at one place.

    Args:
        source: Its file.
        name: Dotted, such as ``Class.method``.
    """

    def __init__(self, source: Source, name: str) -> None:
        self.source = source
        self.name = name

    @property
    def node(self) -> Definition:
        """What it is now."""
        return _at(self.source.module, self._where())

    def _where(self) -> list[int]:
        path = _path(self.source.module, self.name)
        assert path, f"{self.name} was there when it was found"
        return path

    def _put(self, new: Definition | None, *more: cst.BaseStatement) -> None:
        self.source.swap(self._where(), new, *more)

    def _swap(self, old: cst.BaseStatement, new: Sequence[cst.BaseStatement]) -> None:
        changed = self.node.visit(_Swap(old, new))
        assert isinstance(changed, cst.FunctionDef | cst.ClassDef), "a definition stays one"
        self._put(changed)

    def __str__(self) -> str:
        return f"{self.source.name}: {self.name}"

    @property
    def code(self) -> str:
        """Its text."""
        return self.source.module.code_for_node(self.node)

    def mentions(self, name: str) -> bool:
        """Whether the dotted ``name`` stands in it."""
        return name in names_in(self.node)

    def all(self, place: Place) -> list[cst.BaseStatement]:
        """The statements of this shape, in the order of the text."""
        found = [node for node in walk(self.node.body) if place.fits(node)]
        return [node for node in found if isinstance(node, cst.BaseStatement)]

    def one(self, place: Place, which: int | None = None) -> cst.BaseStatement:
        """The statement of this shape; ``which`` chooses among several.

        Raises:
            PlaceNotFound: There is none, or there are several and none is chosen.
        """
        found = self.all(place)
        if not found:
            raise PlaceNotFound(f"{self}: {place.what} was not found")
        if which is None and len(found) > 1:
            raise PlaceNotFound(f"{self}: {place.what} was found {len(found)} times, wanted once")
        return found[which or 0]

    def names(self, place: Place, which: int | None = None) -> set[str]:
        """All dotted names in the statement of this shape."""
        return names_in(self.one(place, which))

    def text(self, place: Place, which: int | None = None) -> str:
        """The text of the statement of this shape."""
        return self.source.module.code_for_node(self.one(place, which))

    def before(self, place: Place, code: str, which: int | None = None) -> None:
        """Insert ``code`` before a statement, and before the comment that belongs to it."""
        old = self.one(place, which)
        new = lines(code)
        blank = _blank_lines(old)
        if blank:
            # The empty line that set the statement off now sets off what is inserted.
            new[0] = new[0].with_changes(leading_lines=[*blank, *new[0].leading_lines])
            rest = old.leading_lines[len(blank) :]  # type: ignore[attr-defined]  # statements have them
            self._swap(old, [*new, old.with_changes(leading_lines=rest)])
        else:
            self._swap(old, [*new, old])

    def after(self, place: Place, code: str, which: int | None = None) -> None:
        """Insert ``code`` after a statement."""
        old = self.one(place, which)
        self._swap(old, [old, *lines(code)])

    def replace(self, place: Place, code: str, which: int | None = None) -> None:
        """Put ``code`` in the place of a statement and of the comment that belongs to it."""
        old = self.one(place, which)
        new = lines(code)
        if new:
            new[0] = new[0].with_changes(leading_lines=[*_blank_lines(old), *new[0].leading_lines])
        self._swap(old, new)

    def exchange(self, place: Place, code: str, which: int | None = None) -> None:
        """Put ``code`` in the place of a statement, below the comment that belongs to it."""
        old = self.one(place, which)
        new = lines(code)
        new[0] = new[0].with_changes(leading_lines=getattr(old, "leading_lines", ()))
        self._swap(old, new)

    def remove(self, place: Place, which: int | None = None) -> None:
        """Take out a statement and the comment that belongs to it."""
        self._swap(self.one(place, which), [])

    def uncomment(self, place: Place) -> None:
        """Take out the comment above a statement."""
        old = self.one(place)
        self._swap(old, [old.with_changes(leading_lines=_blank_lines(old))])  # type: ignore[call-arg]  # statements have them

    def first(self, code: str) -> None:
        """Insert ``code`` at the beginning, behind a docstring."""
        body = self._statements()
        start = 1 if _is_text(body[0]) else 0
        self._rebuild([*body[:start], *lines(code), *body[start:]])

    def last(self, code: str) -> None:
        """Insert ``code`` at the end."""
        self._rebuild([*self._statements(), *lines(code)])

    def follow(self, code: str) -> None:
        """Insert ``code``, definitions, behind it."""
        new = lines(code)
        blank = cst.EmptyLine(indent=False)
        new[0] = new[0].with_changes(leading_lines=[blank, *new[0].leading_lines])
        self._put(self.node, *new)

    def describe(self, text: str) -> None:
        """Give it this docstring."""
        new = lines(f'"""{text}"""')
        body = self._statements()
        self._rebuild([*new, *body[1 if _is_text(body[0]) else 0 :]])

    def cut(self, place: Place, code: str) -> None:
        """Put ``code`` in the place of a statement of its body and of all that follows."""
        body = self._statements()
        old = self.one(place)
        if not any(statement is old for statement in body):
            raise PlaceNotFound(f"{self}: {place.what} is not a statement of its body")
        start = next(i for i, statement in enumerate(body) if statement is old)
        new = lines(code)
        new[0] = new[0].with_changes(leading_lines=[*_blank_lines(old), *new[0].leading_lines])
        self._rebuild([*body[:start], *new])

    def rename(
        self, name: str, expression: str, only: Place | None = None, spare: Place | None = None
    ) -> int:
        """Put ``expression`` in the place of the dotted ``name``: wherever it stands, in simple
        statements of the shape ``only``, or everywhere but in those of the shape ``spare``. Returns
        how often.
        """
        old = self.node
        change = _Rename(name, expression, only, spare)
        new = old.visit(change)
        if change.count:
            assert isinstance(new, cst.FunctionDef | cst.ClassDef), "a definition stays one"
            self._put(new)
        return change.count

    def _statements(self) -> list[cst.BaseStatement]:
        body = self.node.body
        if not isinstance(body, cst.IndentedBlock):
            raise PlaceNotFound(f"{self}: its body is one line")
        return list(body.body)

    def _rebuild(self, statements: Sequence[cst.BaseStatement]) -> None:
        body = self.node.body.with_changes(body=statements)
        self._put(self.node.with_changes(body=body))


def _blank_lines(node: cst.CSTNode) -> list[cst.EmptyLine]:
    blank = []
    for line in getattr(node, "leading_lines", ()):
        if line.comment is not None:
            break
        blank.append(line)
    return blank


def _is_text(node: cst.CSTNode) -> bool:
    small = small_of(node)
    return isinstance(small, cst.Expr) and isinstance(
        small.value, cst.SimpleString | cst.ConcatenatedString
    )


def _path(module: cst.Module, name: str) -> list[int]:
    """The places in the bodies that lead to a definition; empty if it is not there."""
    block: Any = module
    path: list[int] = []
    for part in name.split("."):
        if not isinstance(block, cst.Module | cst.IndentedBlock):
            return []
        here = [
            place
            for place, node in enumerate(block.body)
            if isinstance(node, cst.FunctionDef | cst.ClassDef) and node.name.value == part
        ]
        if not here:
            return []
        path.append(here[-1])
        block = block.body[here[-1]].body
    return path


def _at(module: cst.Module, path: Sequence[int]) -> Definition:
    node: Any = module
    for depth, place in enumerate(path):
        node = (node if depth == 0 else node.body).body[place]
    assert isinstance(node, cst.FunctionDef | cst.ClassDef), "paths lead to definitions"
    return node


@dataclass
class Tree:
    """A source tree.

    Attributes:
        root: Its folder; the package is in ``deepspeed`` below it.
        notes: What was found elsewhere than expected.
    """

    root: Path
    notes: list[str] = field(default_factory=list)
    _sources: dict[str, Source] = field(default_factory=dict)

    def source(self, name: str) -> Source:
        """A file, by its path below the root.

        Raises:
            PlaceNotFound: There is no such file.
        """
        if name not in self._sources:
            path = self.root / name
            if not path.is_file():
                raise PlaceNotFound(f"{name}: there is no such file")
            module = cst.parse_module(path.read_text(encoding="utf-8"))
            self._sources[name] = Source(path, name, module)
        return self._sources[name]

    def find(self, name: str, home: str) -> Function:
        """A function or class by its dotted name, in the file ``home``, or in the one other file
        of the package that has it.

        Raises:
            PlaceNotFound: No file has it, or several have.
        """
        if (self.root / home).is_file() and _path(self.source(home).module, name):
            return Function(self.source(home), name)
        others = []
        for path in sorted((self.root / "deepspeed").rglob("*.py")):
            word = name.rpartition(".")[2]
            text = path.read_text(encoding="utf-8", errors="replace")
            if f"def {word}" in text or f"class {word}" in text:
                other = path.relative_to(self.root).as_posix()
                if _path(self.source(other).module, name):
                    others.append(other)
        if len(others) != 1:
            where = f"it is in {' and '.join(others)}" if others else "no other file has it"
            raise PlaceNotFound(f"{home}: there is no {name}, and {where}")
        self.notes.append(f"{name} has moved from {home} to {others[0]}")
        return Function(self.source(others[0]), name)

    def has(self, name: str, home: str) -> bool:
        """Whether `find` finds it."""
        try:
            self.find(name, home)
        except PlaceNotFound:
            return False
        return True

    def write(self) -> list[str]:
        """Write what was changed; returns the files' names."""
        changed = [source for source in self._sources.values() if source.changed]
        for source in changed:
            source.path.write_text(source.module.code, encoding="utf-8")
        return sorted(source.name for source in changed)
