"""Programs that edit upstream: on a made-up tree, and on a release where it is there."""

import difflib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unit.upstream import made_up

ROOT = Path(__file__).resolve().parents[3]
RELEASES = {"0.18.6": {"fix2-hook-stream"}}
RELEASES["0.19.6"] = {*RELEASES["0.18.6"], "fix4-boundary-micro-batch"}
RELEASES["0.19.8"] = {*RELEASES["0.19.6"], "expert-norm", "ulysses-layout"}
"""What releases have already."""
NAMES = (
    *("fix1-bucket-streams", "fix2-hook-stream", "fix3-zero-norm", "fix3-bf16-norm"),
    *("fix3-pipe-dtype", "fix4-boundary-micro-batch", "loss-scale-step", "stage0-loss-scale"),
    *("mesh-gradients", "gathered-writes", "expert-norm", "ulysses-layout"),
)

REASON = "the programs edit syntax trees with libcst (requirements-dev.txt)"
pytest.importorskip("libcst", reason=REASON)


def fix_of(programs: Any, name: str) -> Any:
    return {one.name: one for one in programs["catalogue"].FIXES}[name]


def texts(tree: Path) -> dict[str, str]:
    return {str(p.relative_to(tree)): p.read_text() for p in sorted(tree.rglob("*.py"))}


def test_all_programs_are_in_the_catalogue(programs: Any) -> None:
    assert tuple(one.name for one in programs["catalogue"].FIXES) == NAMES
    tests = {one.test for one in programs["catalogue"].FIXES}
    assert tests == {p.name for p in (ROOT / "scripts/upstream/regressions").glob("*.py")}


@pytest.mark.parametrize("name", NAMES)
def test_applied_once_and_found_afterwards(programs: Any, tree: Path, name: str) -> None:
    # Kills: an edit that does not leave what the program itself takes for fixed.
    one, before = fix_of(programs, name), texts(tree)
    outcome = programs["fix"].apply(one, tree)
    assert outcome.what == programs["fix"].APPLIED, str(outcome)
    after = texts(tree)
    test = (ROOT / "scripts/upstream/regressions" / one.test).read_text()
    assert after.pop(one.test_path) == test
    assert sorted(outcome.files) == sorted(f for f in after if after[f] != before[f])
    for file in outcome.files:
        compile(after[file], file, "exec")
        assert not any(line != line.rstrip() for line in after[file].splitlines())
        assert max(map(len, after[file].splitlines())) <= 119, "upstream's line length"
    again = programs["fix"].apply(one, tree)
    assert again.what == programs["fix"].ALREADY, str(again)
    assert {**texts(tree)} == {**after, one.test_path: (tree / one.test_path).read_text()}


def test_only_what_the_edit_is_about_changes(programs: Any, tree: Path) -> None:
    before = texts(tree)
    programs["fix"].apply(fix_of(programs, "fix4-boundary-micro-batch"), tree)
    file = "deepspeed/runtime/engine.py"
    lines = difflib.ndiff(before[file].splitlines(), texts(tree)[file].splitlines())
    gone = [line for line in lines if line[0] == "-"]
    assert gone == ["-             self.optimizer.backward_epilogue()"]
    text = texts(tree)[file]
    assert text.count("self.optimizer.backward_epilogue()") == 2
    assert text.index("backward_epilogue()\n") < text.index("allreduce_gradients()")


def test_the_norm_has_no_collective_of_its_own(programs: Any, tree: Path) -> None:
    programs["fix"].apply(fix_of(programs, "fix3-zero-norm"), tree)
    text = (tree / "deepspeed/runtime/zero/stage_1_and_2.py").read_text()
    total = text[text.index("def scaled_global_norm") : text.index("def step")]
    assert text.count("dist.all_reduce(") == 3, "the bucket's, the norm's, one that is not called"
    assert total.count("dist.all_reduce(") == 1 and "_average_expert_grad_norms" not in total
    assert "combine_grad_norm_groups" not in text, "an import that nothing uses is left"


@pytest.mark.parametrize("name", NAMES)
def test_a_function_that_is_gone_is_named(programs: Any, tree: Path, name: str) -> None:
    # Kills: a program that edits half of its places, or ends without a word.
    one = fix_of(programs, name)
    before = texts(tree)
    (first, *_) = changed = programs["fix"].apply(one, tree).files
    shutil.rmtree(tree)
    made_up.write(tree)
    for file in changed:
        path = tree / file
        path.write_text(path.read_text().replace("def ", "def renamed_"))
    renamed = texts(tree)
    outcome = programs["fix"].apply(one, tree)
    assert outcome.what == programs["fix"].FAILED, str(outcome)
    assert "there is no " in outcome.why and ".py" in outcome.why
    assert texts(tree) == renamed and renamed[first] != before[first]


def test_a_place_that_is_gone_is_named(programs: Any, tree: Path) -> None:
    path = tree / "deepspeed/runtime/zero/stage_1_and_2.py"
    path.write_text(path.read_text().replace("bucket.elements += param.numel()", "pass"))
    before = texts(tree)
    outcome = programs["fix"].apply(fix_of(programs, "fix1-bucket-streams"), tree)
    assert outcome.what == programs["fix"].FAILED
    assert "reduce_independent_p_g_buckets_and_remove_grads" in outcome.why
    assert "an assignment to bucket.elements was not found" in outcome.why
    assert texts(tree) == before


def test_a_function_that_has_moved_is_found(programs: Any, tree: Path) -> None:
    (tree / "deepspeed/utils/groups.py").rename(tree / "deepspeed/utils/ranks.py")
    outcome = programs["fix"].apply(fix_of(programs, "mesh-gradients"), tree)
    assert outcome.files == ("deepspeed/utils/ranks.py",)
    assert "has moved from deepspeed/utils/groups.py to deepspeed/utils/ranks.py" in str(outcome)


def test_a_function_in_two_files_is_not_guessed(programs: Any, tree: Path) -> None:
    groups = tree / "deepspeed/utils/groups.py"
    for name in ("one.py", "two.py"):
        shutil.copy(groups, groups.with_name(name))
    groups.unlink()
    outcome = programs["fix"].apply(fix_of(programs, "mesh-gradients"), tree)
    assert outcome.what == programs["fix"].FAILED
    assert "one.py and deepspeed/utils/two.py" in outcome.why


def test_commits_are_signed_off_and_apply_in_any_order(
    programs: Any, tree: Path, tmp_path: Path
) -> None:
    chosen = [fix_of(programs, name) for name in ("fix1-bucket-streams", "fix3-zero-norm")]
    chosen.append(fix_of(programs, "loss-scale-step"))
    releases = programs["releases"]
    repository = releases.Repository(tmp_path / "git", ("A Name", "name@example.org"))
    repository.begin(tree, "made up")
    for one in chosen:
        assert repository.commit(one, releases.BASE).what == programs["fix"].APPLIED
    patches = repository.patches([one.name for one in chosen], tmp_path / "patches")
    assert [p.name for p in patches][0] == "0001-fix1-bucket-streams.patch"
    for one, patch in zip(chosen, patches, strict=True):
        text = patch.read_text()
        assert "Signed-off-by: A Name <name@example.org>" in text
        assert one.test_path in text
        lines = one.message().splitlines()
        assert max(map(len, lines)) <= 76 and not lines[1]
    orders = releases.orders(patches)
    assert len({tuple(order) for order in orders}) == 4
    assert len({repository.apply_in_order("all", order) for order in orders}) == 1


def test_the_loss_is_scaled_where_nothing_else_scales_it(programs: Any, tree: Path) -> None:
    programs["fix"].apply(fix_of(programs, "stage0-loss-scale"), tree)
    text = (tree / "deepspeed/runtime/engine.py").read_text()
    scale = text[text.index("def scale(") : text.index("def backward(")]
    backward = text[text.index("def backward(") :]
    for part, loss in ((scale, "scaled_loss"), (backward, "loss")):
        added = f" {loss} = {loss}.float() * self.optimizer.loss_scale_config.cur_scale"
        assert part.count(added) == 1
        assert part.index(f"self.scaler.scale({loss})") < part.index(added)
    assert backward.index("cur_scale") < backward.index("loss.backward()")


def a_run(programs: Any, folder: Path, state: str = "one state") -> Any:
    file = folder / "test_something.py"
    if not file.exists():
        file.write_text("def test(): pass\n")
    return programs["runs"].Run(folder, (file,), folder / "run.log", "", state)


def test_what_a_file_has_shown_is_kept_while_nothing_changes(programs: Any, tmp_path: Path) -> None:
    # Kills: a result that is used for another tree or another test, or never.
    run, counts = a_run(programs, tmp_path), programs["runs"].Counts
    (file,) = run.files
    assert run.missing() == (file,) and not run.counts()[file.name].good
    run.keep(file, {"passed": 2})
    assert run.missing() == () and run.counts() == {file.name: counts(2)}
    other = a_run(programs, tmp_path, "another state")
    assert other.missing() == (file,) and other.counts() == {file.name: counts()}
    file.write_text("def test(): assert False\n")
    assert run.missing() == (file,) and run.counts() == {file.name: counts()}


def test_ranks_that_were_given_up_show_nothing(programs: Any, tmp_path: Path) -> None:
    # Kills: a time-out on a busy machine that counts as the hazard, or as done.
    run, counts = a_run(programs, tmp_path), programs["runs"].Counts
    run.keep(run.files[0], {"failed": 1, "passed": 1, "given_up": 1})
    (shown,) = run.counts().values()
    assert run.missing() == run.files
    assert not shown.good and not shown.bad and counts(1, 1).bad and counts(1).good
    assert str(shown) == "1 given up, 1 failed, 1 passed"


def test_the_tally_counts_each_file(programs: Any, tmp_path: Path) -> None:
    # Kills: counts of one file that go to the next, and a file that cannot be imported.
    (tmp_path / "test_a.py").write_text(
        "import pytest\n"
        "def test_pass(): pass\n"
        "def test_fail(): assert False\n"
        "def test_skip(): pytest.skip()\n"
        "def test_busy(): pytest.fail('ranks [0] of 2 did not end within 9 s', pytrace=False)\n"
    )
    (tmp_path / "test_b.py").write_text("def test(): pass\n")
    (tmp_path / "test_c.py").write_text("import nothing_of_that_name\n")
    program = (
        "import json, pytest, tally\n"
        "kept = {}\n"
        "plugin = tally.Tally(lambda file, counts: kept.update({file.name: counts}))\n"
        "options = ['-q', '-p', 'no:cacheprovider', '--continue-on-collection-errors']\n"
        "pytest.main([*options, '-c', '/dev/null', '--rootdir', '.', '.'], [plugin])\n"
        "print('kept', json.dumps(kept))\n"
    )
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts" / "upstream")}
    said = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    kept = json.loads(said.rsplit("kept", 1)[1])
    one_each = dict.fromkeys(("passed", "failed", "skipped", "given_up"), 1)
    passed = {**dict.fromkeys(one_each, 0), "passed": 1}
    assert kept == {"test_a.py": one_each, "test_b.py": passed, "test_c.py": {"failed": 1}}


def test_the_table_keeps_other_releases(programs: Any) -> None:
    table, fix, counts = programs["table"], programs["fix"], programs["runs"].Counts
    good = table.Row("a", fix.Outcome(fix.APPLIED), counts(0, 2), counts(2), counts(2))
    there = table.Row("b", fix.Outcome(fix.ALREADY), counts(1))
    bad = table.Row("c", fix.Outcome(fix.APPLIED), counts(2), counts(2), counts(2))
    assert good.good and there.good and not bad.good
    alone = table.Row("d", fix.Outcome(fix.APPLIED), counts(0, 2), counts(2))
    assert alone.shown and not alone.good, "not run with all fixes"
    busy = table.Row("e", fix.Outcome(fix.APPLIED), counts(0, 1, 0, 1), counts(2), counts(2))
    assert not busy.shown and not busy.good
    document = f"# Page\n\n{table.BEGIN}\n\n{table.END}\n\nend\n"
    for release, row in (("0.19.6", good), ("0.18.6", there), ("0.19.6", bad)):
        section = table.Section(release, "today", "torch 1", (row,), 4, counts(3))
        assert section.good == row.good
        document = table.merged(document, section)
    assert document.startswith("# Page") and document.endswith("end\n")
    assert document.count("### 0.19.6") == 1
    assert document.index("### 0.18.6") < document.index("### 0.19.6")
    assert "| c | **not proved** (applied) | 2 passed | 2 passed | 2 passed |" in document
    assert "| b | already fixed | 1 passed |  |  |" in document
    with pytest.raises(ValueError, match="releases: begin"):
        table.merged("# Page\n", section)


@pytest.mark.parametrize("release", RELEASES)
def test_the_release_itself(programs: Any, tmp_path: Path, release: str) -> None:
    source = ROOT / "build" / "upstream" / "sources" / f"deepspeed-{release}"
    if not source.is_dir():
        pytest.skip(f"`make upstream-patches UPSTREAM={release}` gets the source of {release}")
    files = [file for file in made_up.FILES if (source / file).is_file()]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / file, tmp_path / file)
    fixes, apply = programs["catalogue"].FIXES, programs["fix"].apply
    outcomes = {one.name: apply(one, tmp_path).what for one in fixes}
    there = {name for name, what in outcomes.items() if what == programs["fix"].ALREADY}
    assert there == RELEASES[release]
    assert set(outcomes.values()) == {programs["fix"].ALREADY, programs["fix"].APPLIED}
    for file in files:
        compile((tmp_path / file).read_text(), file, "exec")
