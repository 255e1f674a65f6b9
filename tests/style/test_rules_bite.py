"""Each style rule fails on a file that breaks it: a rule that finds nothing is just as green."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import test_layers as layers  # noqa: E402
import test_objects as objects  # noqa: E402
import test_style as style  # noqa: E402 tests/ is no package, so the neighbour is found through the path

GOOD = '"""Docstring."""\n'
DEF = "def f() -> None:\n"
MANY = (DEF + '    """Of whom?"""\n') * (style.OPENERS_LEFT + 1)
Rule = Callable[[], None]
ANYWHERE: list[tuple[Rule, str]] = [
    (style.test_every_module_has_a_docstring, "x = 1\n"),
    (style.test_every_public_function_and_class_has_a_docstring, DEF + "    pass\n"),
    (style.test_docstrings_are_sentences, MANY),
    (style.test_every_function_is_annotated, "def f(x) -> None:\n    pass\n"),
    (style.test_no_assert_without_a_message, "assert True\n"),
    (style.test_no_bare_except, "try:\n    pass\nexcept:\n    pass\n"),
    (style.test_library_does_not_print_or_exit, "print(1)\n"),
    (style.test_library_does_not_print_or_exit, "import sys\nsys.exit(1)\n"),
    (style.test_only_comm_reaches_torch_distributed, "import torch.distributed as dist\n"),
    (style.test_only_comm_reaches_torch_distributed, "from torch import distributed\n"),
    (style.test_only_comm_reaches_torch_distributed, "import torch\ntorch.distributed.barrier()\n"),
    (style.test_only_accelerators_reach_torch_cuda, "torch.cuda.synchronize()\n"),
    (style.test_streams_are_made_in_one_place, "s = get_accelerator().Stream()\n"),
    (style.test_no_record_stream, "t.record_stream(s)\n"),
    (style.test_imports_inside_functions_say_why, DEF + "    import os\n"),
    (style.test_comments_are_ascii, "x = 1  # caf\u00e9\n"),
    (style.test_todo_names_an_issue, "x = 1  # TODO later\n"),
    (style.test_type_ignores_name_their_code, "x = 1  # type: ignore\n"),
    (style.test_nothing_runs_text_as_code_or_through_a_shell, "eval('1')\n"),
    (style.test_nothing_runs_text_as_code_or_through_a_shell, "run('ls', shell=True)\n"),
    (style.test_what_is_unpickled_is_data, "import torch\ntorch.load(x)\n"),
    (style.test_what_is_unpickled_is_data, "torch.load(x, weights_only=False)\n"),
    (style.test_what_is_unpickled_is_data, "import pickle\npickle.loads(x)\n"),
    (style.test_what_is_unpickled_is_data, "from pickle import Unpickler\n"),
    (style.test_what_is_unpickled_is_data, "numpy.load(x, allow_pickle=True)\n"),
]
LAUNCHES = style.test_launcher_uses_only_the_launching_half_of_torch_distributed
DOOR, CORE = layers.test_nobody_inside_goes_through_a_door, style.test_the_core_names_no_subsystem
DOWN = layers.test_imports_go_down_only
LATE = DEF + "    # optional: rare\n    from deepspeed.runtime import engine\n"
CYCLE = DEF + "    from deepspeed.runtime.zero import config  # cycle: none\n"
IF_SET = "if optimizer.ledger is not None:\n    optimizer.ledger.close()\n"
CASES: list[tuple[Rule, str, str]] = [
    *((rule, "a.py", text) for rule, text in ANYWHERE),
    (LAUNCHES, "launcher/a.py", "from torch.distributed import all_reduce\n"),
    (layers.test_every_file_has_a_layer, "stray.py", ""),
    (layers.test_every_file_has_a_layer, "runtime/stray/a.py", ""),
    (DOWN, "comm/b.py", LATE),
    (DOWN, "comm/a.py", "from deepspeed.runtime import engine\n"),
    (DOWN, "runtime/zero/a.py", "from ..engine import DeepSpeedEngine\n"),
    (DOOR, "runtime/engine.py", "from deepspeed.comm.config import CommsLoggerConfig\n"),
    (CORE, "runtime/zero/a.py", IF_SET),
    (CORE, "runtime/gradients/a.py", "from deepspeed.monitor.monitor import MonitorMaster\n"),
    (CORE, "runtime/optimizers/a.py", 'late = "deepspeed.profiling.flops_profiler"\n'),
    (style.test_checkpoint_files_need_no_runtime, "checkpoint/a.py", CYCLE),
]

BASE = "class A:\n    def __init__(self) -> None:\n        self.make()\n"
SMALL = objects.test_objects_are_small_with_what_they_inherit
FORTY = "class A:\n" + "".join(f"    def a{n}(self): ...\n" for n in range(40))
ONE_MORE = "from deepspeed.b import A as B\nclass C(B[int]):\n    def c(self): ...\n"
DEEP = "class A: ...\nclass B(A): ...\nclass C(B): ...\nclass D(C): ...\n"
MADE = "from .a import A\nclass B(A):\n    def make(self): ...\n"
EACH_OTHER = {
    "moe/a.py": DEF + "    import deepspeed.sequence.b  # startup: slow\n",
    "sequence/a.py": "from deepspeed.moe.b import x\n",
    **{"moe/b.py": "", "sequence/b.py": ""},
}
CIRCLE = {"comm/a.py": "from deepspeed.comm.b import x\n", "comm/b.py": "from . import c\n"}
CIRCLE["comm/c.py"] = DEF + "    import deepspeed.comm.a\n"
TYPES = {**CIRCLE, "comm/c.py": "if TYPE_CHECKING:\n    from deepspeed.comm.a import x\n"}
ABOVE = {"comm/a.py": 'x = "deepspeed.runtime.engine"\n', "runtime/engine.py": ""}
HALL = {
    "comm/__init__.py": '"""Here are `a` and `b`."""\n',
    **dict.fromkeys(("comm/a.py", "comm/b.py", "comm/abc.py"), ""),
}
# Rules about several files: their texts, and what is reported.
SEVERAL: list[tuple[Rule, dict[str, str], str]] = [
    (layers.test_the_tables_name_what_is_there, {"comm/a.py": ""}, "accelerator"),
    (layers.test_the_tables_name_what_is_there, {"comm/config.py": ""}, "comm.config"),
    (layers.test_no_two_packages_import_each_other, EACH_OTHER, "moe/a.py:3"),
    (layers.test_no_modules_import_in_a_circle, CIRCLE, "comm/c.py"),
    (layers.test_no_modules_import_in_a_circle, TYPES, "comm/c.py"),
    (layers.test_only_doors_name_what_is_above_them, ABOVE, "comm/a.py:2"),
    (layers.test_every_folder_has_a_hall, HALL, "comm/__init__.py: .*`abc`"),
    (
        SMALL,
        {"a.py": FORTY, "b.py": "from .a import A\n", "c.py": ONE_MORE},
        r"\Ac.py:3: 41 methods, 0 attributes, 2 deep\Z",
    ),
    (SMALL, {"a.py": DEEP}, r"\Aa.py:5: 0 methods, 0 attributes, 4 deep\Z"),
    (
        SMALL,
        {"a.py": BASE + "".join(f"        self.a{n}, b = n\n" for n in range(21))},
        r"\Aa.py:2: 1 methods, 21 attributes, 1 deep\Z",
    ),
    (
        objects.test_no_constructor_calls_what_is_overridden,
        {"a.py": BASE, "b.py": MADE},
        r"\Aa.py:2: calls make\Z",
    ),
]


def write(package: Path, texts: dict[str, str], docstring: str = GOOD) -> None:
    for path, text in texts.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        own = docstring if not text.startswith('"""') else ""
        (package / path).write_text(own + text, encoding="utf-8")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(style, "PACKAGE", tmp_path)
    layers.modules.cache_clear()
    yield tmp_path
    layers.modules.cache_clear()


@pytest.mark.parametrize(("rule", "path", "text"), CASES)
def test_rule_finds_the_offence(package: Path, rule: Rule, path: str, text: str) -> None:
    write(package, {path: text}, "" if rule is style.test_every_module_has_a_docstring else GOOD)
    with pytest.raises(pytest.fail.Exception, match=path):
        rule()


@pytest.mark.parametrize(("rule", "texts", "place"), SEVERAL)
def test_rule_finds_the_offence_among_several_files(
    package: Path, rule: Rule, texts: dict[str, str], place: str
) -> None:
    write(package, texts)
    with pytest.raises(pytest.fail.Exception, match=place):
        rule()


REASONS = (
    "    # optional: rare\n    import os\n    from a import (\n        b,\n        c,\n    )\n",
    "    import os  # startup: slow\n",
    '    """Load lazily (cycle: a needs b)."""\n    import os\n',
    "    # optional: maybe\n    try:\n        import os\n    except ImportError:\n        pass\n",
)
WORDS = (
    '"""Not of the ledger."""\n\n\n'
    + DEF.rstrip()
    + '  # nor a monitor\n    """As the profiler."""\n'
)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        *((style.test_imports_inside_functions_say_why, "a.py", DEF + why) for why in REASONS),
        (CORE, "runtime/zero/a.py", WORDS),
        (CORE, "runtime/gradients/ledger/a.py", "ledger = 1\n"),
        (CORE, "runtime/engine.py", "self.monitor = None\n"),
    ],
)
def test_rule_allows(package: Path, rule: Rule, path: str, text: str) -> None:
    write(package, {path: text})
    rule()


def test_every_rule_of_the_package_has_a_case() -> None:
    checked = {rule.__name__ for rule, _, _ in [*CASES, *SEVERAL]}
    about_the_tree = {
        *("test_the_checked_tree_is_not_empty", "test_no_test_file_is_outside_the_suites"),
        *("test_folders_of_tests_mirror_the_package", "test_every_module_is_covered"),
        "test_exceptions_are_needed",
    }
    rules = [*vars(style), *vars(layers), *vars(objects)]
    assert {name for name in rules if name.startswith("test_")} == checked | about_the_tree


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(style, "ROOT", tmp_path)
    monkeypatch.setattr(style, "PACKAGE", tmp_path / "deepspeed")
    return tmp_path


def test_a_folder_of_tests_needs_its_package(tree: Path) -> None:
    folders = ("comm", "comm/intent", "v1/subject")
    write(tree, {"deepspeed/comm/a.py": ""})
    write(tree, {f"tests/unit/{folder}/test_a.py": "" for folder in folders})
    with pytest.raises(pytest.fail.Exception, match=r"\Atests/unit/comm/intent\Z"):
        style.test_folders_of_tests_mirror_the_package()


def test_a_module_needs_tests(tree: Path) -> None:
    paths = ("comm/b", "moe/a", "moe/b/c", "pipe/a", "pipe/b", "runtime/a", "runtime/b")
    write(tree, {f"deepspeed/{path}.py": "\n" * 60 for path in paths})
    write(tree, {"deepspeed/moe/b/__init__.py": "", "deepspeed/pipe/short.py": "\n" * 50})
    unit = {
        "comm/test_a": "",
        "v1/subject/test_a": "from deepspeed.moe import a\nimport deepspeed.pipe.b\n",
        "v1/subject/__init__": 'COVERS = ("moe.b",)\n',
        "v1/stale/test_a": "",
        "v1/stale/__init__": 'COVERS = ("runtime.a", "runtime.c")\n',
        "v1/silent/test_a": "",
        "mutation/table/faults": "import deepspeed.runtime.b\n",
    }
    write(tree, {f"tests/unit/{path}.py": text for path, text in unit.items()})
    with pytest.raises(pytest.fail.Exception) as failure:
        style.test_every_module_is_covered()
    assert str(failure.value).splitlines() == [
        "pipe/a.py: no tests say that they cover it",
        "runtime/b.py: no tests say that they cover it",
        "tests/unit/v1/silent: COVERS names nothing",
        "tests/unit/v1/stale: COVERS names ['deepspeed.runtime.c']",
    ]
