"""Campaigns: one way to give them parameters, and what the one of versions reads and writes."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from campaigns import support_table, versions
from campaigns.__main__ import CAMPAIGNS, listing, main
from campaigns.campaign import ROOT, Campaign, run_and_keep
from campaigns.support_table import BETWEEN, NEWEST, OLDEST, Counts, Row, merge, parse, render
from campaigns.versions import Target, claims, constraints, floor, pins, targets

CLAIMED = [Row("torch", "2.6", OLDEST), Row("torch", "2.9.1", BETWEEN), Row("torch", "", NEWEST)]
CLAIMED += [Row("accelerate", "1.1.0", OLDEST)]


def row(version: str, which: str = "", passed: int = 10, package: str = "torch") -> Row:
    return Row(package, version, which, "Python 3.11.7", "2026-11-22", Counts(passed, 1, 2))


def arguments_of(campaign: Campaign, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    campaign.fill(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("campaign", CAMPAIGNS, ids=lambda campaign: campaign.name)
def test_every_campaign_is_listed_and_has_help_and_output(
    campaign: Campaign, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"  {campaign.name} " in listing() and campaign.summary in listing()
    with pytest.raises(SystemExit) as ended:
        main([campaign.name, "--help"])
    assert ended.value.code == 0 and "--output OUTPUT" in capsys.readouterr().out
    assert arguments_of(campaign, "--output", "x").output == Path("x")


def test_the_command_needs_no_environment() -> None:
    """`make campaign` runs it with the interpreter that makes the environment."""
    command = [sys.executable, "-I", "-S", str(ROOT / "tests" / "campaigns")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == listing()


def test_an_unknown_campaign_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zombie"]) == 2
    assert "no campaign 'zombie'" in capsys.readouterr().err


def test_words_after_two_dashes_are_pytests() -> None:
    found = next(campaign for campaign in CAMPAIGNS if campaign.name == "corrupt-checkpoints")
    given = arguments_of(found, "--rounds", "3", "--", "-x", "-k", "zip")
    assert (given.rounds, given.pytest_arguments) == (3, ["-x", "-k", "zip"])


def test_what_a_command_prints_is_kept_with_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import os, sys; print(os.environ['WORD']); sys.stderr.write('bad\\n'); sys.exit(3)"
    output = tmp_path / "new" / "result.txt"
    assert run_and_keep([sys.executable, "-c", code], output, {"WORD": "good"}) == 3
    assert sorted(output.read_text().split()) == ["bad", "good"]
    assert sorted(capfd.readouterr().out.split()) == ["bad", "good"]


@pytest.mark.parametrize(
    "line, counts",
    [
        ("3 failed, 447 passed, 10 skipped, 6 deselected in 627.13s (0:10:27)", (447, 3, 10)),
        ("= 12 passed, 1 warning, 2 errors in 0.42s =", (12, 2, 0)),
        ("================ 1 error in 3.00s ================", (0, 1, 0)),
        ("5 passed, 1 xfailed, 1 xpassed, 1 rerun in 1:02:03s", (5, 1, 0)),
    ],
)
def test_counts_are_those_of_the_closing_line(line: str, counts: tuple[int, int, int]) -> None:
    log = f"SKIPPED [1] x.py:3: ended in 3s\n1 passed, 7 failed in 2.00s\nFAILED x.py\n{line}\n"
    assert support_table.parse_counts(log) == Counts(*counts)


@pytest.mark.parametrize(
    "log", ["", "collected 3 items\n...\n", "no tests ran in 0.01s", "4 deselected in 0.01s"]
)
def test_a_run_without_an_end_or_without_tests_is_no_result(log: str) -> None:
    with pytest.raises(ValueError, match="pytest"):
        support_table.parse_counts(log)


def test_the_document_is_read_back() -> None:
    rows = [row("2.6.0", OLDEST), row("2.13.0"), row("2.15.0", NEWEST)]
    rows.append(row("1.1.0", OLDEST, package="accelerate"))
    assert parse(render(rows, CLAIMED)) == rows


def test_what_is_claimed_and_was_not_run_says_so() -> None:
    document = render([row("2.9.1", BETWEEN)], CLAIMED)
    lines = [line for line in document.splitlines() if support_table.NOT_RUN in line]
    starts = ("| 2.6 | oldest |", "|  | newest |", "| 1.1.0 | oldest |")
    assert lines == [f"{start}  | not run yet |  |  |  |" for start in starts]
    assert parse(document) == [row("2.9.1", BETWEEN)]


def test_rows_are_sorted_by_version_not_by_letter() -> None:
    document = render([row("2.13.0"), row("2.6.0", OLDEST), row("2.9.1", BETWEEN)], CLAIMED)
    assert [found.version for found in parse(document)] == ["2.6.0", "2.9.1", "2.13.0"]


def test_a_version_that_is_run_again_has_one_row() -> None:
    merged = merge([row("2.6.0", OLDEST, 1), row("2.9.1", BETWEEN)], [row("2.6.0", OLDEST, 5)])
    assert merged == [row("2.9.1", BETWEEN), row("2.6.0", OLDEST, 5)]


def test_the_newest_gives_the_word_to_a_newer_one_of_its_package() -> None:
    other = row("5.0", NEWEST, package="transformers")
    merged = merge([row("2.15.0", NEWEST), other], [row("2.16.0", NEWEST)])
    assert merged == [row("2.15.0"), other, row("2.16.0", NEWEST)]


def test_the_claims_are_those_of_the_requirements() -> None:
    assert floor("torch") in (ROOT / "requirements" / "requirements.txt").read_text()
    found = {(claim.package, claim.which): claim.version for claim in claims()}
    ends = {(package, which) for package in versions.PACKAGES for which in (OLDEST, NEWEST)}
    assert set(found) == {*ends, ("torch", BETWEEN), ("python", BETWEEN)}
    assert found["torch", OLDEST] == floor("torch") and found["torch", NEWEST] == ""


def test_targets_are_all_claims_or_what_was_asked_for() -> None:
    assert len(targets([])) == len(claims())
    wanted = [Target("torch", "2.7.1"), Target("accelerate", NEWEST)]
    assert targets(["torch=2.7.1", "accelerate=newest"]) == wanted
    assert [target.requirement for target in targets(["torch=2.7.1", "torch=newest"])] == [
        "torch==2.7.1",
        "torch",
    ]
    for word in ("torch", "torch=", "numpy=2.0"):
        with pytest.raises(ValueError, match=f"--only {word}"):
            targets([word])


def test_what_is_installed_stays_and_the_rest_is_pinned() -> None:
    pinned = pins(
        'torch==2.13.0\nsympy==1.14.0 ; python_version >= "3.11"\nJinja2==3.1.6\n# a==1\n'
    )
    assert pinned == {"torch": "2.13.0", "sympy": "1.14.0", "jinja2": "3.1.6"}
    installed = pins("torch==2.6.0+cpu\nsympy==1.13.1\n-e git+x\n")
    assert constraints(pinned, installed) == "jinja2==3.1.6\nsympy==1.13.1\ntorch==2.6.0+cpu\n"


def test_a_part_of_the_suite_is_no_result_for_the_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = versions.DOCUMENT.read_bytes()
    assert main(["versions", "--only", "torch=2.6.0", "--tests", "tests/style"]) == 2
    assert "--output" in capsys.readouterr().err
    assert versions.DOCUMENT.read_bytes() == before


def test_a_dry_run_prints_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--only", "transformers=4.44.2", "--dry-run", "--venvs", str(tmp_path)]
    assert main(["versions", *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "# transformers-4.44.2"
    pinned = pins(versions.PINS.read_text())["torch"]
    assert printed[2].endswith(f"--quiet torch=={pinned}")  # alone, before anything else
    assert printed[3].endswith(f"transformers==4.44.2 torch=={pinned}")
    assert printed[-1].endswith("-m pytest tests/unit/clients")
    assert list(tmp_path.iterdir()) == []


def test_the_document_holds_every_claim() -> None:
    """It was written by the campaign, and since the claims were last changed."""
    text = versions.DOCUMENT.read_text(encoding="utf-8")
    assert text == render(parse(text), claims())


def test_a_target_is_installed_run_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an environment whose commands only note that they were called."""
    called = []

    def call(self: versions.Environment, command: list[str], capture: bool = False) -> str:
        called.append(command)
        self.python.parent.mkdir(parents=True, exist_ok=True)
        return "torch==2.6.0+cpu\nsympy==1.13.1\npython==3.10.13\n" if capture else ""

    def run_and_note(command: list[str], output: Path, environment: dict[str, str]) -> int:
        output.parent.mkdir(parents=True)
        output.write_text("1 failed, 2 passed in 3.00s\n")
        called.append(command)
        return 1

    monkeypatch.setattr(versions.Environment, "_call", call)
    monkeypatch.setattr(versions, "run_and_keep", run_and_note)
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "results")
    document, venvs = tmp_path / "support.md", tmp_path / "venvs"
    words = ["--only", "torch=2.6.0", "--venvs", str(venvs), "--output", str(document)]
    assert main(["versions", *words]) == 1  # a test failed
    (found,) = parse(document.read_text())
    assert (found.version, found.which, found.counts) == ("2.6.0", OLDEST, Counts(2, 1, 0))
    assert called[-1][1:] == ["-m", "pytest", "tests/unit"] and not list(venvs.iterdir())
    shutil.rmtree(tmp_path / "results")
    words[1] = "python=3.10"
    assert main(["versions", *words]) == 1
    (found,) = [row for row in parse(document.read_text()) if row.package == "python"]
    assert (found.version, found.which) == ("3.10.13", OLDEST)
    assert "torch 2.6.0+cpu" in found.beside
    assert ["python3.10", "-m", "venv", str(venvs / "python-3.10")] in called


def test_the_scenarios_of_a_client_are_counted() -> None:
    said = "lightning a@0 PASS\n46 of 47 passed\n    lightning b@1\n"
    assert support_table.parse_counts(said) == Counts(46, 1, 0)
