"""What every commit message has: a short subject that begins with its area, a blank line, a body
that says why, a sign-off.

A commit-msg hook of pre-commit; git hands it the file with the message.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_SUBJECT = 72
# A folder or a subject, or two: "zero: ...", "comm, verify: ...", "v1/zero: ...".
_AREA = re.compile(r"[a-z0-9_./-]+(, [a-z0-9_./-]+)*: \S")
# What `git commit --verbose` shows below this line is no part of the message.
_SCISSORS = re.compile(r"^# -+ >8 -+$")
_SIGN_OFF = re.compile(r"^Signed-off-by: \S.* <\S+@\S+>$")
_TRAILER = re.compile(r"^[A-Za-z]+(-[A-Za-z]+)+: \S")
# Written by git, and rewritten by it before they stay: `git rebase --autosquash`.
_TEMPORARY = ("fixup! ", "squash! ", "amend! ")


def message_lines(text: str) -> list[str]:
    """The lines of the message that git will keep."""
    kept: list[str] = []
    for line in text.splitlines():
        if _SCISSORS.match(line):
            break
        if not line.startswith("#"):
            kept.append(line.rstrip())
    while kept and not kept[0]:
        kept.pop(0)
    return kept


def problems(text: str) -> Iterator[str]:
    """What is wrong with the message ``text``, each with what to do."""
    lines = message_lines(text)
    if not lines:
        yield "the message is empty: write a subject, a blank line and a body that says why"
        return
    subject = lines[0]
    if subject.startswith(_TEMPORARY):
        return
    if len(subject) > MAX_SUBJECT:
        yield f"the subject has {len(subject)} characters: shorten it to {MAX_SUBJECT}"
    if not _AREA.match(subject):
        yield "the subject names no area: begin it with one, such as 'zero3: ' or 'docs: '"
    if len(lines) > 1 and lines[1]:
        yield f"no blank line follows the subject, but {lines[1]!r}: put one between them"
    if not any(line and not _TRAILER.match(line) for line in lines[1:]):
        yield "there is no body: say why the change is made, after a blank line"
    if not any(_SIGN_OFF.match(line) for line in lines[1:]):
        yield "there is no 'Signed-off-by: NAME <ADDRESS>': commit with git commit -s"


def main(arguments: list[str]) -> int:
    """Check the file that git names; returns 1 if anything is wrong with it."""
    found = list(problems(Path(arguments[0]).read_text(encoding="utf-8")))
    for problem in found:
        print(f"commit message: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
