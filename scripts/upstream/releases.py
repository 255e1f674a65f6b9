"""Gets an upstream source tree into a git repository, makes one commit per fix there, and leaves
them as branches in the checkout that the tree comes from.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import fix
from fix import Fix, Outcome

BASE, ALL = "base", "all-fixes"
NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", "*.egg-info", ".venv*", "build")


class NoSource(Exception):
    """The source cannot be had, or cannot take what it is to get."""


def git(*words: str) -> str:
    """What git prints.

    Raises:
        RuntimeError: git failed; the text is what it said.
    """
    done = subprocess.run(["git", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def content(root: Path, branch: str) -> str:
    """What the commit of a branch is but for its author and its dates."""
    return git("-C", str(root), "log", "-1", "--format=%P%n%T%n%B", f"refs/heads/{branch}")


def version_of(source: Path) -> str:
    """The version of an upstream source tree.

    Raises:
        NoSource: It is none.
    """
    try:
        version = (source / "version.txt").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        version = ""
    if not version or not (source / "deepspeed" / "__init__.py").is_file():
        raise NoSource(
            f"{source} is no source tree of DeepSpeed: version.txt or deepspeed/ is missing"
        )
    return version


def held(folder: Path) -> TextIO:
    """Keep other commands off ``folder`` until the process ends.

    Raises:
        NoSource: One is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w", encoding="ascii")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise NoSource(f"another command is at work in {folder}") from None
    return lock


class Checkout:
    """A git checkout of upstream's. Nothing in it changes but the branches that it is given.

    Args:
        root: Its folder.
        head: The commit that is checked out.
    """

    def __init__(self, root: Path, head: str) -> None:
        self.root = root
        self.head = head

    @classmethod
    def at(cls, root: Path) -> Checkout | None:
        """The checkout whose folder is ``root``; None for a folder that is not under git, or in which
        nothing is committed.

        Raises:
            NoSource: git refuses to look at it.
        """
        if not (root / ".git").exists():
            return None
        try:
            git("-C", str(root), "rev-parse", "--git-dir")
        except RuntimeError as error:
            raise NoSource(str(error)) from None
        try:
            return cls(
                root, git("-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
            )
        except RuntimeError:
            return None

    def uncommitted(self) -> list[str]:
        """The files that are changed or not under git: they are in nothing that is made."""
        # Without locks, so that not even the index is written anew.
        status = git("--no-optional-locks", "-C", str(self.root), "status", "--porcelain")
        return [line.split(maxsplit=1)[1] for line in status.splitlines()]

    def lacking(self, repository: Repository, names: Sequence[str]) -> list[str]:
        """Which of the branches of ``repository`` it has not got.

        Raises:
            NoSource: It has a branch of such a name that is something else.
        """
        there = git("-C", str(self.root), "for-each-ref", "--format=%(refname:short)", "refs/heads")
        known = set(names) & set(there.splitlines())
        others = [
            n for n in names if n in known and content(self.root, n) != content(repository.root, n)
        ]
        if others:
            raise NoSource(
                f"{self.root} has branches of these names that are something else: "
                f"{', '.join(others)}; rename or delete them (git branch -m, git branch -D) and run "
                "the command again"
            )
        return [name for name in names if name not in known]

    def leave(self, repository: Repository, names: Sequence[str]) -> None:
        """Make these branches of ``repository`` branches of this checkout."""
        if names:
            command = ["-c", "core.hooksPath=/dev/null", "-c", "fetch.writeCommitGraph=false"]
            command += ["-C", str(self.root), "fetch", "--quiet", "--no-tags", "--no-prune"]
            command += ["--no-write-fetch-head", "--no-auto-maintenance", str(repository.root)]
            git(*command, *(f"refs/heads/{name}:refs/heads/{name}" for name in names))


def download(version: str, folder: Path) -> Path:
    """Get the source distribution of ``version`` from the package index and unpack it.

    Raises:
        NoSource: pip has not got it; the text is what pip said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    archives = list(folder.glob(f"deepspeed-{version}.tar.gz"))
    if not archives:
        # pip asks the distribution for its metadata: setup.py imports torch and must build nothing.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-build-isolation", "--no-binary", ":all:", "--dest", str(folder)]
        done = subprocess.run(
            [*command, f"deepspeed=={version}"],
            env={**os.environ, "DS_BUILD_OPS": "0"},
            capture_output=True,
            text=True,
        )
        archives = list(folder.glob(f"deepspeed-{version}.tar.gz"))
        if done.returncode or not archives:
            raise NoSource(f"deepspeed {version}: {done.stderr.strip()[-500:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"deepspeed-{version}"


class Repository:
    """An upstream tree under git.

    Args:
        root: Its folder.
        signer: (name, address) of who signs the commits off.
    """

    def __init__(self, root: Path, signer: tuple[str, str]) -> None:
        self.root = root
        name, address = signer
        self._git = ["-C", str(root), "-c", f"user.name={name}", "-c"]
        self._git += [f"user.email={address}", "-c", "core.hooksPath=/dev/null"]
        self._git += ["-c", "commit.gpgsign=false"]

    def git(self, *words: str) -> str:
        """What git prints.

        Raises:
            RuntimeError: git failed; the text is what it said.
        """
        return git(*self._git, *words)

    def begin(self, source: Path | Checkout, title: str) -> None:
        """Take ``source`` as the commit that all branches start at: what is checked out, or for a
        folder that is not under git its files. What was in the folder is removed.
        """
        shutil.rmtree(self.root, ignore_errors=True)
        if isinstance(source, Checkout):
            self.root.parent.mkdir(parents=True, exist_ok=True)
            # Objects are read where they are.
            clone = ("clone", "--quiet", "--shared", "--no-checkout", "--no-tags")
            git(*clone, str(source.root), str(self.root))
            self.git("checkout", "--quiet", "-B", BASE, source.head)
        else:
            shutil.copytree(source, self.root, symlinks=True, ignore=NOT_COPIED)
            self.git("init", "--quiet", f"--initial-branch={BASE}")
        (self.root / ".git" / "info" / "exclude").write_text("__pycache__/\n", encoding="ascii")
        if not isinstance(source, Checkout):
            self.git("add", "--all", "--force")
            self.git("commit", "--quiet", "--message", title)

    def commit(self, one: Fix, start: str) -> Outcome:
        """Apply a fix on a branch of its own, which starts at ``start``."""
        self.git("checkout", "--quiet", "-B", one.name, start)
        outcome = fix.apply(one, self.root)
        if outcome.what == fix.APPLIED:
            self.git("add", "--force", "--", *outcome.files, one.test_path)
            self.git("commit", "--quiet", "--signoff", "--message", one.message())
        return outcome

    def patches(self, names: Sequence[str], folder: Path) -> list[Path]:
        """Write the commit of each branch as a file that `git am` takes."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        written = []
        for number, name in enumerate(names, start=1):
            text = self.git("format-patch", "--stdout", f"{BASE}..{name}")
            path = folder / f"{number:04}-{name}.patch"
            path.write_text(text + "\n", encoding="utf-8")
            written.append(path)
        return written

    def tree(self, branch: str) -> str:
        """The hash of a branch's files; commits made anew from the same files have the same."""
        return self.git("rev-parse", f"{branch}^{{tree}}")

    def copy_at(self, branch: str, folder: Path) -> None:
        """Copy the tree, with what Python compiled and without what nothing runs, and check out
        ``branch`` in the copy.
        """

        def pages(parent: str, names: list[str]) -> set[str]:
            return {"blogs", "docs"} & set(names) if Path(parent) == self.root else set()

        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.root, folder, symlinks=True, ignore=pages)
        self.git("-C", str(folder), "checkout", "--quiet", branch)

    def apply_in_order(self, branch: str, patches: Sequence[Path]) -> str:
        """Apply patches to the first commit, without merging; returns the tree's hash."""
        self.git("checkout", "--quiet", "-B", branch, BASE)
        for patch in patches:
            self.git("am", "--quiet", "--no-3way", str(patch))
        return self.tree("HEAD")


def orders(patches: Sequence[Path]) -> list[list[Path]]:
    """The order of the files, its reverse, and both turned by half. In the first two each patch comes
    before and after each other one, so that one that does not apply beside another is found.
    """
    forward = list(patches)
    half = len(forward) // 2
    turned = forward[half:] + forward[:half]
    return [forward, forward[::-1], turned, turned[::-1]]
