"""The programs that edit upstream, and the made-up tree that they edit."""

import sys
from pathlib import Path
from types import ModuleType
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
        import catalogue
        import fix
        import own_tests
        import releases
        import runs
        import table
        import trees

        modules: dict[str, ModuleType] = {
            "catalogue": catalogue,
            "fix": fix,
            "own_tests": own_tests,
            "releases": releases,
            "runs": runs,
            "table": table,
            "trees": trees,
        }
        yield modules
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
