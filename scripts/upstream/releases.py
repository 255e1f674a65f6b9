"""Gets an upstream source tree into a git repository, and makes one commit per fix there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import fix
from fix import Fix, Outcome

BASE, ALL = "base", "all-fixes"
NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", "*.egg-info", ".venv*", "build")


class NoSource(Exception):
    """The source of the release cannot be had."""


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
        self._git = ["git", "-C", str(root), "-c", f"user.name={name}", "-c"]
        self._git += [f"user.email={address}", "-c", "core.hooksPath=/dev/null"]
        self._git += ["-c", "commit.gpgsign=false"]

    def git(self, *words: str) -> str:
        """What git prints.

        Raises:
            RuntimeError: git failed; the text is what it said.
        """
        done = subprocess.run([*self._git, *words], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"git {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def begin(self, source: Path, title: str) -> None:
        """Take ``source`` as the first commit; what was in the folder is removed."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(source, self.root, symlinks=True, ignore=NOT_COPIED)
        self.git("init", "--quiet", f"--initial-branch={BASE}")
        (self.root / ".git" / "info" / "exclude").write_text("__pycache__/\n", encoding="ascii")
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--message", title)

    def commit(self, one: Fix, start: str) -> Outcome:
        """Apply a fix on a branch of its own, which starts at ``start``."""
        self.git("checkout", "--quiet", "-B", one.name, start)
        outcome = fix.apply(one, self.root)
        if outcome.what == fix.APPLIED:
            self.git("add", "--", *outcome.files, one.test_path)
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
        """Copy the tree, with what Python compiled, and check out ``branch`` in the copy."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.root, folder, symlinks=True)
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
