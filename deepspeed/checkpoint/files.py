"""Reading and publishing checkpoint files so that a crash or a bad file never costs a good
checkpoint.

A checkpoint is written into a folder with a temporary name, every file flushed to disk, then
renamed; the `latest` file changes last and in one rename. Who reads a file need not know who wrote
it: `torch_files` and `dcp_files` have the two formats.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.constants import DCP_FOLDER, LATEST
from deepspeed.checkpoint.torch_files import load_data, reason_of
from deepspeed.comm import lone_waits


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file and what to do."""


class CheckpointTagError(CheckpointError, AssertionError):
    """Ranks save under different tags, and `checkpoint.tag_validation` is "Fail". Upstream asserts
    there, and scripts written for it catch that.
    """


_load: ContextVar[Callable[[str, Any], Any] | None] = ContextVar("load", default=None)


@contextlib.contextmanager
def read_by(load: Callable[[str, Any], Any] | None) -> Iterator[None]:
    """Let `read_file` use `load(path, map_location)` in this block, of a client's checkpoint
    engine; None: no longer.
    """
    before = _load.set(load)
    try:
        yield
    finally:
        _load.reset(before)


def read_file(path: str, map_location: Any = "cpu", mmap: bool = False) -> Any:
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
    except Exception as error:  # torch raises many kinds for a damaged file
        size = os.path.getsize(path)
        raise CheckpointError(
            f"{path} ({size} bytes) cannot be read: {reason_of(error)}. It is truncated, "
            "damaged, or holds objects that are not data; load another tag, or restore the file"
        ) from error


def lead_model_file(folder: str, part: int = 0) -> str:
    """Path of the model file that says what all ranks with a part of the model have in common: the
    only one, or at ZeRO stage 3, where each rank has one, the first.
    """
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
    """Rename `temporary` to `final`; an older folder of that name is put aside first and removed
    after.
    """
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


def write_latest(save_dir: str, tag: str, name: str = LATEST) -> None:
    """Let the file `name` name `tag`, in one rename."""
    temporary = os.path.join(save_dir, file_names.saving(name))
    with open(temporary, "w") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, os.path.join(save_dir, name))
    sync_folder(save_dir)


def read_latest(load_dir: str, name: str = LATEST) -> str | None:
    """The tag that the file `name` names; None if there is no such file."""
    path = os.path.join(load_dir, name)
    if not os.path.isfile(path):
        return None
    with open(path) as file:
        return file.read().strip()


def together(action: Callable[[], Any], device: torch.device, what: str) -> Any:
    """Run `action` on every rank; if it fails on one, raise on all, naming the ranks and their
    reasons.

    Raises:
        CheckpointError: On every rank, if any failed.
    """
    result, error = None, None
    is_alone = dist.get_world_size() == 1
    meeting = 0 if is_alone else lone_waits.watch.coming()
    try:
        result = action()
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    failed = torch.tensor([int(error is not None)], dtype=torch.int32, device=device)
    if not is_alone:
        with lone_waits.watch.waiting(lambda: what, meeting):
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if not failed.item():
        return result
    reasons: list[Any] = [None] * dist.get_world_size()
    own = None if error is None else f"{type(error).__name__}: {error}"
    if is_alone:
        reasons = [own]
    else:
        dist.all_gather_object(reasons, own)
    told = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
    raise CheckpointError(f"{what} failed. {told}") from error
