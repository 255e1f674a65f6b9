"""Which variables a launch over several nodes hands to all of them.

Owns: the prefixes that are forwarded, and files of settings. Does not own: how an engine carries
them (`multinode_runner`). Called by: `nodes`.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from deepspeed.launcher.constants import DEEPSPEED_ENVIRONMENT_NAME, DEEPSPEED_ENVIRONMENT_PATHS

EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "GLOO", "TORCH", "OMP", "DS_"]
"""Variables whose names begin so go to all nodes, and those that the accelerator adds. Programs
that start the launcher add their own to `runner.EXPORT_ENVS`, which is this list.
"""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def forwarded_environment(environment: Mapping[str, str], prefixes: list[str]) -> dict[str, str]:
    """Return the variables that all nodes get; those of settings files win."""
    chosen = {
        key: value
        for key, value in environment.items()
        if key.startswith(tuple(prefixes)) and _NAME.fullmatch(key)
    }
    # `python -m` on a node finds what it finds here: the current folder too.
    chosen["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.getcwd(), environment.get("PYTHONPATH", "")])
    )
    for folder in DEEPSPEED_ENVIRONMENT_PATHS:
        path = Path(folder) / DEEPSPEED_ENVIRONMENT_NAME
        if path.is_file():
            chosen.update(parse_environment_file(path.read_text(encoding="utf-8"), str(path)))
    return chosen


def parse_environment_file(text: str, path: str) -> dict[str, str]:
    """Read `KEY=VALUE` lines; values are taken as they stand, `#` starts a comment line."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        key, equals, value = stripped.partition("=")
        if not equals or not _NAME.fullmatch(key.strip()):
            raise ValueError(f"{path}: bad line {line!r}; write KEY=VALUE")
        found[key.strip()] = value.strip()
    return found
