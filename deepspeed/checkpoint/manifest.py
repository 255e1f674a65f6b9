"""The manifest of a checkpoint: every file with its size and checksum, and what each rank says is
in the files that it wrote.

Each rank leaves its part in the folder, as a hidden file; the rank that publishes the folder makes
`manifest.json` of all parts and removes them. The manifest is JSON whose first line is the checksum
of all that follows, so a changed, exchanged or shortened manifest shows like any other file. What
descriptions mean is `runtime.checkpointing.description`'s and `checkpoint.verification`'s; here
they are only kept. A folder without a manifest was written by upstream or by an older version,
unless its model files say that there was one (`constants.MANIFEST_VERSION`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from deepspeed.checkpoint.checksum import Checksum, FileRecord
from deepspeed.checkpoint.file_names import MANIFEST, manifest_part
from deepspeed.checkpoint.files import CheckpointError, sync_folder

VERSION = 1
_FIRST_LINE = b'{"checksum":"%s",\n'

__all__ = [
    "MANIFEST",
    "VERSION",
    "FileRecord",
    "Manifest",
    "merge_parts",
    "read_manifest",
    "write_part",
]


class Manifest(NamedTuple):
    """What `manifest.json` says.

    Attributes:
        head: What the publishing rank knows of the whole: tag, version, counters, how the run is
            divided.
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
        """Whether all ranks of the run wrote into this folder; with node-local storage those of one
        node did.
        """
        return len(self.parts) == self.head["world_size"]


def write_part(
    folder: str, rank: int, files: Mapping[str, FileRecord], description: Mapping[str, Any]
) -> None:
    """Leave what a rank knows of its files in the folder. Not flushed: it is merged, or nobody
    reads the folder.

    Args:
        folder: The unfinished checkpoint.
        rank: The global rank.
        files: Name, relative to the folder -> record, of every file that it wrote.
        description: What is in them; JSON. Under "files", what is said of files that it did not
            write is left out: a rank describes all that it has, and what several have is written by
            one.
    """
    # A writer may make a folder of a file.
    written = {name.split("/")[0] for name in files}
    own = {
        name: content for name, content in description.get("files", {}).items() if name in written
    }
    content = {
        "files": {name: list(record) for name, record in files.items()},
        "description": {**description, "files": own},
    }
    with open(os.path.join(folder, manifest_part(rank)), "wb") as file:
        file.write(_dumped(content))


def merge_parts(folder: str, ranks: Iterable[int], head: Mapping[str, Any]) -> None:
    """Make the manifest of the parts of `ranks`, flush it to disk, and remove the parts.

    Args:
        folder: The unfinished checkpoint; all ranks have left their parts.
        ranks: Whose parts there are.
        head: See `Manifest.head`; JSON.

    Raises:
        CheckpointError: A part is missing, or two ranks say that they wrote one file.
    """
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
    with open(os.path.join(folder, MANIFEST), "wb") as file:
        file.write(_first_line(body) + body)
        file.flush()
        os.fsync(file.fileno())
    for path in paths.values():
        os.remove(path)
    sync_folder(folder)


def read_manifest(folder: str) -> Manifest | None:
    """The manifest of a checkpoint folder; None if it has none.

    Raises:
        CheckpointError: It is damaged, or of a later version.
    """
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


def _dumped(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _first_line(body: bytes) -> bytes:
    checksum = Checksum()
    checksum.update(body)
    return _FIRST_LINE % checksum.value().encode()
