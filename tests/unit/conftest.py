"""Makes `unit.workers` a plugin of the tests below this directory."""

from unit.workers import pytest_cmdline_main, pytest_collection_modifyitems  # noqa: F401
