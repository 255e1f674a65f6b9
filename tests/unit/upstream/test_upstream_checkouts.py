"""`make upstream-patches` on a git checkout, which has a harness, tests and branches of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unit.common import python_path
from unit.upstream import made_up
from unit.upstream.made_up import git

REASON = "the programs edit syntax trees with libcst (requirements-dev.txt)"
pytest.importorskip("libcst", reason=REASON)

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "scripts" / "upstream"


def program(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """What `make upstream-patches` runs."""
    return subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, words)], capture_output=True, text=True
    )


def state_of(checkout: Path) -> dict[str, Any]:
    """Everything that a person would miss, and branches."""
    files = [p for p in checkout.rglob("*") if p.is_file() and ".git" not in p.parts]
    return {
        "head": (checkout / ".git" / "HEAD").read_text(),
        "index": (checkout / ".git" / "index").read_bytes(),
        "inside": {p.name for p in (checkout / ".git").iterdir()},
        "status": git(checkout, "--no-optional-locks", "status", "--porcelain"),
        "config": (checkout / ".git" / "config").read_text(),
        "files": {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in files},
    }


def branches(checkout: Path) -> list[str]:
    return git(checkout, "for-each-ref", "--format=%(refname:short)", "refs").splitlines()


def test_a_branch_per_fix_and_nothing_else_changes(programs: Any, tmp_path: Path) -> None:
    checkout = made_up.checkout(tmp_path / "upstream")
    (checkout / "deepspeed" / "runtime" / "utils.py").write_text("# somebody is at work here\n")
    (checkout / "notes.txt").write_text("mine\n")
    git(checkout, "add", "notes.txt")
    before = state_of(checkout)
    done = program(checkout, "--no-tests", "--branch", "--folder", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    left = "not committed, and left out: deepspeed/runtime/utils.py, notes.txt"
    assert done.stdout.startswith(left)
    assert state_of(checkout) == before
    fixes = [one for one in programs["catalogue"].FIXES if one.name != "fix2-hook-stream"]
    names = [one.name for one in fixes]
    # Of what is not committed one file would have kept expert-norm from being applied.
    assert sorted(branches(checkout)) == sorted(["main", *names])
    for one in fixes:
        assert git(checkout, "rev-parse", f"{one.name}^") == git(checkout, "rev-parse", "main")
        text = git(checkout, "log", "-1", "--format=%an <%ae>%n%B", one.name)
        author, subject, blank, *body = text.splitlines()
        # Signed off by who will push it.
        assert author == "A Contributor <who@example.org>" and subject == one.subject
        assert body[-1] == f"Signed-off-by: {author}" and not blank
        parts = [line.split(":")[0] for line in body if line.startswith(("Why:", "What:", "How"))]
        assert parts == ["Why", "What", "How tested"]
        assert any(line.endswith(one.test_path) for line in body)
        changed = git(checkout, "diff", "--name-only", f"main..{one.name}").splitlines()
        assert one.test_path in changed and "notes.txt" not in changed


class Made:
    """A branch of one fix, made for a checkout."""

    name = "gathered-writes"

    def __init__(self, programs: Any, root: Path, folder: Path) -> None:
        releases = programs["releases"]
        self.root = root
        self.checkout = releases.Checkout.at(root)
        self.repository = releases.Repository(folder, ("A Name", "name@example.org"))
        self.repository.begin(self.checkout, "not used")
        (one,) = (one for one in programs["catalogue"].FIXES if one.name == self.name)
        self.repository.commit(one, releases.BASE)

    def leave(self) -> None:
        lacking = self.checkout.lacking(self.repository, [self.name])
        self.checkout.leave(self.repository, lacking)

    def commit(self) -> str:
        return git(self.root, "rev-parse", self.name)


def test_a_branch_that_is_something_else_is_not_overwritten(programs: Any, tmp_path: Path) -> None:
    checkout = made_up.checkout(tmp_path / "upstream")
    made = Made(programs, checkout, tmp_path / "tree")
    made.leave()
    commit = made.commit()
    assert git(checkout, "rev-parse", f"{commit}^") == git(checkout, "rev-parse", "main")
    # Made anew it has another date, and nothing else.
    made = Made(programs, checkout, tmp_path / "tree")
    made.leave()
    assert made.commit() == commit
    git(checkout, "branch", "--force", made.name, "main")
    words = r"something else: gathered-writes; .*-m"
    with pytest.raises(programs["releases"].NoSource, match=words):
        made.leave()
    assert made.commit() == git(checkout, "rev-parse", "main")


@pytest.mark.parametrize("kind", ["shallow", "detached worktree", "with a tag base"])
def test_a_checkout_in_another_state_of_git(programs: Any, tmp_path: Path, kind: str) -> None:
    # Kills: a clone by branch name, which a detached head has not, and a name that is a tag's.
    root = whole = made_up.checkout(tmp_path / "whole")
    git(whole, "commit", "--quiet", "--allow-empty", "--message", "one more")
    if kind == "with a tag base":
        git(whole, "tag", "base", "HEAD^")
    else:
        root = tmp_path / "other"
        if kind == "shallow":
            git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{whole}", str(root))
        else:
            git(whole, "worktree", "add", "--quiet", "--detach", str(root))
    made = Made(programs, root, tmp_path / "tree")
    made.leave()
    assert git(root, "rev-parse", f"{made.name}^") == git(root, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    "what,words",
    [
        ("a folder that is not there", "there is no folder"),
        ("no source tree", "version.txt or deepspeed/ is missing"),
        ("no checkout", "--branch needs a git checkout with a commit"),
        ("nothing committed", "--branch needs a git checkout with a commit"),
        ("in use", "another command is at work in"),
    ],
)
def test_what_cannot_be_done_is_said(programs: Any, tmp_path: Path, what: str, words: str) -> None:
    folder = tmp_path / "upstream"
    lock = None
    if what == "no source tree":
        folder.mkdir()
        git(folder, "init", "--quiet")
        git(folder, "commit", "--quiet", "--allow-empty", "--message", "nothing")
    elif what == "in use":
        made_up.checkout(folder)
        lock = programs["releases"].held(tmp_path / "out" / "0.99.1-checkout")
    elif what != "a folder that is not there":
        made_up.write(folder, {**made_up.FILES, **made_up.PACKAGE})
        if what == "nothing committed":
            git(folder, "init", "--quiet")
    done = program(folder, "--no-tests", "--branch", "--folder", tmp_path / "out")
    assert done.returncode == 2 and words in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    if lock is not None:
        lock.close()


def test_the_harness_of_a_checkout_is_not_used(tmp_path: Path) -> None:
    # Kills: regression tests that a checkout's harness skips, or that need what it needs.
    skips = "raise ImportError('No module named mpi4py')"
    tree = made_up.checkout(tmp_path / "upstream", {"common.py": skips})
    file = tmp_path / "test_on_ranks.py"
    file.write_text(
        "import os\n"
        "import pytest\n"
        "import deepspeed\n"
        "from unit.common import DistributedTest\n"
        "class TestRanks(DistributedTest):\n"
        "    world_size = 2\n"
        "    init_distributed = False\n"
        "    @pytest.mark.parametrize('good', [True, False])\n"
        "    def test(self, good):\n"
        f"        assert deepspeed.__file__.startswith({str(tree)!r})\n"
        "        assert float(os.environ['DS_UNITTEST_TIMEOUT']) >= 3600\n"
        f"        assert os.environ['TORCH_EXTENSIONS_DIR'].startswith({str(tmp_path)!r})\n"
        "        assert good, os.environ['RANK']\n"
    )
    log = tmp_path / "logs" / "base.log"
    places = f"Path({str(tree)!r}), (Path({str(file)!r}),), Path({str(log)!r})"
    run = f"runs.run_all([runs.Run({places}, 'without')], 2)"
    environment = {k: v for k, v in os.environ.items() if k != "LOCAL_SIZE"}
    command = [sys.executable, "-c", f"from pathlib import Path; import runs; {run}"]
    environment["PYTHONPATH"] = python_path(PROGRAM)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    (kept,) = json.loads(log.with_suffix(".json").read_text()).values()
    counts = {"passed": 1, "failed": 1, "skipped": 0, "given_up": 0}
    assert kept["counts"] == counts, log.read_text()
    first, second, whole = done.stdout.splitlines()
    assert first.startswith("  without: test_on_ranks.py::TestRanks::test[True]: passed (")
    assert second.startswith("  without: test_on_ranks.py::TestRanks::test[False]: failed (")
    assert whole.startswith("[1 of 1, 0:") and whole.endswith("1 failed, 1 passed")


OWN_TESTS = """
from pathlib import Path

import pytest
from unit.common import DistributedTest

STATE = Path("../deepspeed/state.txt").read_text()


class TestZero(DistributedTest):

    @pytest.mark.parametrize("what", ["a", "b"])
    def test_passes(self, what):
        with open("../../ran.txt", "a") as file:
            file.write(f"{what} {STATE}\\n")

    def test_broken_by_a_fix(self):
        assert STATE == "old"

    def test_mended_by_a_fix(self):
        assert STATE == "new"

    def test_fails(self):
        assert False

    def test_skips(self):
        pytest.skip()

    def test_unsteady(self):
        once = Path("../../once.txt")
        if STATE == "new" and not once.exists():
            once.touch()
            assert False
"""
ENDS = """
import pytest


@pytest.mark.marked
def test_one():
    pass


def test_hangs():
    pytest.exit("the harness gives up")


def test_another():
    pass
"""


class Comparison:
    """A checkout whose second branch has another state, and a suite that says what it does."""

    def __init__(self, programs: Any, folder: Path, tests: dict[str, str]) -> None:
        self.own, self.fix = programs["own_tests"], programs["fix"]
        self.folder = folder
        self.tree = made_up.checkout(folder / "upstream", tests)
        self.files = tuple(f"tests/unit/{name}" for name in tests)
        self.one = programs["catalogue"].FIXES[0]
        state = self.tree / "deepspeed" / "state.txt"
        for branch, text in (("base", "old"), ("all", "new")):
            git(self.tree, "checkout", "--quiet", "-b", branch)
            state.write_text(text)
            if branch == "all":
                made_up.write(self.tree, {self.one.test_path: "def test(): pass\n"})
            git(self.tree, "add", "--all")
            git(self.tree, "commit", "--quiet", "--message", text)
        self.extensions = folder / "extensions"
        self.said: list[str] = []

    def suite(self) -> Any:
        return self.own.Suite(self.tree, self.folder / "logs", self.extensions, self.said.append)

    def run(self, minutes: float = 5.0) -> Any:
        applied = [(self.one, self.fix.Outcome(self.fix.APPLIED))]
        states = [(name, git(self.tree, "rev-parse", name)) for name in ("base", "all")]
        return self.own.compare(self.suite(), applied, self.files, *states, minutes)


def test_tests_of_the_checkout_before_and_after(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    comparison = Comparison(programs, tmp_path, {"v1/zero/test_zero.py": OWN_TESTS})
    lock = comparison.extensions / "op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()  # of a command that was ended
    found = comparison.run()
    name = "unit/v1/zero/test_zero.py::TestZero::test_"
    counts = programs["runs"].Counts
    broken, mended = f"{name}broken_by_a_fix", f"{name}mended_by_a_fix"
    assert found.lasting == {broken: ("passed", "failed"), mended: ("failed", "passed")}
    assert f"{name}unsteady" in found.again and not found.good
    assert found.files == 1 and found.left == 0 and found.regressions == counts(passed=1)
    assert found.text() == (
        "Upstream's own tests of the files touched (1 files): 2 failed, 4 passed, 1 skipped "
        "before; after: 3 failed, 3 passed, 1 skipped; different: "
        f"{broken} (passed, then failed); {mended} (failed, then passed). "
        "1 differed once, and not again. "
        "The regression tests under the checkout's harness: 1 passed."
    )
    # Once, first, and not behind the lock.
    assert (comparison.extensions / "built.txt").read_text() == "shared memory\n"
    assert comparison.said[0].startswith("[1 of 1] before: tests/unit/v1/zero/test_zero.py")
    assert comparison.said[1].startswith("building upstream's op 'shared memory' once")
    assert comparison.said[2].startswith(f"  before: {name}passes[a]: passed (")
    ran = (tmp_path / "ran.txt").read_text()
    assert ran.splitlines() == ["a old", "b old", "a new", "b new"]
    # What is known does not run again; what differed does, for nothing else is known of it.
    comparison.said.clear()
    assert comparison.run().lasting == found.lasting
    assert (tmp_path / "ran.txt").read_text() == ran
    assert not any(line.startswith(("  before:", "  after:")) for line in comparison.said)


def test_a_fix_may_mend_a_test(programs: Any) -> None:
    compared, counts = programs["own_tests"].Compared, programs["runs"].Counts
    pair = ("failed", "passed")
    mended = compared({"a": pair[0]}, {"a": pair[1]}, {"a": pair}, counts(1), 1)
    assert mended.good and mended.lasting
    same = compared({"a": "passed"}, {"a": "passed"}, {}, counts(1), 1)
    assert same.good and "1 passed before; after: the same." in same.text()
    gone = compared({"a": "passed"}, {}, {"a": ("passed", "did not run")}, counts(1), 1)
    assert not gone.good


def test_own_tests_end_when_their_time_is_over(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kills: a limit that ends a test in the middle, and a comparison with what did not run before.
    # Only the time of the tests passes: a busy machine would have none left for the first file.
    stands = SimpleNamespace(monotonic=lambda: 0.0, sleep=time.sleep)
    monkeypatch.setattr(programs["own_tests"], "time", stands)
    comparison = Comparison(programs, tmp_path, {"v1/zero/test_zero.py": OWN_TESTS})
    found = comparison.run(minutes=1e-6)
    name = "unit/v1/zero/test_zero.py::TestZero::test_passes[a]"
    assert dict(found.before) == dict(found.after) == {name: "passed"}
    assert found.left == 1 and "1 files did not come to their end." in found.text()


def test_a_harness_that_gives_up_ends_its_file(programs: Any, tmp_path: Path) -> None:
    # A checkout is copied below this project, whose settings leave out marked tests: not there.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -m 'not marked'\n")
    comparison = Comparison(programs, tmp_path, {"moe/test_moe.py": f"# Adam\n{ENDS}"})
    found = comparison.run()
    built = (comparison.extensions / "built.txt").read_text().splitlines()
    assert built == ["shared memory", "FusedAdamBuilder", "CPUAdamBuilder"]
    name = "unit/moe/test_moe.py::test_"
    assert dict(found.before) == {f"{name}one": "passed", f"{name}hangs": "given_up"}
    assert found.good and found.left == 1


def test_a_file_that_hangs_is_ended_with_what_it_has_started(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not long after it has begun, which takes as long as it takes.
    own, pids = programs["own_tests"], tmp_path / "pid.txt"
    never = type("Late", (), {"__gt__": lambda self, passed: not late()})()
    monkeypatch.setattr(own, "STUCK_S", never)

    def late() -> bool:
        return pids.exists() and time.time() - pids.stat().st_mtime > 1

    hangs = (
        "import subprocess\nimport time\n"
        "def test():\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    open('../../pid.txt', 'w').write(str(child.pid))\n"
        "    time.sleep(600)\n"
    )
    comparison = Comparison(programs, tmp_path, {"moe/test_moe.py": hangs})
    suite = comparison.suite()
    suite.switch("base", "a state")
    (shown,) = suite.run({comparison.files[0]: ()}, "before").values()
    assert shown.tests == {"unit/moe/test_moe.py::test": "given_up"} and not shown.whole
    stat = Path("/proc", pids.read_text(), "stat")
    for _ in range(100):
        if not stat.exists() or "Z" in stat.read_text().split():
            return
        time.sleep(0.1)
    pytest.fail("what it has started still runs")


def test_the_tests_of_a_file_are_those_that_name_it_and_its_neighbours(
    programs: Any, tree: Path
) -> None:
    made_up.write(
        tree / "tests" / "unit",
        {
            "other/test_dotted.py": "import deepspeed.utils.groups\n",
            "other/test_from.py": "from deepspeed.utils import (\n    logger,\n    groups,\n)\n",
            "other/test_patched.py": "TARGET = 'deepspeed.utils.groups.mpu'\n",
            "other/test_not.py": "from deepspeed.utils import logger\ngroups = deepspeed.utils\n",
            "v1/sequence_parallelism/test_ulysses.py": "",
            "v1/sequence_parallelism/helper.py": "import deepspeed.utils.groups\n",
            "utils/test_beside.py": "",
            "utils/deeper/test_far.py": "",
        },
    )
    fix = programs["fix"]
    catalogue = {one.name: one for one in programs["catalogue"].FIXES}
    applied = fix.Outcome(fix.APPLIED, files=("deepspeed/utils/groups.py",))
    there = fix.Outcome(fix.ALREADY)
    fixes = [(catalogue["mesh-gradients"], applied), (catalogue["expert-norm"], there)]
    others = [f"other/test_{name}.py" for name in ("dotted", "from", "patched")]
    wanted = [*others, "utils/test_beside.py", "v1/sequence_parallelism/test_ulysses.py"]
    chosen = programs["own_tests"].chosen(tree, fixes)
    assert chosen == tuple(f"tests/unit/{name}" for name in wanted)


def test_the_table_has_releases_and_checkouts(programs: Any) -> None:
    table, fix, counts = programs["table"], programs["fix"], programs["runs"].Counts
    compared = programs["own_tests"].Compared
    row = table.Row("a", fix.Outcome(fix.APPLIED), counts(0, 2), counts(2), counts(2))
    pair = ("passed", "failed")
    worse = compared({"a": pair[0]}, {"a": pair[1]}, {"a": pair}, counts(1), 1)
    document = f"{table.BEGIN}\n\n{table.END}\n"
    for release, own in (("0.19.6, a git checkout", worse), ("0.19.10", None), ("0.19.6", None)):
        section = table.Section(release, "today", "torch 1", (row,), 4, counts(3), own)
        assert section.good == (own is None)
        document = table.merged(document, section)
    heads = [line for line in document.splitlines() if line.startswith("###")]
    assert heads == ["### 0.19.6", "### 0.19.6, a git checkout", "### 0.19.10"]
    assert document.count(worse.text()) == 1
    # Equal rows are there once, and stay those of the others when the first is run again.
    assert document.count(row.line()) == 1 and document.count("The rows are those of 0.19.6.") == 2
    again = table.Row("a", fix.Outcome(fix.ALREADY), counts(1))
    section = table.Section("0.19.6", "later", "torch 1", (again,), 4, counts(3))
    document = table.merged(document, section)
    assert document.count(again.line()) == 1 == document.count(row.line())
    assert document.count("The rows are those of 0.19.6, a git checkout.") == 1
