"""The release script: it dates the changelog, commits and tags, or says why not."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "release.py"
CHANGELOG = (
    "# Changelog\n\n## [1.2.3] - unreleased\n\n### Fixed\n\n- A thing.\n\n## [1.2.2] - 2020-01-01\n"
)


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "version.txt").write_text("1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    for words in (
        ["init", "-q"],
        ["config", "user.name", "A B"],
        ["config", "user.email", "a@b.org"],
        ["add", "."],
        ["commit", "-qm", "all: begin"],
    ):
        assert run("git", *words, folder=tmp_path).returncode == 0
    return tmp_path


def release(checkout: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, str(SCRIPT), "--date", "2020-02-02", folder=checkout)


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
