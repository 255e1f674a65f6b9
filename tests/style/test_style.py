"""House rules read off the syntax tree of the package: searches that fail with `file:line`."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "deepspeed"

Node = TypeVar("Node", bound=ast.AST)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)

FUNCTION_IMPORT_REASONS = ("cycle:", "optional:", "startup:")
MAY_PRINT = ("launcher/", "env_report.py", "utils/logging.py")
"""Files whose output is their purpose."""


@dataclass(frozen=True)
class Source:
    """One file of the package: its path below the package, text and tree."""

    path: str
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """The whole tree, which many rules look at."""
        return tuple(ast.walk(self.tree))

    def every(self, kind: type[Node]) -> Iterator[Node]:
        """The nodes of a kind."""
        return (node for node in self.nodes if isinstance(node, kind))

    @cached_property
    def tokens(self) -> tuple[tokenize.TokenInfo, ...]:
        """The file's tokens, comments among them."""
        return tuple(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @property
    def module(self) -> str:
        """The dotted module name."""
        parts = ("deepspeed", *Path(self.path).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]


def sources() -> tuple[Source, ...]:
    """Every Python file of the package, parsed."""
    return sources_of(PACKAGE)


@lru_cache
def sources_of(package: Path) -> tuple[Source, ...]:
    """Read once."""
    files = sorted(package.rglob("*.py"))
    # rglob does not enter links on every Python version; op builders are a link in a checkout.
    files += [
        path for path in sorted((package / "ops" / "op_builder").glob("*.py")) if path not in files
    ]
    texts = [(path, path.read_text(encoding="utf-8")) for path in files]
    return tuple(
        Source(path.relative_to(package).as_posix(), text, ast.parse(text)) for path, text in texts
    )


def offences(find: Callable[[Source], Iterator[int]], skip: tuple[str, ...] = ()) -> list[str]:
    """`file:line` of all that `find` yields, in files whose path starts with none of `skip`."""
    asked = (s for s in sources() if not s.path.startswith(skip or ("\0",)))
    return [f"{s.path}:{line}" for s in asked for line in find(s)]


def report(found: list[str]) -> None:
    """Fail with every place on a line of its own."""
    if found:
        pytest.fail("\n".join(sorted(set(found))), pytrace=False)


def rule(*skip: str) -> Callable[[Callable[[Source], Iterator[int]]], Callable[[], None]]:
    """Make a test of a search: it finds nothing in files whose path starts with none of `skip`."""

    def made(find: Callable[[Source], Iterator[int]]) -> Callable[[], None]:
        def test() -> None:
            report(offences(find, skip))

        test.__name__, test.__doc__ = find.__name__, find.__doc__
        return test

    return made


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all imports; `from a import b` gives a and a.b."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, source.package)
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def absolute(node: ast.ImportFrom, package: str) -> str:
    """The dotted name after `from`."""
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    parents = parents[: len(parents) - node.level + 1]
    return ".".join([*parents, node.module] if node.module else parents)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether the dotted `name` is one of `prefixes` or below one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def dotted(node: ast.AST) -> str:
    """The text of an attribute chain such as torch.cuda.Stream; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def mentions(source: Source, prefix: str) -> Iterator[int]:
    """Imports and attribute chains that reach `prefix`."""
    yield from (line for line, name in imported(source) if within(name, (prefix,)))
    yield from (node.lineno for node in source.every(ast.Attribute) if dotted(node) == prefix)


def lines_of(nodes: Iterable[ast.stmt]) -> set[int]:
    """All lines that the statements take."""
    return {n for node in nodes for n in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def type_checking_lines(source: Source) -> set[int]:
    """Lines inside `if TYPE_CHECKING:`, which import nothing at run time."""
    return lines_of(n for n in source.every(ast.If) if dotted(n.test).endswith("TYPE_CHECKING"))


def docstring_lines(source: Source) -> set[int]:
    """Lines of strings that stand alone: docstrings of modules, classes, functions and names."""
    alone = (node for node in source.every(ast.Expr) if isinstance(node.value, ast.Constant))
    return lines_of(node for node in alone if isinstance(node.value.value, str))


@rule()
def test_every_module_has_a_docstring(source: Source) -> Iterator[int]:
    return iter(() if ast.get_docstring(source.tree) else (1,))


@rule()
def test_every_public_function_and_class_has_a_docstring(source: Source) -> Iterator[int]:
    for node in source.tree.body:
        if isinstance(node, (*FUNCTION, ast.ClassDef)) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield node.lineno


OPENERS = re.compile(r"(By|Of|As|At|In|To|With|That of|Those of|Whose?|What of|See base class)\b")
OPENERS_LEFT = 60
"""How many docstrings are still to become sentences: the number only falls."""


def test_docstrings_are_sentences() -> None:
    """Functions begin with a verb; a class and a property with a noun that stands alone."""

    def find(source: Source) -> Iterator[int]:
        for node in source.nodes:
            if isinstance(node, (*FUNCTION, ast.ClassDef)):
                if OPENERS.match(ast.get_docstring(node) or ""):
                    yield node.lineno

    found = offences(find)
    report(found if len(found) > OPENERS_LEFT else [])


@rule()
def test_every_function_is_annotated(source: Source) -> Iterator[int]:
    for node in source.nodes:
        if not isinstance(node, FUNCTION):
            continue
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        args += [extra for extra in (node.args.vararg, node.args.kwarg) if extra]
        bare = {a.arg for a in args if a.annotation is None} - {"self", "cls", "mcs", "ctx"}
        if bare or node.returns is None:
            yield node.lineno


@rule()
def test_no_assert_without_a_message(source: Source) -> Iterator[int]:
    return (node.lineno for node in source.every(ast.Assert) if not node.msg)


@rule()
def test_no_bare_except(source: Source) -> Iterator[int]:
    return (node.lineno for node in source.every(ast.ExceptHandler) if not node.type)


@rule(*MAY_PRINT)
def test_library_does_not_print_or_exit(source: Source) -> Iterator[int]:
    banned = ("print", "exit", "quit", "sys.exit")
    return (node.lineno for node in source.every(ast.Call) if dotted(node.func) in banned)


# Files in the format of torch.distributed.checkpoint are read and written by it; nothing there
# communicates. The elastic agent is a subclass of torch's, which is of the launching half.
@rule("comm/", "launcher/", "checkpoint/dcp_files.py", "elasticity/elastic_agent.py")
def test_only_comm_reaches_torch_distributed(source: Source) -> Iterator[int]:
    return mentions(source, "torch.distributed")


@rule()
def test_launcher_uses_only_the_launching_half_of_torch_distributed(
    source: Source,
) -> Iterator[int]:
    allowed = tuple(f"torch.distributed.{part}" for part in ("elastic", "launcher", "run"))
    if source.path.startswith("launcher/"):
        for line, name in imported(source):
            if within(name, ("torch.distributed",)) and not within(name, allowed):
                yield line


@rule("accelerator/")
def test_only_accelerators_reach_torch_cuda(source: Source) -> Iterator[int]:
    return mentions(source, "torch.cuda")


@rule("accelerator/", "runtime/streams.py")
def test_streams_are_made_in_one_place(source: Source) -> Iterator[int]:
    for node in source.every(ast.Call):
        if "Stream" in (dotted(node.func), getattr(node.func, "attr", None)):
            yield node.lineno


@rule("accelerator/")  # which simulates and traces it
def test_no_record_stream(source: Source) -> Iterator[int]:
    """Lifetime across streams is a reference and an event, not the allocator's timing."""
    return (node.lineno for node in source.every(ast.Attribute) if node.attr == "record_stream")


ROOMS = ("sharding", "gradients", "optimizers", "zero", "fp16")
CORE = (*(f"runtime/{room}/" for room in ROOMS), "runtime/streams.py", "runtime/bf16_optimizer.py")
SUBSYSTEM = re.compile("ledger|monitor|profiler", re.IGNORECASE)
"""What attaches to the core by an interface (`gradients.observer`, `step_observer`)."""


@rule("runtime/gradients/ledger/")
def test_the_core_names_no_subsystem(source: Source) -> Iterator[int]:
    words = docstring_lines(source) if source.path.startswith(CORE) else set()
    for token in source.tokens if source.path.startswith(CORE) else ():
        if token.type != tokenize.COMMENT and token.start[0] not in words:
            if SUBSYSTEM.search(token.string):
                yield token.start[0]


@rule()
def test_checkpoint_files_need_no_runtime(source: Source) -> Iterator[int]:
    """Whoever looks at a folder of checkpoints has no runtime."""
    if within(source.module, ("deepspeed.checkpoint",)):
        typing_only = type_checking_lines(source)
        for line, name in imported(source):
            if within(name, ("deepspeed.runtime",)) and line not in typing_only:
                yield line


def reasoned_lines(source: Source) -> set[int]:
    """Lines that a comment with a reason covers: its own, and the imports right below."""
    covered: set[int] = set()
    inside = False
    for number, line in enumerate(source.text.splitlines(), start=1):
        stripped = line.strip()
        if any(f"# {reason}" in line for reason in FUNCTION_IMPORT_REASONS):
            inside = True
        elif not (stripped.startswith(("#", "import ", "from ", "try:", ")")) or not stripped):
            # Names of a parenthesised import do not end the block.
            inside = inside and stripped.rstrip(",").isidentifier()
        if inside:
            covered.add(number)
    return covered


@rule()
def test_imports_inside_functions_say_why(source: Source) -> Iterator[int]:
    reasons = reasoned_lines(source)
    for function in source.nodes:
        if isinstance(function, FUNCTION):
            text = ast.get_docstring(function) or ""
            if not any(reason in text for reason in FUNCTION_IMPORT_REASONS):
                for node in ast.walk(function):
                    if isinstance(node, ast.Import | ast.ImportFrom):
                        if node.lineno not in reasons:
                            yield node.lineno


@rule()
def test_comments_are_ascii(source: Source) -> Iterator[int]:
    for token in source.tokens:
        if token.type == tokenize.COMMENT and not token.string.isascii():
            yield token.start[0]


def matching(source: Source, pattern: str) -> Iterator[int]:
    """The numbers of the lines in which `pattern` is found."""
    lines = enumerate(source.text.splitlines(), start=1)
    return (number for number, line in lines if re.search(pattern, line))


@rule()
def test_todo_names_an_issue(source: Source) -> Iterator[int]:
    return matching(source, r"#.*\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")


@rule()
def test_type_ignores_name_their_code(source: Source) -> Iterator[int]:
    return matching(source, r"#\s*type:\s*ignore(?!\[)")


@rule()
def test_nothing_runs_text_as_code_or_through_a_shell(source: Source) -> Iterator[int]:
    for node in source.every(ast.Call):
        shell = any(k.arg == "shell" and dotted(k.value) != "False" for k in node.keywords)
        if shell or dotted(node.func) in ("eval", "exec", "os.system", "os.popen"):
            yield node.lineno


RUNS_CODE_FROM_FILES = (
    *(
        f"{module}.{name}"
        for module in ("pickle", "dill", "cloudpickle", "marshal")
        for name in ("load", "loads", "Unpickler")
    ),
    *("shelve", "joblib", "torch.jit.load", "torch.package"),
    *("yaml.load", "yaml.full_load", "yaml.unsafe_load"),
)


@rule("checkpoint/dcp_files.py")  # whose unpickler has a list of classes
def test_what_is_unpickled_is_data(source: Source) -> Iterator[int]:
    """Checkpoints come from elsewhere: reading one must not run code from it."""
    reached = [*imported(source), *((n.lineno, dotted(n)) for n in source.every(ast.Attribute))]
    yield from (line for line, name in reached if within(name, RUNS_CODE_FROM_FILES))
    for call in source.every(ast.Call):
        given = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
        weights = dotted(call.func) == "torch.load" and given.get("weights_only") is not True
        if weights or given.get("allow_pickle", False) is not False:
            yield call.lineno


def test_the_checked_tree_is_not_empty() -> None:
    """The rules above pass over nothing at all; this one notices a moved package."""
    paths = {source.path for source in sources()}
    assert {"launcher/runner.py", "ops/op_builder/builder.py", "git_version_info.py"} <= paths


def test_no_test_file_is_outside_the_suites() -> None:
    """`make test` and the campaign `multinode` run these folders alone."""
    paths = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    suites = ("unit", "style", "multinode")
    report([path.as_posix() for path in paths if path.parts[1] not in suites])


NOT_OF_ONE_MODULE = ("campaigns", "clients", "docs", "examples", "mutation", "upstream", "v1")
"""Folders of tests/unit that follow another order than the package's: what is tested there is a
program, a client, a page, or, in v1, training on several ranks by subject, as in upstream's tree.
"""


def test_folders_of_tests_mirror_the_package() -> None:
    """Who changes a module finds its tests without a search."""
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}
    mirrors = [path for path in folders if path.parts and path.parts[0] not in NOT_OF_ONE_MODULE]
    report([f"tests/unit/{path}" for path in mirrors if not (PACKAGE / path).is_dir()])


def covers(folder: Path) -> set[str]:
    """What the `__init__` of a folder of tests names as COVERS: modules and packages."""
    hall = folder / "__init__.py"
    for node in ast.parse(hall.read_text() if hall.exists() else "").body:
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "COVERS":
            return {f"deepspeed.{name}" for name in ast.literal_eval(node.value)}
    return set()


def named_in(path: Path) -> Iterator[str]:
    """The modules that a file of tests imports or tells."""
    text = path.read_text(encoding="utf-8")
    yield from re.findall(r"\bdeepspeed(?:\.\w+)+", text)
    for base, names in re.findall(r"^ *from (deepspeed[.\w]*) import (.*)", text, re.M):
        yield from (f"{base}.{name.strip()}" for name in names.split(","))


def test_every_module_is_covered() -> None:
    """A module of some size has tests: in a folder that says so or mirrors its own, or by name."""
    unit = ROOT / "tests" / "unit"
    files = [path for path in unit.rglob("*.py") if "table" not in path.parts]  # of planted faults
    folders = {path.parent for path in files if path.name.startswith("test_")}
    told = {folder: covers(folder) for folder in folders}
    says = tuple(name for names in told.values() for name in names)
    named = {name for path in files for name in named_in(path)}
    there = {s.module for s in sources()}
    report(
        [
            f"{folder.relative_to(ROOT)}: COVERS names {sorted(names - there) or 'nothing'}"
            for folder, names in told.items()
            if names - there or (not names and (unit / "v1") in folder.parents)
        ]
        + [
            f"{s.path}: no tests say that they cover it"
            for s in sources()
            if s.text.count("\n") >= 60
            and unit / Path(s.path).parent not in folders
            and s.module not in named
            and not within(s.module, says)
        ]
    )
