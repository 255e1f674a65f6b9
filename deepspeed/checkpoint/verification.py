"""Holds a checkpoint folder against its manifest: names, sizes, checksums, tag, every element once.

Used by ranks that load, each of which reads a share of the files, and offline by
`verify_checkpoint` and `ds_checkpoint verify`. Only bytes and JSON are read, nothing is unpickled.
What the model that loads must be like is checked by who reads the content.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.file_names import CHECKPOINT_SUFFIXES, MANIFEST, replaced
from deepspeed.checkpoint.file_writer import file_checksum
from deepspeed.checkpoint.files import CheckpointError, read_latest
from deepspeed.checkpoint.manifest import Manifest, published_tags, read_manifest

FULL, SIZES, OFF = "full", "sizes", "off"
LEVELS = (FULL, SIZES, OFF)


class _Fragment(NamedTuple):
    """Elements `start` to `end` of a parameter's optimizer state in a file."""

    start: int
    end: int
    file: str
    slots: frozenset[str]


def existing_tags(load_dir: str) -> list[str]:
    """Names of the folders in a folder of checkpoints that are not hidden, sorted."""
    if not os.path.isdir(load_dir):
        return []
    return sorted(
        n
        for n in os.listdir(load_dir)
        if not n.startswith(".") and os.path.isdir(os.path.join(load_dir, n))
    )


def latest_tag(load_dir: str) -> str | None:
    """The tag that `latest` names; None if there is no such file."""
    path = os.path.join(load_dir, keys.LATEST)
    try:
        tag = read_latest(load_dir)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: {error}. {_tags_there(load_dir)}") from error
    if tag is not None and tag not in existing_tags(load_dir) and not _is_put_aside(load_dir, tag):
        raise CheckpointError(f"{path} names {tag!r}, which is not there. {_tags_there(load_dir)}")
    return tag


def newest_published(load_dir: str) -> str | None:
    """The newest checkpoint saved for `latest` to name, also if its manifest is damaged."""
    for tag in reversed(published_tags(load_dir)):
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(os.path.join(load_dir, tag))
            if manifest is None or not manifest.head["latest"]:
                continue
        return tag
    return None


def _is_put_aside(load_dir: str, tag: str) -> bool:
    """A save was killed while it replaced the tag; who loads puts the older folder back."""
    return bool(tag) and os.path.isdir(os.path.join(load_dir, replaced(tag)))


def _tags_there(load_dir: str) -> str:
    return f"Give one of the tags that are there: {', '.join(existing_tags(load_dir)) or 'none'}"


def check_folder(
    folder: str, manifest: Manifest, share: tuple[int, int] = (0, 1), checksums: bool = True
) -> list[str]:
    """What is wrong with a folder, in words; each checks a share of files, the first all else."""
    problems, (reader, readers) = [], share
    if reader == 0:
        tag = os.path.basename(os.path.normpath(folder))
        if manifest.head["tag"] != tag:
            problems.append(
                f"{os.path.join(folder, MANIFEST)} is that of tag {manifest.head['tag']!r}, the "
                f"folder's name is {tag!r}"
            )
        problems += [
            f"{os.path.join(folder, name)} is not of this checkpoint"
            for name in _foreign_files(folder, manifest)
        ]
    for name in sorted(manifest.files)[reader::readers]:
        problems += _check_file(os.path.join(folder, name), *manifest.files[name], checksums)
    return problems


def _foreign_files(folder: str, manifest: Manifest) -> list[str]:
    found = (
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, _, names in os.walk(folder)
        for name in names
    )
    return sorted(
        name for name in found if name.endswith(CHECKPOINT_SUFFIXES) and name not in manifest.files
    )


def _check_file(path: str, size: int, checksum: str, checksums: bool) -> Iterator[str]:
    try:
        found = os.path.getsize(path)
        if found != size:
            yield f"{path} has {found} bytes, {size} were written: it is truncated or another's"
        elif checksums and (actual := file_checksum(path)) != checksum:
            yield f"{path} has checksum {actual}, {checksum} was written: damaged, or another's"
    except FileNotFoundError:
        yield f"{path} is missing"
    except OSError as error:
        yield f"{path} cannot be read: {error}"


def check_coverage(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is wrong with what ranks describe: a trained element in no file, or in two."""
    by_part: dict[int, dict[str, Mapping[str, Any]]] = {}
    for part in parts:
        # A file of one name is on several nodes, where each has a folder of its own.
        by_part.setdefault(part["part"], {}).update(part["files"])
    return [problem for files in by_part.values() for problem in _check_part(files)]


def _check_part(files: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The same for the ranks that hold one part of the model."""
    numels: dict[str, int] = {}
    for content in files.values():
        for name, (shape, _, kind, *tied_to) in content.get("weights", {}).items():
            if kind == "trained" and not tied_to:
                numels[name] = prod(shape)
    fragments = _fragments(files)
    for name in {**numels, **fragments}:
        found = sorted(fragments.get(name, ()))
        numel = numels.get(name)
        slots = frozenset.union(*(fragment.slots for fragment in found)) if found else frozenset()
        for slot in (None, *sorted(slots)):
            holding = [fragment for fragment in found if slot is None or slot in fragment.slots]
            problem = _gap_or_overlap(holding, numel)
            if problem:
                yield f"optimizer state of {name}{f' ({slot})' if slot else ''}: {problem}"
                break


def _fragments(files: Mapping[str, Mapping[str, Any]]) -> dict[str, list[_Fragment]]:
    found: dict[str, list[_Fragment]] = {}
    for file, content in sorted(files.items()):
        slots = [frozenset(entry) for entry in content.get("slots", ())]
        known = (
            {(name, one.start) for name, of_name in found.items() for one in of_name}
            if content.get("whole")
            else ()
        )
        for name, start, numel, which in content.get("fragments", ()):
            # A known one is a copy of what an expert rank before it has, which nobody reads.
            if (name, start) not in known:
                found.setdefault(name, []).append(
                    _Fragment(start, start + numel, file, slots[which])
                )
    return found


def _gap_or_overlap(fragments: list[_Fragment], numel: int | None) -> str | None:
    end, last = 0, ""
    for fragment in fragments:
        if fragment.start > end:
            return f"elements {end} to {fragment.start} are in no file"
        if fragment.start < end:
            return (
                f"elements {fragment.start} to {min(end, fragment.end)} are in {last} and in "
                f"{fragment.file}"
            )
        end, last = fragment.end, fragment.file
    if numel is not None and end < numel:
        return f"elements {end} to {numel} are in no file"
    if numel is not None and end > numel:
        return f"{last} has {end} elements, the parameter {numel}"
    return None


def raise_problems(folder: str, problems: list[str]) -> None:
    """Raise if there are any."""
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{folder} is not as its {MANIFEST} says: {'; '.join(problems[:5])}{more}. Nothing was "
            "loaded. Restore what is wrong, or load another tag "
            f"({', '.join(existing_tags(os.path.dirname(folder)))})"
        )


def verify_checkpoint(load_dir: str, tag: str | None = None, level: str = FULL) -> list[str]:
    """Check a checkpoint without a model and without ranks."""
    if level not in (FULL, SIZES):
        raise ValueError(f'level: {level!r} is not known; use "{FULL}" or "{SIZES}"')
    if not os.path.isdir(load_dir):
        return [f"{load_dir} is not there, or is no folder"]
    if tag is None and os.path.isfile(os.path.join(load_dir, MANIFEST)):
        load_dir, tag = os.path.split(os.path.abspath(load_dir))
    try:
        tag = latest_tag(load_dir) if tag is None else str(tag)
        if tag is None:
            return [f"{load_dir} has no file {keys.LATEST!r}. {_tags_there(load_dir)}"]
        folder = os.path.join(load_dir, tag)
        if not os.path.isdir(folder):
            return [f"{folder} is not there. {_tags_there(load_dir)}"]
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    if manifest is None:
        return [
            f"{folder} has no {MANIFEST}: it was lost, or upstream or an older version wrote the "
            "folder and there never was one"
        ]
    problems = check_folder(folder, manifest, checksums=level == FULL)
    return problems + (check_coverage(manifest.parts.values()) if manifest.is_whole else [])
