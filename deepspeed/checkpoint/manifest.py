"""The manifest of a checkpoint: each file's size and checksum, and what its rank says is in it.

Each rank leaves its part in the folder, as a hidden file; the rank that publishes makes
`manifest.json` of all parts: JSON whose first line is the checksum of the rest. A folder without
one was written by upstream or by an older version, unless its model files say that there was one
(`constants.MANIFEST_VERSION`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.constants import LATEST, UNIVERSAL_FOLDER
from deepspeed.checkpoint.file_names import MANIFEST, manifest_part
from deepspeed.checkpoint.file_writer import Checksum, FileRecord, write_bytes
from deepspeed.checkpoint.files import CheckpointError, read_latest, sync_folder

VERSION = 1
_FIRST_LINE = b'{"checksum":"%s",\n'


class Manifest(NamedTuple):
    """What `manifest.json` says.

    Attributes:
        head: What the publishing rank knows of all: tag, version, counters, division of the run.
        files: Name of a file in the folder -> its bytes.
        writers: Name of a file -> the rank that wrote it.
        parts: Rank -> what it describes of its files.
    """

    head: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    writers: Mapping[str, int]
    parts: Mapping[int, Mapping[str, Any]]

    @property
    def is_whole(self) -> bool:
        """Whether all ranks wrote into this folder; with node-local storage, a node's did. What
        `ds_to_universal` writes is of no ranks.
        """
        return len(self.parts) == self.head.get("world_size")


def write_part(
    folder: str, rank: int, files: Mapping[str, FileRecord], description: Mapping[str, Any]
) -> None:
    """Leave what a rank knows of its files. Not flushed: it is merged, or nobody reads it."""
    # A writer may make a folder of a file.
    written = {name.split("/")[0] for name in files}
    own = {name: facts for name, facts in description.get("files", {}).items() if name in written}
    content = {
        "files": {name: list(record) for name, record in files.items()},
        "description": {**description, "files": own},
    }
    write_bytes(os.path.join(folder, manifest_part(rank)), _dumped(content), flush=False)


def merge_parts(folder: str, ranks: Iterable[int], head: Mapping[str, Any]) -> None:
    """Make the manifest of the parts of `ranks`, flush it to disk, and remove the parts."""
    files: dict[str, list[Any]] = {}
    parts: dict[int, Any] = {}
    paths = {rank: os.path.join(folder, manifest_part(rank)) for rank in ranks}
    for rank, path in paths.items():
        try:
            with open(path, "rb") as file:
                part = json.load(file)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing: rank {rank} has not finished its files, or another save "
                "removed it"
            ) from None
        for name, record in part["files"].items():
            if name in files:
                raise CheckpointError(
                    f"{os.path.join(folder, name)} was written by rank {files[name][2]} and by "
                    f"rank {rank}"
                )
            files[name] = [*record, rank]
        parts[rank] = part["description"]
    body = _dumped({"version": VERSION, "head": head, "files": files, "parts": parts})[1:]
    write_bytes(os.path.join(folder, MANIFEST), _first_line(body) + body)
    for path in paths.values():
        os.remove(path)
    sync_folder(folder)


def read_manifest(folder: str) -> Manifest | None:
    """The manifest of a checkpoint folder; None if it has none."""
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    first = content[: len(_first_line(b""))]
    body = content[len(first) :]
    if first != _first_line(body):
        raise CheckpointError(
            f"{path} ({len(content)} bytes) is damaged: its first line is not the checksum of the "
            "rest. Restore the file, load another tag, or load without checks by "
            'checkpoint.verify "off"'
        )
    known = json.loads(b"{" + body)
    if known["version"] != VERSION:
        raise CheckpointError(
            f"{path} has version {known['version']}, this deepspeed reads version {VERSION}: use a "
            "newer one"
        )
    return Manifest(
        known["head"],
        {name: FileRecord(size, checksum) for name, (size, checksum, _) in known["files"].items()},
        {name: rank for name, (_, _, rank) in known["files"].items()},
        {int(rank): part for rank, part in known["parts"].items()},
    )


def _dumped(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _first_line(body: bytes) -> bytes:
    checksum = Checksum()
    checksum.update(body)
    return _FIRST_LINE % checksum.value().encode()


def write_latest(save_dir: str, tag: str, name: str = LATEST) -> None:
    """Let the file `name` name `tag`, in one rename."""
    temporary = os.path.join(save_dir, file_names.saving(name))
    write_bytes(temporary, tag.encode())
    os.replace(temporary, os.path.join(save_dir, name))
    sync_folder(save_dir)


def published_tags(save_dir: str) -> list[str]:
    """Names of the checkpoints with a manifest, the newest last by the manifest's own time."""
    times: list[tuple[int, str]] = []
    for name in os.listdir(save_dir) if os.path.isdir(save_dir) else ():
        manifest = os.path.join(save_dir, name, file_names.MANIFEST)
        # A universal checkpoint was made on purpose: it is no save, and not in turn to be removed.
        is_universal = os.path.isdir(os.path.join(save_dir, name, UNIVERSAL_FOLDER))
        if not name.startswith(".") and os.path.isfile(manifest) and not is_universal:
            times.append((os.stat(manifest).st_mtime_ns, name))
    return [name for _, name in sorted(times)]


def remove_oldest(save_dir: str, keep_last: int) -> list[str]:
    """Remove published checkpoints but the newest `keep_last` and that which `latest` names.

    Each is renamed first, so that a kill leaves no part of it under its name.
    """
    latest = read_latest(save_dir)
    removed = [tag for tag in published_tags(save_dir)[:-keep_last] if tag != latest]
    for tag in removed:
        aside = os.path.join(save_dir, file_names.removed(tag))
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(os.path.join(save_dir, tag), aside)
    if removed:
        sync_folder(save_dir)
    for name in os.listdir(save_dir):
        if file_names.is_removed(name):
            shutil.rmtree(os.path.join(save_dir, name), ignore_errors=True)
    return removed


def newest_common_tag(known: list[tuple[str | None, list[str]]]) -> str | None:
    """What `latest` names, if it is the same in all folders; else the newest checkpoint of all."""
    latest = {tag for tag, _ in known}
    if len(latest) == 1:
        return latest.pop()
    common = set.intersection(*(set(tags) for _, tags in known))
    return next((tag for tag in reversed(known[0][1]) if tag in common), None)
