"""Reading checkpoint files, and publishing folders so that no crash or bad file costs a checkpoint.

Reading unpickles an explicit list of classes only. Stands in `zero_to_fp32.py` beside every
checkpoint too, so it needs torch alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.constants import DCP_FOLDER, LATEST, PICKLED_CLASSES


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file and what to do."""


class CheckpointTagError(CheckpointError, AssertionError):
    """Ranks save under several tags and `checkpoint.tag_validation` is "Fail"; upstream asserts."""


_load: ContextVar[Callable[[str, Any], Any] | None] = ContextVar("load", default=None)


@contextlib.contextmanager
def read_by(load: Callable[[str, Any], Any] | None) -> Iterator[None]:
    """Let `read_file` use `load(path, map_location)` of a client's engine here; None: no longer."""
    before = _load.set(load)
    try:
        yield
    finally:
        _load.reset(before)


def read_file(path: str, map_location: object = "cpu", mmap: bool = False) -> Any:
    """Load a file written by `torch.save`.

    Args:
        path: The file.
        map_location: Where its tensors go.
        mmap: Read a tensor's elements when they are used; for readers that need few of them.

    Raises:
        CheckpointError: If it is missing, damaged, or contains classes that are not on the list.
    """
    if not os.path.isfile(path):
        folder = os.path.dirname(path)
        present = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        raise CheckpointError(
            f"{path} does not exist; the folder holds {', '.join(present) or 'nothing'}"
        )
    try:
        load = _load.get()
        if load is not None:
            with read_by(None):  # it may call this function
                return load(path, map_location)
        content = load_data(path, map_location, mmap)
        if isinstance(content, dict) and DCP_FOLDER in content:
            # optional: rarely there, and it loads much of torch
            from deepspeed.checkpoint.dcp_files import read_dcp

            content = read_dcp(path, content)
        return content
    except CheckpointError:
        raise
    except Exception as error:  # torch raises many kinds for a damaged file
        size = os.path.getsize(path)
        raise CheckpointError(
            f"{path} ({size} bytes) cannot be read: {reason_of(error)}. It is truncated, "
            "damaged, or holds objects that are not data; load another tag, or restore the file"
        ) from error


class _StandIn: ...


class _NumberStandIn(int): ...


def safe_classes() -> list[Any]:
    """Classes that checkpoint files may contain beside tensors and plain containers.

    They are the runtime's, which stands above this package: only this list is imported from, never
    what a file names. A program that stands alone has stand-ins for them.
    """
    if not __name__.startswith("deepspeed."):
        own = [path for path in PICKLED_CLASSES if path.startswith("deepspeed.")]
        return [
            argparse.Namespace,
            *((_NumberStandIn if path.endswith("Enum") else _StandIn, path) for path in own),
        ]
    paths = (path.rsplit(".", 1) for path in PICKLED_CLASSES)
    return [getattr(importlib.import_module(module), name) for module, name in paths]


def load_data(source: Any, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """What `torch.save` was given; raises errors of many kinds if it is damaged."""
    # Torch's older format has no place of its own for a tensor.
    mapped = mmap and zipfile.is_zipfile(source)
    with torch.serialization.safe_globals(safe_classes()):
        return torch.load(source, map_location=map_location, weights_only=True, mmap=mapped)


def reason_of(error: Exception) -> str:
    """Return in one line what torch says of a file that it cannot load."""
    lines = str(error).strip().splitlines()
    # What torch says first is advice; which object it is about stands behind the label.
    told = [line.strip() for line in lines if "WeightsUnpickler error" in line]
    return (told or lines or [type(error).__name__])[0]


def lead_model_file(folder: str, part: int = 0) -> str:
    """Path of the model file that says what all ranks with a part of the model have in common."""
    path = os.path.join(folder, file_names.model_file(part))
    first = os.path.join(folder, file_names.stage3_model_file(0, part))
    return first if os.path.isfile(first) and not os.path.isfile(path) else path


def has_weights_in_shards(folder: str) -> bool:
    """Whether a checkpoint was saved at ZeRO stage 3, where model files have no weights."""
    return file_names.is_stage3_model_file(os.path.basename(lead_model_file(folder)))


def sync_folder(path: str) -> None:
    """Flush a folder's entries (renames) to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(temporary: str, final: str) -> None:
    """Rename `temporary` to `final`; an older folder of that name is put aside, then removed."""
    aside = _aside(final)
    if os.path.isdir(final):
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
    os.rename(temporary, final)
    sync_folder(os.path.dirname(final))
    shutil.rmtree(aside, ignore_errors=True)


def recover_folder(final: str) -> None:
    """Put the older folder back, if `replace_folder` was killed between its two renames."""
    aside = _aside(final)
    if not os.path.isdir(final) and os.path.isdir(aside):
        os.rename(aside, final)


def _aside(final: str) -> str:
    return os.path.join(os.path.dirname(final), file_names.replaced(os.path.basename(final)))


def read_latest(load_dir: str, name: str = LATEST) -> str | None:
    """The tag that the file `name` names; None if there is no such file."""
    path = os.path.join(load_dir, name)
    if not os.path.isfile(path):
        return None
    with open(path) as file:
        return file.read().strip()
