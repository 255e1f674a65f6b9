"""Files in torch's format, which hold data and nothing else.

Writing returns when a file is on disk, with its checksum. Reading unpickles an explicit list of
classes only, whoever reads: an engine, or a tool without one. Where files lie, and what to say when
one is bad, is `files`'.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import threading
import zipfile
from collections.abc import Iterator
from typing import IO, Any, cast

import torch
from torch.utils._pytree import tree_map_only

from deepspeed.checkpoint.checksum import FileRecord
from deepspeed.checkpoint.constants import PICKLED_CLASSES
from deepspeed.checkpoint.file_writer import DEFAULT_OPTIONS, FileWriter, WriteOptions
from deepspeed.checkpoint.utils import separate


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


def safe_classes() -> list[Any]:
    """Classes that checkpoint files may contain beside tensors and plain containers.

    Files name a class by its path, and so does the list of those that are known: they are the
    runtime's, which stands above this package and need not be loaded to write or to look at a
    folder. Only the list is imported from, never what a file names.
    """
    paths = (path.rsplit(".", 1) for path in PICKLED_CLASSES)
    return [getattr(importlib.import_module(module), name) for module, name in paths]


def load_data(source: Any, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """What `torch.save` was given.

    Args:
        source: Path, or a buffer.
        map_location: Where tensors go.
        mmap: Read a tensor's elements when they are used, where the format allows it.

    Raises:
        Exception: Of many kinds, if it is damaged or holds objects of other classes.
    """
    # Torch's older format has no place of its own for a tensor.
    mapped = mmap and zipfile.is_zipfile(source)
    with torch.serialization.safe_globals(safe_classes()):
        return torch.load(source, map_location=map_location, weights_only=True, mmap=mapped)


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
        load_data(buffer)
    except Exception as error:  # pickle and torch raise many kinds
        raise ValueError(
            f"{what} cannot be loaded back: {reason_of(error)}. Use tensors, numbers, strings "
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


def reason_of(error: Exception) -> str:
    """In one line, what torch says of a file that it cannot load."""
    lines = str(error).strip().splitlines()
    # What torch says first is advice; which object it is about stands behind the label.
    told = [line.strip() for line in lines if "WeightsUnpickler error" in line]
    return (told or lines or [type(error).__name__])[0]
