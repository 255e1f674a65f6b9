"""The scripts of a release and of the commit-msg hook: what they do, what they refuse."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_commit_message.py"
problems = runpy.run_path(str(SCRIPT))["problems"]

SIGN_OFF = "Signed-off-by: A B <a@b.org>"
GOOD = f"docs: say what changes\n\nAnd why it does.\n\n{SIGN_OFF}\n"


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        GOOD.replace("docs", "v1/zero, bf16_optimizer"),
        f"zero3: {'x' * 65}\n\nWhy.\n\nReviewed-by: C <c@d.org>\n{SIGN_OFF}\n",
        f"\n# a remark of git's\n{GOOD}# Please enter the message\n",
        f"{GOOD}# ------------------------ >8 ------------------------\ndiff --git a b\n",
        "fixup! docs: say what changes\n",
    ],
)
def test_a_good_message_passes(text: str) -> None:
    assert list(problems(text)) == []


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "the message is empty"),
        ("# only a remark\n", "the message is empty"),
        (GOOD.replace("say", "x" * 60 + " say"), "the subject has 83 characters"),
        (GOOD.replace("docs: ", ""), "the subject names no area"),
        (GOOD.replace("docs: ", "Docs: "), "the subject names no area"),
        (GOOD.replace("docs: ", "docs:"), "the subject names no area"),
        (GOOD.replace("\n\nAnd", "\nAnd"), "no blank line follows the subject"),
        (f"docs: say what changes\n\n{SIGN_OFF}\n", "there is no body"),
        (f"docs: say what changes\n\n# Why.\n\n{SIGN_OFF}\n", "there is no body"),
        (GOOD.replace(SIGN_OFF, ""), "there is no 'Signed-off-by"),
        (GOOD.replace("<a@b.org>", ""), "there is no 'Signed-off-by"),
        (GOOD.replace(SIGN_OFF, f"# {SIGN_OFF}"), "there is no 'Signed-off-by"),
        (f"{GOOD.replace(SIGN_OFF, '')}# --- >8 ---\n{SIGN_OFF}\n", "there is no 'Signed-off-by"),
    ],
)
def test_a_bad_message_is_refused_with_the_reason(text: str, problem: str) -> None:
    (found,) = problems(text)
    assert found.startswith(problem)


def test_pre_commit_runs_it_on_messages_and_nothing_else() -> None:
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert settings["default_install_hook_types"] == ["pre-commit", "commit-msg"]
    assert settings["default_stages"] == ["pre-commit"]
    hooks = [hook for repository in settings["repos"] for hook in repository["hooks"]]
    (hook,) = (hook for hook in hooks if "commit-msg" in hook.get("stages", ()))
    assert hook["entry"] == f"python {SCRIPT.relative_to(ROOT)}"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_refuses_to_commit_with_a_bad_message(tmp_path: Path) -> None:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return run(
            "git", "-c", "user.name=A B", "-c", "user.email=a@b.org", *words, folder=tmp_path
        )

    git("init", "-q")
    hook = tmp_path / ".git" / "hooks" / "commit-msg"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SCRIPT}" "$1"\n')
    hook.chmod(0o755)
    refused = git("commit", "-q", "--allow-empty", "-m", "docs: say what changes")
    assert refused.returncode != 0 and "there is no body" in refused.stderr
    words = ("docs: say what changes", "-m", "And why.")
    done = git("commit", "-q", "-s", "--allow-empty", "-m", *words)
    assert done.returncode == 0, done.stderr


RELEASE = ROOT / "scripts" / "release.py"
CHANGELOG = (
    "# Changelog\n\n## [1.2.3] - unreleased\n\n### Fixed\n\n- A thing.\n\n## [1.2.2] - 2020-01-01\n"
)


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "version.txt").write_text("1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    who = [["config", "user.name", "A B"], ["config", "user.email", "a@b.org"]]
    for words in (["init", "-q"], *who, ["add", "."], ["commit", "-qm", "all: begin"]):
        assert run("git", *words, folder=tmp_path).returncode == 0
    return tmp_path


def release(checkout: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, str(RELEASE), "--date", "2020-02-02", folder=checkout)


def test_a_release_is_dated_committed_and_tagged(checkout: Path) -> None:
    done = release(checkout)
    assert done.returncode == 0 and "tagged v1.2.3" in done.stdout, done.stderr
    assert "## [1.2.3] - 2020-02-02\n" in (checkout / "CHANGELOG.md").read_text()
    assert run("git", "status", "--porcelain", folder=checkout).stdout == ""
    assert run("git", "cat-file", "-t", "v1.2.3", folder=checkout).stdout == "tag\n"
    told = run("git", "tag", "-l", "--format=%(contents)", "v1.2.3", folder=checkout).stdout
    assert "### Fixed\n\n- A thing." in told and "1.2.2" not in told
    again = release(checkout)
    assert again.returncode != 0 and "the tag v1.2.3 is there already" in again.stderr


@pytest.mark.parametrize(
    "file, text, problem",
    [
        ("version.txt", "1.2.3\n\n", "uncommitted changes"),
        ("version.txt", "1.2.4\n", "the first section is not '## [1.2.4] - unreleased'"),
    ],
)
def test_nothing_is_tagged_that_is_not_ready(
    checkout: Path, file: str, text: str, problem: str
) -> None:
    (checkout / file).write_text(text)
    if "section" in problem:
        run("git", "commit", "-qam", "all: change", folder=checkout)
    done = release(checkout)
    assert done.returncode != 0 and problem in done.stderr
    assert run("git", "tag", folder=checkout).stdout == ""
    assert run("git", "status", "--porcelain", folder=checkout).stdout.count("CHANGELOG") == 0
