"""Makes `unit.workers` a plugin of the tests below this directory."""

from unit.workers import pytest_cmdline_main, pytest_xdist_make_scheduler  # noqa: F401
