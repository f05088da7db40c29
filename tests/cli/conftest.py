"""What the command line sets for its process is put back after each test."""

import logging
import sys

import pytest


@pytest.fixture(autouse=True)
def _process_as_it_was(monkeypatch):
    logger = logging.getLogger("covey")
    before = logger.handlers[:], logger.level, logger.propagate
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield
    logger.handlers[:], logger.level, logger.propagate = before
