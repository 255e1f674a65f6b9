"""What tests of the configuration share: one process, and the warnings that are logged."""

import logging

import pytest

from deepspeed.utils.logging import _log_dist_once, logger


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def warnings():
    """Collect the texts of the warnings that are logged."""
    texts = []

    class Collect(logging.Handler):
        def emit(self, record):
            if record.levelno == logging.WARNING:
                texts.append(record.getMessage())

    handler = Collect()
    _log_dist_once.cache_clear()
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)
