"""Text to train on, as bytes: the Python standard library's own sources, or any file or folder.

Owns finding, reading and splitting the text, and its windows. Does not own the order of windows or
their distribution over ranks: that is the data loader's.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

# Installed packages and tests lie in the standard library's folder on some systems and not on
# others.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
)
TEXT_SUFFIXES = frozenset(
    {
        ".py",
        ".txt",
        ".md",
        ".rst",
        ".c",
        ".h",
        ".cpp",
        ".js",
        ".ts",
        ".java",
        ".go",
        ".rs",
        ".html",
        ".css",
    }
)
VALIDATION_EVERY = 20


class Windows(Dataset[torch.Tensor]):
    """Consecutive windows of `context + 1` bytes; each window's last byte is the next one's first.

    Args:
        text: Bytes, uint8, of shape [length].
        context: Positions that the model sees.

    Raises:
        ValueError: If the text is shorter than one window.
    """

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text = text
        self.context = context
        self.count = (len(text) - 1) // context
        if self.count < 1:
            raise ValueError(
                f"the text has {len(text)} bytes; one window of context {context} needs "
                f"{context + 1}"
            )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        """Window `index`: int64, of shape [context + 1]."""
        start = index * self.context
        return self.text[start : start + self.context + 1].long()


class Split(NamedTuple):
    """Text to train on and text to validate with; both uint8 of shape [length]."""

    train: torch.Tensor
    validation: torch.Tensor


def load_text(path: str | None) -> Split:
    """Read and split the text. Every process reads the same bytes in the same order.

    Args:
        path: A file, or a folder whose text files are read; None is the Python standard library.

    Raises:
        ValueError: If nothing readable is there.
    """
    root = Path(path) if path is not None else Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        return _split_one(root.read_bytes())
    suffixes = TEXT_SUFFIXES if path is not None else frozenset({".py"})
    files = _text_files(root, suffixes)
    if not files:
        raise ValueError(
            f"--data {root}: no such file, and no folder with text files "
            f"({', '.join(sorted(suffixes))})"
        )
    if len(files) < VALIDATION_EVERY:
        return _split_one(b"\n".join(file.read_bytes() for file in files))
    held_out = files[::VALIDATION_EVERY]
    return Split(
        _read(file for i, file in enumerate(files) if i % VALIDATION_EVERY), _read(held_out)
    )


def _text_files(root: Path, suffixes: frozenset[str]) -> list[Path]:
    """Sorted, because every process must see one order, and the same one when it resumes."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # In place: what is dropped here isn't entered, and installed packages can be a hundred
        # times the library.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found.extend(Path(folder, name) for name in names if Path(name).suffix in suffixes)
    return sorted(found)


def _read(files: Iterable[Path]) -> torch.Tensor:
    return _as_tensor(b"\n".join(file.read_bytes() for file in files))


def _split_one(text: bytes) -> Split:
    """The end of a single text is for validation."""
    border = len(text) - len(text) // VALIDATION_EVERY
    if border == len(text):
        raise ValueError(f"the text has {len(text)} bytes, too few to hold some out for validation")
    return Split(_as_tensor(text[:border]), _as_tensor(text[border:]))


def _as_tensor(text: bytes) -> torch.Tensor:
    # bytearray: torch wants memory that it may write to.
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
