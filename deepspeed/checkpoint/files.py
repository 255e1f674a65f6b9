"""Writing and reading checkpoint files so that a crash or a bad file never costs a good checkpoint.

A checkpoint is written into a folder with a temporary name, every file flushed to disk, then
renamed; the `latest` file changes last and in one rename. Reading unpickles an explicit list of
classes only, and names the file when it can't.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import IO, Any, cast

import torch
from torch.utils._pytree import tree_map_only

from deepspeed import comm as dist
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.checksum import FileRecord
from deepspeed.checkpoint.constants import LATEST
from deepspeed.checkpoint.file_writer import DEFAULT_OPTIONS, FileWriter, WriteOptions
from deepspeed.checkpoint.utils import separate

# Key of files whose tensors are elsewhere; see `dcp_files`.
DCP_FOLDER = "torch.distributed.checkpoint folder"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file and what to do."""


def safe_classes() -> list[Any]:
    """Classes that checkpoint files may contain beside tensors and plain containers."""
    # cycle: it reads files through this module
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape
    from deepspeed.runtime.fp16.loss_scaler import (  # cycle: the runtime saves through this module
        DynamicLossScaler,
        LossScaler,
    )
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [
        fragment_address,
        LossScaler,
        DynamicLossScaler,
        ZeroStageEnum,
        argparse.Namespace,
        SubparamShape,
    ]


def write_file(path: str, content: Any, options: WriteOptions = DEFAULT_OPTIONS) -> FileRecord:
    """Save `content` and return once it is on disk. Tensors are saved each on its own, never the
    buffer that they are views of.

    Raises:
        OSError: It cannot be written.
    """
    with (
        FileWriter(path, options) as file,
        contextlib.nullcontext() if options.crc32 else _without_crc32(),
    ):
        torch.save(
            separate(content),
            cast(IO[bytes], file),
            _use_new_zipfile_serialization=options.zip_format,
        )
        return file.finish()


_crc32_lock = threading.Lock()
_without_crc32_depth = 0


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """Let torch leave its sums out. The switch is the process's, and two threads may be writing."""
    global _without_crc32_depth
    with _crc32_lock:
        if _without_crc32_depth == 0 and not torch.serialization.get_crc32_options():
            _without_crc32_depth = 1  # the client has switched them off; leave it so
        _without_crc32_depth += 1
        torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        with _crc32_lock:
            _without_crc32_depth -= 1
            if _without_crc32_depth == 0:
                torch.serialization.set_crc32_options(True)


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
        with torch.serialization.safe_globals(safe_classes()):
            # Torch's older format has no place of its own for a tensor.
            mapped = mmap and zipfile.is_zipfile(path)
            content = torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
        if isinstance(content, dict) and DCP_FOLDER in content:
            # optional: rarely there, and it loads much of torch
            from deepspeed.checkpoint.dcp_files import read_dcp

            content = read_dcp(path, content)
        return content
    except Exception as error:  # torch raises many kinds for a damaged file
        size = os.path.getsize(path)
        raise CheckpointError(
            f"{path} ({size} bytes) cannot be read: {_first_line(error)}. It is truncated, "
            "damaged, or holds objects that are not data; load another tag, or restore the file"
        ) from error


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


def check_loadable(content: Any, what: str) -> None:
    """Raise now what `read_file` would raise when the file is needed; tensors are left out.

    Raises:
        ValueError: If `content` holds objects that are not data.
    """
    buffer = io.BytesIO()
    try:
        if _is_data(content):
            return
        torch.save(tree_map_only(torch.Tensor, lambda tensor: torch.empty(0), content), buffer)
        buffer.seek(0)
        with torch.serialization.safe_globals(safe_classes()):
            torch.load(buffer, weights_only=True)
    except Exception as error:  # pickle and torch raise many kinds
        raise ValueError(
            f"{what} cannot be loaded back: {_first_line(error)}. Use tensors, numbers, strings "
            "and containers of them, or allow the class by "
            "torch.serialization.add_safe_globals([...]), before saving and before loading"
        ) from error


def _is_data(content: Any) -> bool:
    """Whether it can be loaded, by a look that costs less than trying; False: not known."""
    if type(content) is dict:
        return all(map(_is_data, content)) and all(map(_is_data, content.values()))
    if type(content) in (list, tuple):
        return all(map(_is_data, content))
    return content is None or type(content) in (int, float, bool, str, torch.Tensor)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    # What torch says first is advice; which object it is about stands behind the label.
    told = [line.strip() for line in lines if "WeightsUnpickler error" in line]
    return (told or lines or [type(error).__name__])[0]


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
    try:
        result = action()
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    failed = torch.tensor([int(error is not None)], dtype=torch.int32, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if not failed.item():
        return result
    reasons: list[Any] = [None] * dist.get_world_size()
    own = None if error is None else f"{type(error).__name__}: {error}"
    if dist.get_world_size() > 1:
        dist.all_gather_object(reasons, own)
    else:
        reasons = [own]
    told = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
    raise CheckpointError(f"{what} failed. {told}") from error
