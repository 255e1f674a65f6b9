"""Release the version in `version.txt`: date its section of the changelog, commit, and make the
annotated tag `vVERSION` with that section as its text.

    python scripts/release.py [--date YYYY-MM-DD]

Nothing is pushed. Run it on a clean `main` whose `.ci/run` has passed.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path


def git(*words: str, text: str | None = None) -> str:
    """What `git` prints, in the current folder; its own error ends the program."""
    done = subprocess.run(
        ["git", *words], input=text, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"release: git {words[0]} failed; nothing was tagged")
    return done.stdout.strip()


def dated(changelog: str, version: str, date: str) -> tuple[str, str]:
    """The changelog with the version's section dated, and that section.

    Raises:
        ValueError: The first section is not this version's, or it is dated already.
    """
    heading = f"## [{version}] - unreleased"
    sections = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)
    if len(sections) < 2 or sections[1].splitlines()[0] != heading:
        raise ValueError(
            f"CHANGELOG.md: the first section is not {heading!r}: raise version.txt, or open a "
            "section for it"
        )
    section = sections[1].replace("unreleased", date, 1)
    return changelog.replace(sections[1], section, 1), section.strip()


def main(arguments: list[str]) -> int:
    """Release from the repository in the current folder; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    parser.add_argument("--date", default=today, help="of the release (default: today, UTC)")
    date = parser.parse_args(arguments).date
    version = Path("version.txt").read_text(encoding="ascii").strip()
    tag, changelog = f"v{version}", Path("CHANGELOG.md")
    if git("status", "--porcelain"):
        sys.exit("release: there are uncommitted changes: commit them first")
    if git("tag", "--list", tag):
        sys.exit(f"release: the tag {tag} is there already: raise version.txt")
    try:
        text, section = dated(changelog.read_text(encoding="utf-8"), version, date)
    except ValueError as error:
        sys.exit(f"release: {error}")
    changelog.write_text(text, encoding="utf-8")
    why = f"The changelog gives version {version} its date; the tag {tag} stands on this commit."
    git("commit", "-qsam", f"release: {version}", "-m", why)
    # Lines of the section that begin with # are headings, no remarks of git's.
    git("tag", "-a", tag, "--cleanup=verbatim", "-F", "-", text=f"{version}\n\n{section}\n")
    print(f"tagged {tag}; to publish it: git push origin main {tag}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
