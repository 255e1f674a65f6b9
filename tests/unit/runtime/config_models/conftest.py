"""What tests of the configuration share: one process, and the warnings that are logged."""

import pytest

from unit.v1.zero.usage import Warnings


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def warnings():
    """Collect the texts of the warnings that are logged."""
    with Warnings() as said:
        yield said.texts
