"""Which checkpoints of a folder are published, in which order, and which of them may go.

Only folders with a manifest count: others were written by someone else, and nobody here removes
them.
"""

from __future__ import annotations

import os
import shutil

from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.constants import UNIVERSAL_FOLDER
from deepspeed.checkpoint.files import read_latest, sync_folder


def published_tags(save_dir: str) -> list[str]:
    """Names of the checkpoints with a manifest, the newest last: the manifest's time counts, which
    `cp -a` keeps.
    """
    times: list[tuple[int, str]] = []
    for name in os.listdir(save_dir) if os.path.isdir(save_dir) else ():
        manifest = os.path.join(save_dir, name, file_names.MANIFEST)
        # A universal checkpoint was made on purpose of another: it is no save, and is not in turn
        # to be removed.
        is_universal = os.path.isdir(os.path.join(save_dir, name, UNIVERSAL_FOLDER))
        if not name.startswith(".") and os.path.isfile(manifest) and not is_universal:
            times.append((os.stat(manifest).st_mtime_ns, name))
    return [name for _, name in sorted(times)]


def remove_oldest(save_dir: str, keep_last: int) -> list[str]:
    """Remove published checkpoints but the newest `keep_last`, and but that which `latest` names.

    Each is renamed first, so that a kill leaves no part of it under its name; what an earlier kill
    left is removed too.

    Returns:
        The tags that were removed.
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
    """The tag to load where several folders, one per node, should hold the same checkpoints.

    Args:
        known: Of each folder: what `latest` names, and `published_tags`.

    Returns:
        What `latest` names, if it is the same everywhere; otherwise (a node was killed before it
        had published) the newest checkpoint that all have, in the order of the first folder; None
        if there is none.
    """
    latest = {tag for tag, _ in known}
    if len(latest) == 1:
        return latest.pop()
    common = set.intersection(*(set(tags) for _, tags in known))
    return next((tag for tag in reversed(known[0][1]) if tag in common), None)
