"""What a planted fault is: a change of what is found in the syntax tree of a named function."""

import ast
import difflib
import functools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[4]
CHANGE = re.compile(r"([\w.]+): (.+?) -> (.+)", re.DOTALL)
HEADING = re.compile(r"(?:def|class) (\w+)")
LOOSE = (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Lambda, ast.Yield)


@dataclass(frozen=True)
class Fault:
    """A change of the package that one test must notice.

    A change is written `place: found -> instead`. The place is a function, method or class; as
    much of its dotted name as is needed, in whatever file it is. What is found there, exactly once,
    is an expression or statements (parted by `; ` or by lines), compared as syntax trees: the form
    and comments don't matter. `...` in what stands there instead is what was found. `test` is the
    file below `tests/unit` that must fail, and with ` -k ` which of it.
    """

    name: str
    changes: str | tuple[str, ...]
    test: str

    def apply(self, root: Path) -> dict[str, tuple[str, str]]:
        """The texts of changed files below `root`, before and after; a ValueError if none."""
        edits: dict[Path, list[tuple[int, int, str]]] = {}
        for change in (self.changes,) if isinstance(self.changes, str) else self.changes:
            match = CHANGE.fullmatch(change)
            if match is None:
                raise ValueError(f"{self.name}: not `place: found -> instead`: {change}")
            place, found, instead = match.groups()
            try:
                path, nodes = _only(root, place, ast.parse(found).body)
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}\n{found}") from None
            edits.setdefault(path, []).append(_edit(_source(path), nodes, instead))
        changed = {}
        for path, spans in edits.items():
            before = _source(path)
            after = before.encode()
            for start, end, text in sorted(spans, reverse=True):
                after = after[:start] + text.encode() + after[end:]
            changed[str(path.relative_to(root))] = (before, after.decode())
        return changed

    def patch(self, root: Path) -> str:
        """The change as a unified diff."""
        lines: list[str] = []
        for file, texts in self.apply(root).items():
            before, after = (text.splitlines(keepends=True) for text in texts)
            lines += difflib.unified_diff(before, after, f"a/{file}", f"b/{file}")
        return "".join(lines)


def rows_of(table: str) -> Iterator[tuple[str, str | tuple[str, ...], str]]:
    """Names, changes and tests of a table: a test, below it names, below each its changes, in which
    `\\n` is a new line. What does not fit a line goes on further in.
    """
    test, rows = "", []
    for line in table.strip().splitlines():
        text = line.strip()
        match len(line) - len(line.lstrip()):
            case 0:
                test = text
            case 2:
                rows.append([test, text])
            case 4:
                rows[-1].append(text)
            case _:
                rows[-1][-1] = f"{rows[-1][-1]} {text}"
    for test, name, *changes in rows:
        whole = tuple(change.replace("\\n", "\n") for change in changes)
        yield name, whole if len(whole) > 1 else whole[0], test


def faults_of(table: str) -> tuple[Fault, ...]:
    """The faults of a table."""
    return tuple(Fault(*row) for row in rows_of(table))


@functools.cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def _files(root: Path) -> dict[str, list[Path]]:
    """The package's files by each name that they have or that a `def` or `class` in them gives."""
    files: dict[str, list[Path]] = {}
    for path in sorted((root / "deepspeed").rglob("*.py")):
        for name in {path.stem, *HEADING.findall(_source(path))}:
            files.setdefault(name, []).append(path)
    return files


@functools.cache
def tree_of(source: str) -> ast.Module:
    """The syntax tree of a file's text, which is not to be changed."""
    return ast.parse(source)


@functools.cache
def _names(root: Path, path: Path) -> list[tuple[str, ast.AST]]:
    """What is defined in a file, and the file, by dotted names."""
    tree = tree_of(_source(path))
    module = ".".join(path.relative_to(root).with_suffix("").parts)
    return [(module, tree), *_definitions(tree, module)]


def _definitions(tree: ast.AST, outer: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        name = outer
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{outer}.{node.name}"
            yield name, node
        if not isinstance(node, ast.expr):
            yield from _definitions(node, name)


def _only(root: Path, place: str, wanted: list[ast.stmt]) -> tuple[Path, Sequence[ast.AST]]:
    places = [
        (path, node)
        for path in _files(root).get(place.rpartition(".")[2], [])
        for name, node in _names(root, path)
        if f".{name}".endswith(f".{place}")
    ]
    if not places:
        raise ValueError(f"nothing in the package is named {place}; looked there for")
    # By their first node: places may lie in one another.
    found = {nodes[0]: (path, nodes) for path, node in places for nodes in _matches(node, wanted)}
    if len(found) == 1:
        return next(iter(found.values()))
    first = [(path.relative_to(root), getattr(node, "lineno", 1)) for path, node in places[:5]]
    here = ", ".join(f"{path}:{line}" for path, line in first)
    if found:
        raise ValueError(f"{place} ({here}) has {len(found)} times, not once")
    lines = [line.strip() for _, node in places for line in ast.unparse(node).splitlines()]
    near = difflib.get_close_matches(ast.unparse(wanted[0]), lines, 1, 0.3)
    raise ValueError(f"{place} ({here}; nearest: {''.join(near)}) does not have")


def _matches(place: ast.AST, wanted: list[ast.stmt]) -> Iterator[Sequence[ast.AST]]:
    """Each expression, or run of statements of one block, that is the wanted one."""
    match wanted:
        case [ast.Expr(value)]:
            pattern = _pattern(value)
            for node in ast.walk(place):
                if type(node) is type(value) and pattern.fullmatch(ast.dump(node)):
                    yield [node]
        case _:
            patterns = [_pattern(node) for node in wanted]
            for outer in ast.walk(place):
                for block in ("body", "orelse", "finalbody"):
                    nodes = getattr(outer, block, None)
                    for i in range(len(nodes) - len(wanted) + 1 if isinstance(nodes, list) else 0):
                        run = nodes[i : i + len(wanted)]
                        pairs = zip(patterns, run, strict=True)
                        if all(pattern.fullmatch(ast.dump(n)) for pattern, n in pairs):
                            yield run


def _pattern(node: ast.AST) -> re.Pattern[str]:
    """What the dump of a node must be, `...` in it being anything."""
    said = re.escape(ast.dump(node))
    for anything in (ast.Expr(ast.Constant(...)), ast.Constant(...)):
        said = said.replace(re.escape(ast.dump(anything)), ".*")
    return re.compile(said)


def _edit(source: str, nodes: Sequence[ast.AST], instead: str) -> tuple[int, int, str]:
    """Start and end in bytes of what is replaced, and the text that comes there."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first, last = nodes[0], nodes[-1]
    body = ast.parse(instead).body
    text = ast.unparse(body).replace("...", ast.unparse(nodes).lstrip())
    if isinstance(first, ast.expr) and isinstance(body[0], ast.Expr):
        text = f"({text})" if isinstance(body[0].value, LOOSE) else text
    return (
        starts[first.lineno - 1] + first.col_offset,
        starts[last.end_lineno - 1] + last.end_col_offset,
        textwrap.indent(text, " " * first.col_offset).lstrip(),
    )
