"""Shapes of statements, by which a place in a function is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import libcst as cst


def dotted(node: cst.CSTNode) -> str:
    """The text of a name such as ``dist.all_reduce``, of a call that of what is called, of an item
    that of what it is in; empty for anything else.
    """
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr.value}" if base else ""
    if isinstance(node, cst.Call):
        return dotted(node.func)
    if isinstance(node, cst.Subscript):
        return dotted(node.value)
    return ""


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """``node`` and everything below it, in the order of the text."""
    yield node
    for child in node.children:
        yield from walk(child)


def names_in(node: cst.CSTNode) -> set[str]:
    """All dotted names in ``node``."""
    return {dotted(part) for part in walk(node)} - {""}


@dataclass(frozen=True)
class Place:
    """A shape of statements.

    Attributes:
        what: For messages.
        fits: Whether a statement has the shape.
    """

    what: str
    fits: Callable[[cst.CSTNode], bool]


def small_of(node: cst.CSTNode) -> cst.BaseSmallStatement | None:
    if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1:
        return node.body[0]
    return None


def assigns(name: str) -> Place:
    """An assignment to ``name`` or to an item of it, also an augmented one."""

    def fits(node: cst.CSTNode) -> bool:
        small = small_of(node)
        if isinstance(small, cst.Assign):
            return any(dotted(target.target) == name for target in small.targets)
        if isinstance(small, cst.AnnAssign | cst.AugAssign):
            return dotted(small.target) == name
        return False

    return Place(f"an assignment to {name}", fits)


def calls(name: str) -> Place:
    """A statement that is a call of ``name``."""

    def fits(node: cst.CSTNode) -> bool:
        small = small_of(node)
        return (
            isinstance(small, cst.Expr)
            and isinstance(small.value, cst.Call)
            and dotted(small.value) == name
        )

    return Place(f"a call of {name}", fits)


def branches(name: str, inside: str = "") -> Place:
    """An ``if`` whose condition mentions ``name`` and whose body, if given, ``inside``."""

    def fits(node: cst.CSTNode) -> bool:
        return (
            isinstance(node, cst.If)
            and name in names_in(node.test)
            and (not inside or inside in names_in(node.body))
        )

    return Place(f"an if on {name}{f' around {inside}' if inside else ''}", fits)


def returns() -> Place:
    """A ``return``."""
    return Place("a return", lambda node: isinstance(small_of(node), cst.Return))
