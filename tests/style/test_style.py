"""House rules that can be read off the syntax tree; `make check` and CI run them over the whole
package.

Each rule is one function over parsed files and fails with `file:line` of every offence.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "deepspeed"

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
        """Of the whole tree; many rules look at all."""
        return tuple(ast.walk(self.tree))

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
    """`file:line` of everything that `find` yields, over all files whose path does not start with
    one of `skip`.
    """
    return [
        f"{s.path}:{line}"
        for s in sources()
        if not s.path.startswith(skip or ("\0",))
        for line in find(s)
    ]


def report(found: list[str]) -> None:
    """Fail with every place on a line of its own."""
    if found:
        pytest.fail("\n".join(sorted(set(found))), pytrace=False)


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all imports, anywhere in the file; `from a import b` gives a and
    a.b.
    """
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


def mentions(prefix: str) -> Callable[[Source], Iterator[int]]:
    """Finds imports and attribute chains that reach `prefix`."""

    def find(source: Source) -> Iterator[int]:
        yield from (line for line, name in imported(source) if within(name, (prefix,)))
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and dotted(node) == prefix:
                yield node.lineno

    return find


def type_checking_lines(source: Source) -> set[int]:
    """Lines inside `if TYPE_CHECKING:`, which import nothing at run time."""
    blocks = [
        n
        for n in source.nodes
        if isinstance(n, ast.If) and dotted(n.test).endswith("TYPE_CHECKING")
    ]
    return {
        line
        for block in blocks
        for line in range(block.lineno, (block.end_lineno or block.lineno) + 1)
    }


def test_every_module_has_a_docstring() -> None:
    report(offences(lambda s: iter(() if ast.get_docstring(s.tree) else (1,))))


def test_every_public_function_and_class_has_a_docstring() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

    def find(source: Source) -> Iterator[int]:
        for node in source.tree.body:
            if (
                isinstance(node, kinds)
                and not node.name.startswith("_")
                and not ast.get_docstring(node)
            ):
                yield node.lineno

    report(offences(find))


def test_every_function_is_annotated() -> None:
    def find(source: Source) -> Iterator[int]:
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                args += [extra for extra in (node.args.vararg, node.args.kwarg) if extra]
                missing = [
                    a
                    for a in args
                    if a.annotation is None and a.arg not in ("self", "cls", "mcs", "ctx")
                ]
                if missing or node.returns is None:
                    yield node.lineno

    report(offences(find))


def test_no_assert_without_a_message() -> None:
    report(
        offences(lambda s: (n.lineno for n in s.nodes if isinstance(n, ast.Assert) and not n.msg))
    )


def test_no_bare_except() -> None:
    report(
        offences(
            lambda s: (n.lineno for n in s.nodes if isinstance(n, ast.ExceptHandler) and not n.type)
        )
    )


def test_library_does_not_print_or_exit() -> None:
    def find(source: Source) -> Iterator[int]:
        for node in source.nodes:
            if isinstance(node, ast.Call) and dotted(node.func) in (
                "print",
                "exit",
                "quit",
                "sys.exit",
            ):
                yield node.lineno

    report(offences(find, skip=MAY_PRINT))


def test_only_comm_reaches_torch_distributed() -> None:
    # Files in the format of torch.distributed.checkpoint are read and written by it; nothing there
    # communicates. The elastic agent is a subclass of torch's, which is of the launching half.
    skip = ("comm/", "launcher/", "checkpoint/dcp_files.py", "elasticity/elastic_agent.py")
    report(offences(mentions("torch.distributed"), skip=skip))


def test_launcher_uses_only_the_launching_half_of_torch_distributed() -> None:
    allowed = tuple(f"torch.distributed.{part}" for part in ("elastic", "launcher", "run"))

    def find(source: Source) -> Iterator[int]:
        if source.path.startswith("launcher/"):
            for line, name in imported(source):
                if within(name, ("torch.distributed",)) and not within(name, allowed):
                    yield line

    report(offences(find))


def test_only_accelerators_reach_torch_cuda() -> None:
    report(offences(mentions("torch.cuda"), skip=("accelerator/",)))


def test_streams_are_made_in_one_place() -> None:
    def find(source: Source) -> Iterator[int]:
        for node in source.nodes:
            if isinstance(node, ast.Call) and re.fullmatch(
                r"(.*\.)?Stream", dotted(node.func) or ""
            ):
                yield node.lineno
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "Stream"
            ):
                yield node.lineno

    report(offences(find, skip=("accelerator/", "runtime/streams.py")))


def test_no_record_stream() -> None:
    """Lifetime across streams is a reference and an event; record_stream leaves reuse to the
    allocator's timing.
    """

    def find(source: Source) -> Iterator[int]:
        return (
            n.lineno
            for n in source.nodes
            if isinstance(n, ast.Attribute) and n.attr == "record_stream"
        )

    report(offences(find, skip=("accelerator/",)))  # which simulates and traces it


CORE = (
    *(f"runtime/{room}/" for room in ("sharding", "gradients", "optimizers", "zero", "fp16")),
    "runtime/streams.py",
    "runtime/bf16_optimizer.py",
)
SUBSYSTEM = re.compile("ledger|monitor|profiler", re.IGNORECASE)
"""What attaches to the core by an interface (`gradients.observer`, `step_observer`)."""


def docstring_lines(source: Source) -> set[int]:
    """Lines of strings that stand alone: docstrings of modules, classes, functions and names."""
    strings = [
        node
        for node in source.nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    return {
        line
        for node in strings
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def test_the_core_names_no_subsystem() -> None:
    def find(source: Source) -> Iterator[int]:
        if not source.path.startswith(CORE):
            return
        words = docstring_lines(source)
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if (
                token.type != tokenize.COMMENT
                and token.start[0] not in words
                and SUBSYSTEM.search(token.string)
            ):
                yield token.start[0]

    report(offences(find, skip=("runtime/gradients/ledger/",)))


def test_checkpoint_files_need_no_runtime() -> None:
    """The runtime saves and loads by `deepspeed.checkpoint`; whoever looks at a folder has no
    runtime.
    """

    def find(source: Source) -> Iterator[int]:
        if within(source.module, ("deepspeed.checkpoint",)):
            typing_only = type_checking_lines(source)
            for line, name in imported(source):
                if within(name, ("deepspeed.runtime",)) and line not in typing_only:
                    yield line

    report(offences(find))


def reasoned_lines(source: Source) -> set[int]:
    """Lines that a comment with one of FUNCTION_IMPORT_REASONS covers: its own, and the imports
    right below.
    """
    lines = source.text.splitlines()
    covered: set[int] = set()
    inside = False
    for number, line in enumerate(lines, start=1):
        stripped = line.strip()
        if any(f"# {reason}" in line for reason in FUNCTION_IMPORT_REASONS):
            inside = True
        elif not (stripped.startswith(("#", "import ", "from ", "try:", ")")) or not stripped):
            # Names of a parenthesised import do not end the block.
            inside = inside and stripped.rstrip(",").isidentifier()
        if inside:
            covered.add(number)
    return covered


def test_imports_inside_functions_say_why() -> None:
    def find(source: Source) -> Iterator[int]:
        reasons = reasoned_lines(source)
        for function in source.nodes:
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                if any(
                    reason in (ast.get_docstring(function) or "")
                    for reason in FUNCTION_IMPORT_REASONS
                ):
                    continue
                for node in ast.walk(function):
                    if isinstance(node, ast.Import | ast.ImportFrom) and node.lineno not in reasons:
                        yield node.lineno

    report(offences(find))


def test_comments_are_ascii() -> None:
    def find(source: Source) -> Iterator[int]:
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.COMMENT and not token.string.isascii():
                yield token.start[0]

    report(offences(find))


def test_todo_names_an_issue() -> None:
    bad = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")
    report(
        offences(
            lambda s: (n for n, line in enumerate(s.text.splitlines(), start=1) if bad.search(line))
        )
    )


def test_type_ignores_name_their_code() -> None:
    bad = re.compile(r"#\s*type:\s*ignore(?!\[)")
    report(
        offences(
            lambda s: (n for n, line in enumerate(s.text.splitlines(), start=1) if bad.search(line))
        )
    )


def test_the_checked_tree_is_not_empty() -> None:
    """The rules above pass over nothing at all; this one notices a moved package."""
    paths = {source.path for source in sources()}
    assert {"launcher/runner.py", "ops/op_builder/builder.py", "git_version_info.py"} <= paths


def test_no_test_file_is_outside_the_suites() -> None:
    """`make test` runs tests/unit and tests/style, the campaign `multinode` tests/multinode; a test
    elsewhere would never run.
    """
    strays = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.relative_to(ROOT / "tests").parts[0] not in ("unit", "style", "multinode")
    ]
    report(strays)


NOT_OF_ONE_MODULE = ("campaigns", "clients", "docs", "examples", "mutation", "upstream", "v1")
"""Folders of tests/unit that follow another order than the package's: what is tested there is a
program, a client, a page, or, in v1, training on several ranks by subject, as in upstream's tree.
"""


def test_folders_of_tests_mirror_the_package() -> None:
    """tests/unit/runtime/gradients tests deepspeed/runtime/gradients: who changes a module finds
    its tests without a search.
    """
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}
    mirrors = [path for path in folders if path.parts and path.parts[0] not in NOT_OF_ONE_MODULE]
    report([f"tests/unit/{path}" for path in mirrors if not (PACKAGE / path).is_dir()])


def test_nothing_runs_text_as_code_or_through_a_shell() -> None:
    def find(source: Source) -> Iterator[int]:
        for node in source.nodes:
            if isinstance(node, ast.Call):
                through_shell = any(
                    k.arg == "shell" and dotted(k.value) != "False" for k in node.keywords
                )
                if through_shell or dotted(node.func) in ("eval", "exec", "os.system", "os.popen"):
                    yield node.lineno

    report(offences(find))


RUNS_CODE_FROM_FILES = (
    *(
        f"{module}.{name}"
        for module in ("pickle", "dill", "cloudpickle", "marshal")
        for name in ("load", "loads", "Unpickler")
    ),
    *(
        "shelve",
        "joblib",
        "torch.jit.load",
        "torch.package",
        "yaml.load",
        "yaml.full_load",
        "yaml.unsafe_load",
    ),
)


def test_what_is_unpickled_is_data() -> None:
    """Checkpoints come from elsewhere: reading one must not run code from it."""

    def find(source: Source) -> Iterator[int]:
        yield from (line for line, name in imported(source) if within(name, RUNS_CODE_FROM_FILES))
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and within(dotted(node), RUNS_CODE_FROM_FILES):
                yield node.lineno
            elif isinstance(node, ast.Call):
                given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
                loads_weights = (
                    dotted(node.func) == "torch.load" and given.get("weights_only") is not True
                )
                if loads_weights or given.get("allow_pickle", False) is not False:
                    yield node.lineno

    # The file that is skipped has an unpickler with a list of classes.
    report(offences(find, skip=("checkpoint/dcp_files.py",)))
