"""One checkpoint being written: its folder, from a temporary name to a published one. Knows no
engine and does not communicate.

[Note: sequence of a save]
Publisher: the first rank of those that share the folder. `D` holds all checkpoints, `T` is the tag.

1. The publisher removes `D/.T.saving` of an earlier save and makes it anew. All wait.
2. Each rank writes its files into it, each flushed to disk, then what it knows of them as
   `.manifest_part_R.json`, not flushed. All wait: when one rank could not write, the publisher
   removes the folder and every rank raises.
3. The publisher makes `manifest.json` of the parts, flushes it and the folder, and writes
   `D/zero_to_fp32.py`.
4. The publisher renames: an existing `D/T` to `D/.T.replaced`, then `D/.T.saving` to `D/T`; flushes
   `D`; removes `D/.T.replaced`.
5. The publisher writes `D/.latest.saving`, flushes it, renames it to `D/latest`, flushes `D`.
6. With `keep_last`, the publisher renames the oldest to `D/.OLD.removed` and removes them.

So `D/T` is whole whenever it is there, and `latest` names a whole one. After a kill between the two
renames of 4 the older `T` is in `D/.T.replaced`; loading puts it back.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed import _lazy
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.file_writer import FileRecord, write_bytes
from deepspeed.checkpoint.files import CheckpointError, replace_folder
from deepspeed.checkpoint.manifest import merge_parts, remove_oldest, write_latest, write_part
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from deepspeed.runtime.checkpointing.folders import Put, StorageNode
from deepspeed.utils import zero_to_fp32
from deepspeed.utils.logging import log_once, logger


@dataclass(frozen=True)
class SaveJob:
    """What one rank does for one checkpoint."""

    writer: CheckpointEngine
    info: CheckpointCommitInfo
    node: StorageNode
    keep_last: int | None
    head: Mapping[str, Any]
    put_converter: Callable[[str], None]

    @property
    def folder(self) -> str:
        return os.path.join(self.info.save_dir, file_names.saving(self.info.tag))

    def prepare(self) -> None:
        if self.node.publishes:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.makedirs(self.folder)

    def write(self, description: Mapping[str, Any], fill: Callable[[Put], None]) -> None:
        """Write this rank's files and its manifest part; `fill`'s tensors own their storage."""
        paths: list[str] = []

        def put(name: str, content: object) -> None:
            paths.append(os.path.join(self.folder, name))
            self.writer.save(content, paths[-1])

        self.writer.set_commit_info(self.info)
        self.writer.create(self.info)
        fill(put)
        if self.writer.commit(self.info) is False:
            raise CheckpointError(
                f"{type(self.writer).__name__}.commit() says that {self.folder} is not complete"
            )
        self.writer.set_commit_info(None)
        records: dict[str, FileRecord] = {}
        for path in paths:
            found = self.writer.records_of(path)
            records.update(
                (os.path.relpath(name, self.folder), record) for name, record in found.items()
            )
        write_part(self.folder, self.node.rank, records, description)

    def publish(self) -> None:
        """Give the folder its name, when all ranks have written; see [Note: sequence of a save]."""
        if not self.node.publishes:
            return
        save_dir, tag = self.info.save_dir, self.info.tag
        merge_parts(self.folder, self.node.ranks, self.head)
        self.put_converter(save_dir)
        replace_folder(self.folder, os.path.join(save_dir, tag))
        if self.info.save_latest:
            write_latest(save_dir, tag)
        if self.keep_last is not None:
            remove_oldest(save_dir, self.keep_last)
        logger.info(f"saved checkpoint {os.path.join(save_dir, tag)}")

    def abandon(self) -> None:
        """Remove what was written, when not all ranks could: a full disk is why most saves fail."""
        if self.node.publishes:
            shutil.rmtree(self.folder, ignore_errors=True)


def put_converter(save_dir: str) -> None:
    """Leave `zero_to_fp32.py` beside the checkpoints, which runs without this package."""
    path = os.path.join(save_dir, "zero_to_fp32.py")
    source = converter().encode()
    if os.path.isfile(path):
        with open(path, "rb") as file:
            if file.read() == source:
                return
    temporary = os.path.join(save_dir, file_names.saving(os.path.basename(path)))
    write_bytes(temporary, source, flush=False)
    try:
        os.chmod(temporary, 0o755)
    except OSError as error:  # Azure's and FUSE's file systems have no modes
        log_once(f"{path} is not executable, call it by python: {error}")
    os.replace(temporary, path)


@functools.lru_cache(maxsize=1)
def converter() -> str:
    """The source of `utils.zero_to_fp32` and of what it reads by, as one program that stands
    alone.
    """
    parts: dict[str, str] = {}
    imports: set[str] = set()
    modules: set[str] = set()

    def add(name: str) -> None:
        if name in parts or name == _lazy.__name__:
            return
        source = inspect.getsource(importlib.import_module(name))
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("deepspeed"):
                package = importlib.import_module(str(node.module))
                for imported in node.names:
                    if hasattr(package, "__path__"):
                        modules.add(imported.asname or imported.name)
                        add(f"{node.module}.{imported.name}")
                    else:
                        add(package.__name__)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imports.add(ast.unparse(node))
            elif not _is_of_the_module(node):
                continue
            for number in range(node.lineno - 1, node.end_lineno or 0):
                lines[number] = ""
        body = re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip()
        parts[name] = f"# {name}\n\n\n{body}\n"

    add(zero_to_fp32.__name__)
    aliases = " = ".join(sorted(modules))
    return "\n\n".join(
        (
            f'#!/usr/bin/env python\n"""{zero_to_fp32.__doc__}"""\n',
            "\n".join(sorted(imports)) + "\n",
            "class _ThisFile:\n    def __getattr__(self, name):\n        return globals()[name]\n",
            f"{aliases} = _ThisFile()\n",
            *parts.values(),
        )
    )


def _is_of_the_module(node: ast.stmt) -> bool:
    return (
        (isinstance(node, ast.Expr) and node.lineno <= 2)
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("__"))
    )
