"""Lets these tests import the examples and benchmarks, which are scripts, not a package."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
