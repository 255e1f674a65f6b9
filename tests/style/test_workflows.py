"""What workflows, CI and the documentation tell to run is there: make targets, demos, campaigns."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from campaigns.__main__ import CAMPAIGNS

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
NAMES = {campaign.name for campaign in CAMPAIGNS}


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
        yield from job["steps"]


def make_calls(text: str) -> Iterator[list[str]]:
    """The words after each `make` of shell commands."""
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] == "make":
            yield words[1:]


def mentions(path: Path) -> Iterator[list[str]]:
    """The words after `make` that a page or script tells to run, in backquotes or alone."""
    text = path.read_text(encoding="utf-8")
    for found in re.findall(r"`make ([^`\n]+)`", text):
        yield found.split()
    yield from make_calls("\n".join(re.findall(r"^make [a-z].*", text, re.MULTILINE)))


def what_is_missing(words: list[str]) -> str:
    """What of a make call does not exist; "" if all does."""
    for word in words:
        if "=" not in word and word not in TARGETS:
            return f"target {word}"
    named = [word.removeprefix("NAME=") for word in words if word.startswith("NAME=")]
    for name in named:
        if name in ("...", "X") or name.startswith("$"):
            continue
        if "campaign" in words and name not in NAMES:
            return f"campaign {name}"
        if "demo" in words and not (ROOT / "examples" / f"{name}_gpt.py").is_file():
            return f"demo {name}"
    return ""


def test_the_check_finds_what_is_missing() -> None:
    assert {"demo", "test", "check", "wheel", "campaign"} <= TARGETS and "versions" in NAMES
    assert what_is_missing(["test", "PYTEST_ARGS=-m gpu"]) == ""
    assert what_is_missing(["tests"]) == "target tests"
    assert what_is_missing(["campaign", "NAME=zombie"]) == "campaign zombie"
    assert what_is_missing(["demo", "NAME=mow"]) == "demo mow"
    assert list(make_calls('make test PYTEST_ARGS="-m gpu"  # gpu\nls\n')) == [
        ["test", "PYTEST_ARGS=-m gpu"]
    ]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(workflow: Path) -> None:
    calls = [words for step in steps(workflow) for words in make_calls(step.get("run", ""))]
    assert calls, "a workflow that calls no make target checks what nobody can run elsewhere"
    assert [what_is_missing(words) for words in calls if what_is_missing(words)] == []


def test_workflows_cover_what_every_change_passes() -> None:
    runs = [step.get("run", "") for workflow in WORKFLOWS for step in steps(workflow)]
    called = {words[0] for text in runs for words in make_calls(text)}
    assert called == {"check", "test", "wheel"}
    # YAML 1.1 reads the key `on` as true.
    checks = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())
    assert set(checks[True]) == {"push", "pull_request"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_only_read(workflow: Path) -> None:
    settings = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert settings["permissions"] == {"contents": "read"}
    assert not [name for name, job in settings["jobs"].items() if "permissions" in job]


def test_pages_and_scripts_tell_to_run_what_exists() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")]
    pages.append(ROOT / ".ci" / "run")
    told = [(page, what_is_missing(words)) for page in pages for words in mentions(page)]
    assert [f"{page.relative_to(ROOT)}: {missing}" for page, missing in told if missing] == []


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda p: p.name
)
def test_issue_forms_have_what_is_required_of_them(form: Path) -> None:
    settings = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert settings["name"] and settings["description"]
    identifiers = [item["id"] for item in settings["body"] if item["type"] != "markdown"]
    assert identifiers and len(set(identifiers)) == len(identifiers)
