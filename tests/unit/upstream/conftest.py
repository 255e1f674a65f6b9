"""The programs that edit upstream, and the made-up tree that they edit."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from unit.upstream import made_up

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def programs() -> Any:
    """The modules of scripts/upstream by name."""
    sys.path.insert(0, str(ROOT / "scripts" / "upstream"))
    before = set(sys.modules)
    try:
        names = ("catalogue", "fix", "own_tests", "releases", "runs", "table", "trees")
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(ROOT / "scripts" / "upstream"))
        for name in set(sys.modules) - before:
            path = getattr(sys.modules[name], "__file__", None) or ""
            if path.startswith(str(ROOT / "scripts")):
                del sys.modules[name]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A made-up source tree."""
    return made_up.write(tmp_path / "upstream")
